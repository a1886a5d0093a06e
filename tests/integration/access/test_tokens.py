"""Tokens of callers over TCP: files that change, expire, or must not be used."""

import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from gyre_client import Loader
from gyre_client.errors import GyreError, NotAuthenticated
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_daemon import cli
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.certificates import Authority
from tests.conftest import StartDaemon, to_toml
from tests.secure_daemons import (
    TOKEN,
    SecureDaemon,
    environment,
    free_port,
    start_secure,
    write_secret,
)

DEADLINE_S = 120.0
OTHER = "n" * 32


@pytest.fixture
def secure(gyred: StartDaemon, tmp_path: Path) -> SecureDaemon:
    return start_secure(gyred, tmp_path / "secure")


def wait_for_event(secure: SecureDaemon, name: str, begin: int) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = [each for each in secure.daemon.events(begin) if each["event"] == name]
        if found:
            return found[0]
        assert time.monotonic() < deadline, f"no event {name!r}"
        time.sleep(0.05)


def log_size(secure: SecureDaemon) -> int:
    return secure.daemon.log_path.stat().st_size


def status_with(secure: SecureDaemon, token: Path | None) -> GyreError | None:
    """Asks for the status; returns why that was refused."""
    with (
        environment(ca=secure.authority.path, token=token),
        Connection(parse_address(secure.address)) as connection,
    ):
        try:
            connection.status()
        except GyreError as refused:
            return refused
    return None


def test_no_token_a_wrong_one_and_an_expired_one_are_refused_at_once(
    secure: SecureDaemon, tmp_path: Path
) -> None:
    """By a Loader that would wait an hour for its daemon. The log says why, and no secret."""
    yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    begin = log_size(secure)
    write_secret(secure.token_file, f"{TOKEN} {yesterday}\n{'e' * 32}\n")
    wait_for_event(secure, "tokens reloaded", begin)
    for token, words in (
        (None, "asks for a token, and the call has none; set GYRE_TOKEN_FILE"),
        (write_secret(tmp_path / "wrong", OTHER), "does not know the token that was sent"),
        (secure.token_file, "the token 'ci' has expired"),
    ):
        with (
            environment(ca=secure.authority.path, token=token),
            pytest.raises(NotAuthenticated, match=words),
        ):
            Loader("numbers", batch_size=4, address=secure.address, reattach_timeout_s=3600.0)
    log = secure.daemon.log_path.read_text()
    assert log.count('"event": "authentication failed"') == 3
    assert TOKEN not in log
    assert OTHER not in log


def test_a_token_file_that_changes_counts_without_a_restart(secure: SecureDaemon) -> None:
    """Two tokens are valid at once; one that was taken away is not; a broken file keeps them."""
    mine = secure.token_file.with_name("mine")
    write_secret(mine, TOKEN)
    assert status_with(secure, mine) is None

    begin = log_size(secure)
    write_secret(secure.token_file, f"# both\n{OTHER}\n{TOKEN}  2100-01-01T00:00:00Z\n")
    assert wait_for_event(secure, "tokens reloaded", begin)["tokens"] == 2
    assert status_with(secure, mine) is None

    for text, mode in (("too short\n", 0o600), (f"{OTHER}\n", 0o644), ("", 0o600)):
        begin = log_size(secure)
        write_secret(secure.token_file, text).chmod(mode)
        wait_for_event(secure, "tokens refused", begin)
        assert status_with(secure, mine) is None

    begin = log_size(secure)
    write_secret(secure.token_file, f"{OTHER}\n")
    wait_for_event(secure, "tokens reloaded", begin)
    assert type(status_with(secure, mine)) is NotAuthenticated
    assert status_with(secure, secure.token_file) is None

    begin, gone = log_size(secure), write_secret(mine, OTHER)
    secure.token_file.unlink()
    wait_for_event(secure, "tokens removed", begin)
    assert type(status_with(secure, gone)) is NotAuthenticated


def test_failures_are_bounded_and_stand_in_nobodys_way(secure: SecureDaemon) -> None:
    """An address that fails too often gets no more reasons, and the log does not grow with it."""
    credentials = grpc.ssl_channel_credentials(secure.authority.path.read_bytes())
    codes = []
    with grpc.secure_channel(secure.address.removeprefix("tls:"), credentials) as channel:
        stub = LoaderStub(channel)
        for number in range(200):
            header = ("authorization", f"Bearer {number:032}")
            with pytest.raises(grpc.RpcError) as refused:
                stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S, metadata=(header,))
            codes.append(refused.value.code())
        assert codes[0] is grpc.StatusCode.UNAUTHENTICATED
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        assert "no valid credential; check the token, and try again" in str(refused.value.details())
        header = ("authorization", f"Bearer {TOKEN}")
        assert stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S, metadata=(header,)).pid
    num_lines = secure.daemon.log_path.read_text().count('"event": "authentication failed"')
    assert 1 <= num_lines < 150


