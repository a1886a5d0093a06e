"""Over TLS: a job of another host reads as one on the daemon's own does, and strangers do not."""

import logging
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import GyreError, InvalidRequest, NotAuthenticated
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.certificates import Authority, Certified
from tests.conftest import StartDaemon
from tests.secure_daemons import (
    TOKEN,
    SecureDaemon,
    environment,
    free_port,
    start_secure,
    write_secret,
)

DEADLINE_S = 120.0


@pytest.fixture
def secure(gyred: StartDaemon, tmp_path: Path) -> SecureDaemon:
    """A daemon with tokens."""
    return start_secure(gyred, tmp_path / "secure")


@pytest.fixture
def mutual(gyred: StartDaemon, tmp_path: Path) -> SecureDaemon:
    """A daemon that asks clients for certificates."""
    return start_secure(gyred, tmp_path / "mutual", with_tokens=False, with_client_ca=True)


def steps(loader: Loader, num: int) -> list[tuple[list[int], list[list[int]]]]:
    """The next steps: their sample ids and tokens."""
    return [
        (batch["sample_id"].tolist(), batch["tokens"].tolist())
        for batch in islice(loader.stream(), num)
    ]


def failure(address: str) -> GyreError:
    """What a Loader says that cannot connect; it must not try again for a minute."""
    with pytest.raises(GyreError) as refused:
        Loader("numbers", batch_size=4, address=address, reattach_timeout_s=3600.0)
    assert "gave up" not in str(refused.value)
    return refused.value


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.05)


def wait_for_event(secure: SecureDaemon, name: str, begin: int) -> dict[str, object]:
    def found() -> list[dict[str, object]]:
        return [each for each in secure.daemon.events(begin) if each["event"] == name]

    wait_until(lambda: bool(found()), name)
    return found()[0]


def log_size(secure: SecureDaemon) -> int:
    return secure.daemon.log_path.stat().st_size


def test_batches_over_tls_equal_those_over_the_socket(secure: SecureDaemon) -> None:
    with Loader("numbers", batch_size=8, address=secure.daemon.address) as loader:
        local = steps(loader, 60)
    with (
        environment(ca=secure.authority.path, token=secure.token_file),
        Loader("numbers", batch_size=8, address=secure.address) as loader,
    ):
        assert steps(loader, 60) == local


def test_a_loader_goes_on_where_it_was_when_the_daemon_comes_back(secure: SecureDaemon) -> None:
    with Loader("numbers", batch_size=8, address=secure.daemon.address) as loader:
        uninterrupted = steps(loader, 60)
    with (
        environment(ca=secure.authority.path, token=secure.token_file),
        Loader("numbers", batch_size=8, address=secure.address, prefetch_batches=4) as loader,
    ):
        seen = steps(loader, 5)
        secure.daemon.kill()
        secure.daemon.restart()
        assert seen + steps(loader, 55) == uninterrupted


PROGRAM = """
import sys
from gyre_client.command.cli import main
from gyre_client import Loader
assert main(["status"]) == 0
assert main(["describe", "numbers"]) == 0
with Loader("numbers", batch_size=8) as loader:
    for batch in loader:
        print("step", batch["sample_id"].tolist())
"""


def test_a_process_that_shares_no_folder_with_the_daemon_reads(
    secure: SecureDaemon, tmp_path: Path
) -> None:
    """It sees an empty file system where the daemon has its socket and its data."""
    with Loader("numbers", batch_size=8, address=secure.daemon.address) as loader:
        expected = [f"step {batch['sample_id'].tolist()}" for batch in loader]
    hidden, elsewhere = secure.token_file.parent, tmp_path / "elsewhere"
    elsewhere.mkdir()
    ca = elsewhere / "ca.pem"
    ca.write_bytes(secure.authority.path.read_bytes())
    token = write_secret(elsewhere / "token", TOKEN)
    command = [
        *("unshare", "--mount", "sh", "-ec"),
        f'mount -t tmpfs none "{hidden}" && test -z "$(ls "{hidden}")" && exec "$0" "$@"',
        *(sys.executable, "-c", PROGRAM),
    ]
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces need root")
    with environment(ca=ca, token=token), pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYRE_ADDRESS", secure.address)
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("step ")] == expected


