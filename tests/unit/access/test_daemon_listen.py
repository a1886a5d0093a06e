"""Addresses, and claims to sockets that no second daemon can take over."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.listen import (
    SocketClaim,
    TcpAddress,
    UnixAddress,
    check_metrics,
    parse_address,
    parse_http_address,
)


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        ("unix:/run/gyre.sock", UnixAddress(Path("/run/gyre.sock")), "unix:/run/gyre.sock"),
        ("unix:///run/gyre.sock", UnixAddress(Path("/run/gyre.sock")), "unix:/run/gyre.sock"),
        ("unix:/run/a b:c.sock", UnixAddress(Path("/run/a b:c.sock")), "unix:/run/a b:c.sock"),
        ("unix:x.sock", UnixAddress(Path.cwd() / "x.sock"), f"unix:{Path.cwd()}/x.sock"),
        ("tcp:127.0.0.1:50051", TcpAddress("127.0.0.1", 50051), "127.0.0.1:50051"),
        ("tcp:127.3.2.1:0", TcpAddress("127.3.2.1", 0), "127.3.2.1:0"),
        ("tcp:localhost:1", TcpAddress("127.0.0.1", 1), "127.0.0.1:1"),
        ("tcp:[::1]:65535", TcpAddress("::1", 65535), "[::1]:65535"),
        ("tcp:::1:80", TcpAddress("::1", 80), "[::1]:80"),
    ],
)
def test_addresses_are_parsed(text: str, address: UnixAddress | TcpAddress, target: str) -> None:
    assert parse_address(text) == address
    assert parse_address(text).grpc_target == target


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "unix",
            "unix:",
            "tcp",
            "tcp:",
            "tcp::",
            "tcp::80",
            "tcp:127.0.0.1",
            "tcp:127.0.0.1:",
            "tcp:127.0.0.1:-1",
        ),
        *(
            "tcp:127.0.0.1:65536",
            "tcp:127.0.0.1:8o",
            "tcp:127.0.0.1:\u0661",
            "tcp:127.0.0.1:\u00b2",
            "tcp:127.0.0.1: 80",
        ),
        *("udp:127.0.0.1:80", "http://127.0.0.1:80", "/run/gyre.sock", "127.0.0.1:80"),
    ],
)
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="none of unix:PATH, tcp:HOST:PORT and tls:HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "0.0.0.0",
            "[::]",
            "10.0.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "example.com",
            "localhost.example.com",
            "*",
        ),
        *("[::ffff:10.0.0.1]", "127.1", "0x7f000001", "2130706433"),
    ],
)
def test_addresses_that_other_hosts_can_reach_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="open to other hosts, but `tcp:` has neither"):
        parse_address(f"tcp:{host}:80")


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "[::]", "10.0.0.1", "169.254.169.254", "[::ffff:10.0.0.1]"]
)
def test_metrics_are_open_to_other_hosts_only_if_they_are_public(host: str) -> None:
    address = parse_http_address("metrics_listen", f"tcp:{host}:9847")
    assert address == TcpAddress(host.strip("[]"), 9847)
    with pytest.raises(
        ConfigError, match=r"is open to other hosts: .* or set metrics_public = true"
    ):
        check_metrics(address, is_public=False)
    check_metrics(address, is_public=True)


def test_metrics_and_probes_are_served_at_a_port_of_an_ip_address() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        address = parse_http_address("health_listen", f"tcp:{host}:0")
        assert address
        assert address.port == 0
    assert parse_http_address("health_listen", "") is None
    for text in (
        "unix:/run/metrics",
        "127.0.0.1:80",
        "http://127.0.0.1:80",
        "tcp:example.com:80",
        "tcp:127.0.0.1",
    ):
        with pytest.raises(
            ConfigError,
            match=r"health_listen is .*; |none of unix:PATH, tcp:HOST:PORT and",
        ):
            parse_http_address("health_listen", text)


@pytest.mark.parametrize("path", ["/run/\0.sock", "/run/x\ny.sock", "/run/%41.sock"])
def test_socket_paths_that_grpc_would_change_are_refused(path: str) -> None:
    """gRPC decodes percent signs, so the socket would be bound at a path that is not claimed."""
    with pytest.raises(ConfigError, match=r"must not contain control characters or `%`"):
        parse_address(f"unix:{path}")


def test_socket_paths_that_are_too_long_are_refused() -> None:
    assert parse_address("unix:/" + "x" * 101)
    with pytest.raises(ConfigError, match="longer than 102 bytes"):
        parse_address("unix:/" + "x" * 102)
    with pytest.raises(ConfigError, match="longer than 102 bytes"):
        parse_address("unix:/" + "ü" * 51)


def address_in(folder: Path) -> UnixAddress:
    return UnixAddress(folder / "run" / "gyre.sock")


def bind(address: UnixAddress) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address.path))
    listener.listen()
    return listener


def claim_elsewhere(address: UnixAddress) -> "subprocess.CompletedProcess[str]":
    """Try to claim an address in another process."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gyre_daemon.runtime.listen import SocketClaim, UnixAddress\n"
        "try: SocketClaim(UnixAddress(Path(sys.argv[1]))).give_up()\n"
        "except Exception as error: sys.exit(f'{type(error).__name__}: {error}')"
    )
    command = [sys.executable, "-c", program, str(address.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_claim_makes_a_folder_for_owner_and_group(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    claim = SocketClaim(address)
    assert stat.S_IMODE(address.path.parent.stat().st_mode) & 0o007 == 0
    with bind(address):
        claim.open_to_group()
        assert stat.S_IMODE(address.path.stat().st_mode) == 0o660
        claim.give_up()
    assert list(address.path.parent.iterdir()) == [], "nothing is left behind"


def test_a_living_daemon_keeps_its_socket(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    claim = SocketClaim(address)
    with bind(address):
        for _ in range(2):
            second = claim_elsewhere(address)
            assert second.returncode == 1
            assert (
                f"ConfigError: another daemon (process {os.getpid()}) serves {address.path}"
                in second.stderr
            )
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
            SocketClaim(address)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address.path))  # the first daemon's socket is still there
        claim.give_up()
    assert claim_elsewhere(address).returncode == 0


def test_a_removed_lock_file_lets_nobody_take_a_living_daemon_s_socket(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    lock = address.path.with_name("gyre.sock.lock")
    claim = SocketClaim(address)
    with bind(address) as listener:
        claim.open_to_group()
        before = lock.stat().st_ino
        lock.unlink()
        second = claim_elsewhere(address)
        assert (
            f"another process listens on {address.path}, although the lock file next to it is free"
            in second.stderr
        )
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address.path))
        claim.claim()
        assert claim.is_reachable
        assert lock.read_text() == f"{os.getpid()}\n"
        assert lock.stat().st_ino != before
        assert f"another daemon (process {os.getpid()})" in claim_elsewhere(address).stderr
        listener.close()
        claim.give_up()
    assert list(address.path.parent.iterdir()) == []


def test_removed_files_are_claimed_again_unless_another_daemon_has_claimed_them(
    tmp_path: Path,
) -> None:
    address = address_in(tmp_path)
    claim = SocketClaim(address)
    with bind(address):
        claim.open_to_group()
    shutil.rmtree(address.path.parent)
    assert not claim.is_reachable
    claim.claim()
    assert {path.name for path in address.path.parent.iterdir()} == {"gyre.sock.lock"}
    shutil.rmtree(address.path.parent)
    another = SocketClaim(address)  # before the first daemon looks again
    with bind(address):
        another.open_to_group()
        with pytest.raises(ConfigError, match="another daemon"):
            claim.claim()
        claim.give_up()
        assert another.is_reachable
        another.give_up()


def test_the_socket_of_a_killed_daemon_is_removed(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    program = (
        "import os, signal, socket, sys\n"
        "from pathlib import Path\n"
        "from gyre_daemon.runtime.listen import SocketClaim, UnixAddress\n"
        "claim = SocketClaim(UnixAddress(Path(sys.argv[1])))\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, str(address.path)], check=False, timeout=120
    )
    assert killed.returncode == -9
    assert {path.name for path in address.path.parent.iterdir()} == {"gyre.sock", "gyre.sock.lock"}
    claim = SocketClaim(address)
    with bind(address):
        pass
    claim.give_up()


def test_a_longer_pid_of_an_earlier_holder_does_not_show_through(tmp_path: Path) -> None:
    address = address_in(tmp_path)
    address.path.parent.mkdir()
    lock = address.path.with_name("gyre.sock.lock")
    lock.write_text("123456789012345\n")
    claim = SocketClaim(address)
    assert lock.read_text() == f"{os.getpid()}\n"
    claim.give_up()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    address = address_in(tmp_path)
    address.path.parent.mkdir()
    address.path.write_text("precious") if kind == "file" else address.path.mkdir()
    with pytest.raises(ConfigError, match=r"gyre\.sock is no socket"):
        SocketClaim(address)
    assert address.path.exists()
    address.path.unlink() if kind == "file" else address.path.rmdir()
    SocketClaim(address).give_up()  # the refused claim holds no lock


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot claim the socket .*: (Not a directory|File exists)"
    ):
        SocketClaim(UnixAddress(tmp_path / "file" / "gyre.sock"))
    with pytest.raises(ConfigError, match="cannot claim the socket"):
        SocketClaim(UnixAddress(Path("/proc/gyre/gyre.sock")))
