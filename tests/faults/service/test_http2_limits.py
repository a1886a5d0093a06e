"""Connections that are silent, slow, or loud: each is ended, and nobody else notices."""

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gyre_client.errors import DaemonUnavailable, Overloaded
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import Daemon, to_toml
from tests.preloaded.interpreter import Interpreter
from tests.secure_daemons import free_port

DEADLINE_S = 180.0
NUM_SILENT = 1000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# RFC 9113, section 6: types of frames
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
MAX_CONCURRENT_STREAMS = 3
ENHANCE_YOUR_CALM = 11


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """The frames that arrive, until the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(65536):
            data += more
            while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
                yield data[3], data[9 : 9 + size]
                data = data[9 + size :]


def is_ended(connection: socket.socket) -> bool:
    """Reads to the end."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


BEGINNINGS = (PREFACE[:10], PREFACE, PREFACE + frame(SETTINGS)[:5])


@pytest.fixture(scope="module")
def tcp() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def daemon(
    interpreter: Interpreter, tmp_path_factory: pytest.TempPathFactory, tcp: str
) -> Iterator[Daemon]:
    """One daemon for all tests of this file: none of them may harm it."""
    folder = tmp_path_factory.mktemp("daemon")
    address, path = f"unix:{folder}/run/gyre.sock", folder / "gyre.toml"
    path.write_text(to_toml({"listen": [address, f"tcp:{tcp}"], "index_dir": str(folder)}))
    daemon = Daemon(path, address, folder / "log", {}, interpreter=interpreter).start()
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture(params=["unix", "tcp"])
def place(request: pytest.FixtureRequest, daemon: Daemon, tcp: str) -> str | tuple[str, int]:
    """Where sockets connect."""
    host, port = tcp.split(":")
    return daemon.address.removeprefix("unix:") if request.param == "unix" else (host, int(port))


@contextlib.contextmanager
def connected(place: str | tuple[str, int]) -> Iterator[socket.socket]:
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(place)
        yield connection


def assert_serves(daemon: Daemon) -> None:
    with Connection(parse_address(daemon.address)) as connection:
        assert connection.status(timeout_s=DEADLINE_S).pid


def wait_until_it_serves(daemon: Daemon) -> None:
    """gRPC refuses some calls, from anybody, while a thousand of others wait for the daemon."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(DaemonUnavailable, Overloaded):
            return assert_serves(daemon)
        assert time.monotonic() < deadline


def num_descriptors(daemon: Daemon) -> int:
    assert daemon.process
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))  # noqa: PTH208


def test_connections_without_a_handshake_are_closed_and_do_not_keep_others_out(
    daemon: Daemon, place: str | tuple[str, int]
) -> None:
    """Those that never say a word, that stop in their first words, or that send a byte at a time.

    Each has the daemon's deadline for a handshake, so all of them wait for it together. When they
    are gone, there are as many descriptors as before.
    """
    assert_serves(daemon)
    before = num_descriptors(daemon)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(place)) for _ in range(NUM_SILENT)]
        stopped = {each: stack.enter_context(connected(place)) for each in BEGINNINGS}
        for beginning, connection in stopped.items():
            connection.sendall(beginning)
        assert_serves(daemon)
        assert is_ended_while_it_sends(stack.enter_context(connected(place)))
        assert all(map(is_ended, silent))
        for beginning, connection in stopped.items():
            assert is_ended(connection), f"the one that stopped after {beginning!r}"
    assert_serves(daemon)
    assert num_descriptors(daemon) < before + NUM_SILENT // 10


def is_ended_while_it_sends(connection: socket.socket) -> bool:
    """Sends a byte every half a second, so that it is never silent for long; then reads to the end.

    A handshake takes more of these bytes than its deadline has room for.
    """
    connection.settimeout(0.5)
    for byte in PREFACE + frame(SETTINGS) * 100:
        try:
            connection.sendall(bytes([byte]))
            if connection.recv(65536) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return is_ended(connection)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
        bytes(range(256)) * 64,
        PREFACE + frame(SETTINGS) + b"\xff" * 4096,
        PREFACE + frame(SETTINGS) + frame(HEADERS, b"\xff" * 4096, stream=1, flags=4),
    ],
    ids=["http1", "tls", "bytes", "frames", "hpack"],
)
def test_what_is_no_http2_is_closed(
    daemon: Daemon, place: str | tuple[str, int], noise: bytes
) -> None:
    with connected(place) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(noise)
        assert is_ended(connection)
    assert_serves(daemon)


def test_a_flood_of_pings_ends_the_connection(daemon: Daemon, place: str | tuple[str, int]) -> None:
    with connected(place) as connection:
        connection.sendall(PREFACE + frame(SETTINGS))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                connection.sendall(frame(PING, bytes(8)))
        last = [payload for kind, payload in frames(connection) if kind == GOAWAY]
    assert int.from_bytes(last[-1][4:8], "big") == ENHANCE_YOUR_CALM
    assert_serves(daemon)


def test_the_number_of_calls_on_a_connection_is_limited(
    daemon: Daemon, place: str | tuple[str, int]
) -> None:
    with connected(place) as connection:
        connection.sendall(PREFACE + frame(SETTINGS))
        settings = next(payload for kind, payload in frames(connection) if kind == SETTINGS)
    pairs = dict(struct.iter_unpack(">HI", settings))
    assert pairs[MAX_CONCURRENT_STREAMS] == 16


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, section 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def test_calls_that_are_reset_at_once_take_nothing(
    daemon: Daemon, place: str | tuple[str, int]
) -> None:
    """Ten thousand of them, on one connection (CVE-2023-44487)."""
    block = b"".join(
        literal(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", b"/gyre_protos.v1.Loader/GetStatus"),
            (b":authority", b"x"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    )
    before = num_descriptors(daemon)
    with connected(place) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(PREFACE + frame(SETTINGS))
        for stream in range(1, 20_001, 2):
            connection.sendall(
                frame(HEADERS, block, stream, flags=4)
                + frame(RST_STREAM, struct.pack(">I", 8), stream)
            )
    wait_until_it_serves(daemon)
    assert num_descriptors(daemon) < before + 20


def test_metadata_that_is_too_large_refuses_the_call_alone(daemon: Daemon) -> None:
    request = pb.GetStatusRequest()
    with identified_channel(daemon.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            LoaderStub(channel).GetStatus(
                request, timeout=DEADLINE_S, metadata=(("x-large", "x" * (20 << 10)),)
            )
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert LoaderStub(channel).GetStatus(request, timeout=DEADLINE_S).pid


def test_the_log_stays_readable(daemon: Daemon) -> None:
    """Whatever strangers send, each line is an event, and there are few of them."""
    lines = Path(daemon.log_path).read_text().splitlines()
    assert [line for line in lines if not line.startswith("{")] == []
    assert len(lines) < 100