def test_a_client_certificate_is_enough(mutual: SecureDaemon) -> None:
    with (
        environment(ca=mutual.authority.path, pair=mutual.authority.sign("trainer-3")),
        Loader("numbers", batch_size=8, address=mutual.address) as loader,
    ):
        assert len(next(loader)["sample_id"]) == 8


@pytest.mark.parametrize("kind", ["none", "foreign", "expired"])
def test_a_client_without_a_valid_certificate_is_refused_at_once(
    mutual: SecureDaemon, tmp_path: Path, kind: str
) -> None:
    stranger = Authority(tmp_path / "foreign", "foreign")
    pair = {
        "none": None,
        "foreign": stranger.sign("trainer-3"),
        "expired": mutual.authority.sign("trainer-4", days=-1),
    }[kind]
    with environment(ca=mutual.authority.path, pair=pair):
        error = failure(mutual.address)
    assert type(error) is NotAuthenticated
    assert "asks for a client certificate, and has none that it accepts" in str(error)
    assert "GYRE_CERTIFICATE_FILE" in str(error)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("foreign", "unable to get local issuer certificate"),
        ("host", "IP address mismatch"),
        ("expired", "certificate has expired"),
    ],
)
def test_a_daemon_that_does_not_prove_who_it_is_is_refused_at_once(
    gyred: StartDaemon, tmp_path: Path, kind: str, words: str
) -> None:
    secure = start_secure(gyred, tmp_path / "secure")
    ca = secure.authority.path
    if kind == "foreign":
        ca = Authority(tmp_path / "foreign", "foreign").path
    else:
        begin = log_size(secure)
        host, days = ("10.1.2.3", 1) if kind == "host" else ("127.0.0.1", -1)
        secure.certificate.replace(secure.authority.sign("other", host=host, days=days))
        wait_for_event(secure, "certificate reloaded", begin)
    with environment(ca=ca, token=secure.token_file):
        error = failure(secure.address)
    assert type(error) is NotAuthenticated
    assert words in str(error)
    assert "check the address, and GYRE_CA_FILE" in str(error)


