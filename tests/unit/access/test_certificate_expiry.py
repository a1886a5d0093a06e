"""When certificates end, compared with what the library that made them says."""

import contextlib
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography import x509
from gyre_daemon.access.credentials import TokenStore, expires_at
from gyre_daemon.access.policy import Limits
from gyre_daemon.errors import NotAuthenticated
from gyre_daemon.service.guard import Callers

from tests.certificates import Authority


def call_with(chain: bytes) -> Any:
    proven = {"x509_common_name": [b"trainer"], "x509_pem_cert": [chain]}
    return cast(
        "Any",
        SimpleNamespace(
            auth_context=lambda: proven, invocation_metadata=tuple, peer=lambda: "ipv4:10.0.0.1:1"
        ),
    )


@pytest.mark.parametrize("days", [-1, 0.5, 400, 365 * 40])
def test_a_certificate_ends_when_it_says(tmp_path: Path, days: float) -> None:
    """Up to 2049 the year has two digits, and then four."""
    pem = Authority(tmp_path).sign("trainer", days=days).certificate.read_bytes()
    (certificate,) = x509.load_pem_x509_certificates(pem)
    assert expires_at(pem) == certificate.not_valid_after_utc.timestamp()
    about = datetime.now(UTC) + timedelta(days=days)
    assert abs(expires_at(pem) - about.timestamp()) < 3600


def test_of_a_chain_the_first_end_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pems = [authority.sign(f"x{days}", days=days).certificate.read_bytes() for days in (9, 2, 5)]
    assert expires_at(b"".join(pems)) == expires_at(pems[1])


def test_a_caller_is_known_until_its_certificate_ends(tmp_path: Path) -> None:
    chain = Authority(tmp_path).sign("trainer").certificate.read_bytes()
    times = iter([expires_at(chain) - 1, expires_at(chain)])
    callers = Callers((), TokenStore({}), Limits(), lambda: next(times))
    assert callers.principal(call_with(chain)).name == "certificate:trainer"
    with pytest.raises(NotAuthenticated, match="certificate has expired"):
        callers.principal(call_with(chain))


def damaged(pem: bytes) -> Sequence[bytes]:
    generator = random.Random(0)
    lines = pem.decode().splitlines()
    cuts = ["\n".join([lines[0], *lines[1 : 1 + num], lines[-1]]).encode() for num in range(3)]
    flips = []
    for _ in range(300):
        place = generator.randrange(28, len(pem) - 30)
        flips.append(pem[:place] + bytes([generator.randrange(256)]) + pem[place + 1 :])
    return [b"", b"x", *cuts, *flips]


def test_what_is_no_certificate_is_refused_or_has_an_end(tmp_path: Path) -> None:
    pem = Authority(tmp_path).sign("trainer").certificate.read_bytes()
    ends = []
    for each in damaged(pem):
        with contextlib.suppress(NotAuthenticated):
            ends.append(expires_at(each))
    assert len(ends) < len(damaged(pem)) - 5
    for each in (b"", b"x"):
        with pytest.raises(NotAuthenticated, match="the client's certificate cannot be read"):
            expires_at(each)