def refused_start(folder: Path, config: dict[str, Any]) -> str:
    """What a daemon says that does not start."""
    path = folder / "refused.toml"
    path.write_text(to_toml(config))
    done = subprocess.run(
        [sys.executable, "-m", "gyre_daemon", "serve", "--config", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


def refused_check(folder: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What the check of a configuration says, in this process."""
    path = folder / "refused.toml"
    path.write_text(to_toml(config))
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-config", "--config", str(path)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_what_the_check_refuses_does_not_start(
    tmp_path: Path,
    secure_files: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes: tuple[dict[str, Any], ...] = ({"tls_key": "shared"}, {"tokens": {}})
    for change in changes:
        config = secure_files(change)
        *_warnings, error = refused_start(tmp_path, config).splitlines()  # it has no dataset, too
        assert f"{error}\n" == refused_check(tmp_path, config, capsys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": {}}, "nothing says who may call. Set `tls_client_ca`"),
        ({"tls_certificate": "", "tls_key": ""}, "set `tls_certificate` and `tls_key`"),
        ({"tls_key": ""}, "tls_certificate and tls_key go together"),
        ({"listen": ["tcp:0.0.0.0:0"]}, "Listen on tls:0.0.0.0:0 with `tls_certificate`"),
        ({"tokens": {"a b": "ci"}}, "the name 'a b' must have"),
        ({"tokens": {"ci": "shared"}}, "others may use"),
        ({"tokens": {"ci": "ci", "two": "ci"}}, "is also one of tokens.ci"),
        ({"tokens": {"ci": "missing"}}, "No such file or directory"),
        ({"tokens": {"ci": "bad_time"}}, "must have the time of expiry, with its time zone"),
        ({"tokens": {"ci": "short"}}, "must begin with a token of at least 32"),
        ({"tls_key": "shared"}, "others may use"),
        ({"tls_key": "ci"}, "must be a certificate and its private key"),
        ({"tls_client_ca": "ci"}, "holds no certificates in PEM"),
    ],
    ids=lambda value: value[:20].replace(" ", "_") if isinstance(value, str) else "",
)
def test_a_configuration_with_a_gap_is_refused(
    tmp_path: Path,
    change: dict[str, Any],
    words: str,
    secure_files: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refused_check(tmp_path, secure_files(change), capsys)
    assert words in said, said
    assert "Traceback" not in said
    assert TOKEN not in said


@pytest.fixture
def secure_files(tmp_path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A configuration that is open to other hosts; paths in a change are names of files here."""
    pair = Authority(tmp_path).sign("daemon")
    write_secret(tmp_path / "ci", TOKEN)
    write_secret(tmp_path / "shared", OTHER).chmod(0o644)
    write_secret(tmp_path / "short", "secret")
    write_secret(tmp_path / "bad_time", f"{TOKEN} 2030-01-01")

    def config(change: dict[str, Any]) -> dict[str, Any]:
        if "tokens" in change:
            change = {
                "tokens": {key: str(tmp_path / name) for key, name in change["tokens"].items()}
            }
        for key in ("tls_key", "tls_client_ca"):
            if change.get(key):
                change = {key: str(tmp_path / change[key])}
        return {
            "listen": [f"tls:0.0.0.0:{free_port()}"],
            "tls_certificate": str(pair.certificate),
            "tls_key": str(pair.key),
            "tokens": {"ci": str(tmp_path / "ci")},
            **change,
        }

    return config


def test_a_token_names_its_caller_on_loopback_without_tls(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """A wrong one is refused there too."""
    token = write_secret(tmp_path / "ci", TOKEN)
    address = f"tcp:127.0.0.1:{free_port()}"
    gyred({"listen": [f"unix:{tmp_path}/gyre.sock", address], "tokens": {"ci": str(token)}})
    for path, is_valid in ((token, True), (write_secret(tmp_path / "wrong", OTHER), False)):
        with environment(token=path), Connection(parse_address(address)) as connection:
            if is_valid:
                connection.status()
            else:
                with pytest.raises(NotAuthenticated):
                    connection.status()


def test_a_session_ends_with_its_token_and_goes_on_with_the_next(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """The client reads its file again. Without a valid token it fails, and does not hang."""
    secure = start_secure(gyred, tmp_path / "secure", settings={"lease_s": 2.0})
    mine = write_secret(tmp_path / "mine", TOKEN)
    with Loader("numbers", batch_size=8, address=secure.daemon.address) as loader:
        expected = [batch["sample_id"].tolist() for batch in islice(loader.stream(), 400)]
    with (
        environment(ca=secure.authority.path, token=mine),
        Loader("numbers", batch_size=8, address=secure.address, prefetch_batches=2) as loader,
    ):
        batches = loader.stream()
        seen = [next(batches)["sample_id"].tolist()]
        write_secret(mine, OTHER)
        begin = log_size(secure)
        write_secret(secure.token_file, f"{OTHER}\n")
        wait_for_event(secure, "authentication failed", begin)
        seen += [next(batches)["sample_id"].tolist() for _ in range(50)]
        assert seen == expected[:51]

        begin = log_size(secure)
        secure.token_file.unlink()
        wait_for_event(secure, "authentication failed", begin)
        with pytest.raises(NotAuthenticated, match="does not know the token"):
            for _ in islice(batches, 400):
                pass