def test_plain_text_to_a_tls_port_and_the_reverse_say_what_to_change(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    plain = f"tcp:127.0.0.1:{free_port()}"
    secure = start_secure(gyred, tmp_path / "secure")
    tls_port = secure.address.removeprefix("tls:")
    other = gyred({"listen": [f"unix:{tmp_path}/plain.sock", plain]})
    assert other.process
    with environment(ca=secure.authority.path):
        error = failure(f"tcp:{tls_port}")
        assert (type(error), "speaks TLS: use a tls: address" in str(error)) == (
            InvalidRequest,
            True,
        )
        error = failure(plain.replace("tcp:", "tls:"))
        assert (type(error), "does not speak TLS; use a tcp: address" in str(error)) == (
            InvalidRequest,
            True,
        )


def served_name(secure: SecureDaemon, pair: Certified | None = None) -> str:
    """The common name of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=secure.authority.path)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # its certificates have no key identifiers
    context.set_alpn_protocols(["h2"])
    if pair:
        context.load_cert_chain(pair.certificate, pair.key)
    host = parse_address(secure.address).host_and_port
    assert host
    with (
        socket.create_connection(host, DEADLINE_S) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as encrypted,
    ):
        subject = (encrypted.getpeercert() or {})["subject"]
    return dict(pair for part in subject for pair in part)["commonName"]  # type: ignore[misc]


def test_a_certificate_that_changes_is_served_without_a_restart(secure: SecureDaemon) -> None:
    """Sessions that are open go on; a broken file changes nothing."""
    with (
        environment(ca=secure.authority.path, token=secure.token_file),
        Loader("numbers", batch_size=8, address=secure.address) as loader,
    ):
        first = steps(loader, 3)
        assert served_name(secure) == "daemon"
        begin = log_size(secure)
        secure.certificate.replace(secure.authority.sign("renewed"))
        wait_for_event(secure, "certificate reloaded", begin)
        assert served_name(secure) == "renewed"

        begin = log_size(secure)
        secure.certificate.certificate.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
        refused = wait_for_event(secure, "certificate refused", begin)
        assert "cannot be used together" in str(refused["reason"])
        assert served_name(secure) == "renewed"

        begin = log_size(secure)
        secure.certificate.replace(secure.authority.sign("third"))
        secure.certificate.key.chmod(0o644)
        refused = wait_for_event(secure, "certificate refused", begin)
        wait_until(lambda: "chmod 600" in secure.daemon.log_path.read_text(), "mode of the key")
        assert served_name(secure) == "renewed"
        assert len(first + steps(loader, 20)) == 23
    assert "PRIVATE KEY" not in secure.daemon.log_path.read_text()


def test_roots_of_clients_that_change_count_without_a_restart(
    mutual: SecureDaemon, tmp_path: Path
) -> None:
    """Who was signed by the root that was taken away no longer comes in."""
    before = mutual.authority.sign("before")
    with environment(ca=mutual.authority.path, pair=before):
        with Loader("numbers", batch_size=8, address=mutual.address) as loader:
            next(loader)
        begin = log_size(mutual)
        mutual.authority.path.rename(tmp_path / "daemon-root.pem")
        after = Authority(tmp_path / "after", "after")
        mutual.authority.path.write_bytes(after.path.read_bytes())
        wait_for_event(mutual, "certificate reloaded", begin)
    with environment(ca=tmp_path / "daemon-root.pem", pair=before):
        assert type(failure(mutual.address)) is NotAuthenticated
    with (
        environment(ca=tmp_path / "daemon-root.pem", pair=after.sign("trainer")),
        Loader("numbers", batch_size=8, address=mutual.address) as loader,
    ):
        next(loader)


def test_a_token_is_not_sent_in_clear(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    token = write_secret(tmp_path / "token", TOKEN)
    with (
        environment(token=token),
        caplog.at_level(logging.DEBUG),
        pytest.raises(InvalidRequest, match=r"would travel to tcp:192\.0\.2\.1:80 in clear"),
        Connection(parse_address("tcp:192.0.2.1:80")) as connection,
    ):
        connection.status()
    assert TOKEN not in caplog.text


def test_handshakes_that_fail_cannot_fill_the_log(mutual: SecureDaemon) -> None:
    host = parse_address(mutual.address).host_and_port
    assert host
    for _ in range(100):
        with socket.create_connection(host, DEADLINE_S) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert connection.recv(65536) == b""
    assert mutual.daemon.stop() == 0
    lines = mutual.daemon.log_path.read_text().splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    assert len(lines) < 20
    assert mutual.daemon.events()[-1]["event"] == "stopped"


def test_a_job_uses_the_certificate_that_its_files_hold_when_it_connects_again(
    mutual: SecureDaemon, tmp_path: Path
) -> None:
    """The roots that the daemon knows have changed, and the client's certificate with them."""
    with Loader("numbers", batch_size=8, address=mutual.daemon.address) as loader:
        uninterrupted = steps(loader, 30)
    mine = mutual.authority.sign("trainer-1")
    root = tmp_path / "daemon-root.pem"
    root.write_bytes(mutual.authority.path.read_bytes())
    with (
        environment(ca=root, pair=mine),
        Loader("numbers", batch_size=8, address=mutual.address, prefetch_batches=4) as loader,
    ):
        seen = steps(loader, 3)
        after = Authority(tmp_path / "after", "after")
        mine.replace(after.sign("trainer-2"))
        mutual.daemon.kill()
        mutual.authority.path.write_bytes(after.path.read_bytes())
        mutual.daemon.restart()
        assert seen + steps(loader, 27) == uninterrupted


def own_addresses() -> list[str]:
    """IPv4 addresses by which other hosts know this one."""
    return [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family is socket.AF_INET and not each.address.startswith("127.")
    ]


def test_a_daemon_with_tokens_listens_beyond_loopback(gyred: StartDaemon, tmp_path: Path) -> None:
    if not own_addresses():
        pytest.skip("this machine has no address but loopback")
    port, host = free_port(), own_addresses()[0]
    listen = [f"unix:{tmp_path}/secure/run/gyre.sock", f"tls:0.0.0.0:{port}"]
    secure = start_secure(gyred, tmp_path / "secure", settings={"listen": listen})
    begin = log_size(secure)
    secure.certificate.replace(secure.authority.sign("outside", host=host))
    wait_for_event(secure, "certificate reloaded", begin)
    with (
        environment(ca=secure.authority.path, token=secure.token_file),
        Loader("numbers", batch_size=8, address=f"tls:{host}:{port}") as loader,
    ):
        assert len(next(loader)["sample_id"]) == 8
