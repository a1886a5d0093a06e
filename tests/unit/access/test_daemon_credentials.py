from datetime import UTC, datetime
from pathlib import Path

import pytest
from gyre_daemon.access.credentials import FailureLimit, TokenStore
from gyre_daemon.errors import ConfigError, NotAuthenticated, Overloaded
from gyre_daemon.runtime.listen import check_tls, parse_address

FIRST, SECOND = "a" * 32, "b" * 32


def token_file(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def test_a_token_is_valid_until_it_expires(tmp_path: Path) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    text = f"{FIRST} 2026-01-01T00:01:00Z\n{SECOND} 2026-01-01T02:00:00+02:00 \n"
    store = TokenStore({"ci": token_file(tmp_path / "ci", text)}, lambda: now)
    assert store.name_of(FIRST) == "ci"
    with pytest.raises(NotAuthenticated, match="has expired"):
        store.name_of(SECOND)
    now += 60
    with pytest.raises(NotAuthenticated, match="has expired"):
        store.name_of(FIRST)


def test_the_last_token_of_a_name_says_when_it_expires(tmp_path: Path) -> None:
    files = {
        "ci": f"{FIRST} 2026-01-01T00:00:00Z\n{SECOND} 2026-02-01T00:00:00Z\n",
        "for-ever": f"{'c' * 32} 2026-01-01T00:00:00Z\n{'d' * 32}\n",
    }
    store = TokenStore({name: token_file(tmp_path / name, text) for name, text in files.items()})
    assert store.expiries() == {"ci": datetime(2026, 2, 1, tzinfo=UTC).timestamp()}


@pytest.mark.parametrize("token", ["", FIRST[1:], FIRST + "a", "\udc80", SECOND])
def test_other_texts_are_no_token(tmp_path: Path, token: str) -> None:
    store = TokenStore({"ci": token_file(tmp_path / "ci", FIRST)})
    with pytest.raises(NotAuthenticated, match="does not know"):
        store.name_of(token)


def test_a_link_to_a_secret_of_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_text(FIRST)
    shared.chmod(0o604)
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(ConfigError, match=r"others may use .* \(mode 0604\): chmod 600"):
        TokenStore({"ci": str(tmp_path / "link")})


def test_failures_of_an_address_are_bounded_and_recover() -> None:
    now, reason = 0.0, NotAuthenticated("no")
    limit = FailureLimit(lambda: now)
    answers = [limit.refuse("192.0.2.1", reason) for _ in range(20)]
    assert [answer is reason for answer in answers] == [True] * 10 + [False] * 10
    assert isinstance(answers[-1], Overloaded)
    assert 0 < float(answers[-1].facts["retry_after_s"]) <= 6
    assert limit.refuse("192.0.2.2", reason) is reason
    now += 6.001
    assert limit.refuse("192.0.2.1", reason) is reason
    assert limit.refuse("192.0.2.1", reason) is not reason


def test_the_addresses_of_one_ipv6_network_count_together() -> None:
    limit, reason = FailureLimit(lambda: 0.0), NotAuthenticated("no")
    answers = [limit.refuse(f"2001:db8::{number:x}", reason) for number in range(1, 21)]
    assert sum(answer is reason for answer in answers) == 10
    assert limit.refuse("2001:db8:0:1::1", reason) is reason


@pytest.mark.parametrize(
    ("text", "has_certificate", "has_credentials", "words"),
    [
        ("tls:0.0.0.0:1", True, True, None),
        ("tls:[::]:1", True, True, None),
        ("tls:127.0.0.1:1", True, False, None),
        ("tcp:127.0.0.1:1", False, False, None),
        ("tls:127.0.0.1:1", False, True, "needs a certificate"),
        ("tls:0.0.0.0:1", True, False, "nothing says who may call"),
    ],
)
def test_a_tls_address_needs_a_certificate_and_beyond_loopback_credentials(
    text: str, has_certificate: bool, has_credentials: bool, words: str | None
) -> None:
    addresses = [parse_address(text)]
    terms = {"has_certificate": has_certificate, "has_credentials": has_credentials}
    if words is None:
        check_tls(addresses, **terms)
    else:
        with pytest.raises(ConfigError, match=words):
            check_tls(addresses, **terms)
