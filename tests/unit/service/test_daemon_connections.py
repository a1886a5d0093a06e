"""Which connections the daemon closes: of real sockets, both ends of which are in this process."""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gyre_daemon.runtime.limits import MAX_STRANGERS, Connections, own_bytes, own_limit_bytes

GIB = 1 << 30
SHORT_S, LONG_S = 20.0, 31.0


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Server:
    """A listener of this process, and the connections that it has accepted."""

    listener: socket.socket
    connections: Connections
    clock: Clock
    ours: list[socket.socket] = field(default_factory=list)
    theirs: list[socket.socket] = field(default_factory=list)

    def connect(self, num: int = 1) -> None:
        for _ in range(num):
            client = socket.socket(self.listener.family)
            client.connect(self.listener.getsockname())
            self.theirs.append(client)
            self.ours.append(self.listener.accept()[0])

    def peer(self, number: int) -> str:
        host, port = self.theirs[number].getsockname()[:2]
        return f"ipv4:{host}:{port}"

    @property
    def open(self) -> list[int]:
        """Which clients are connected."""
        found = []
        for number, client in enumerate(self.theirs):
            client.setblocking(False)
            try:
                assert client.recv(1) == b""
            except BlockingIOError:
                found.append(number)
        return found


@pytest.fixture(params=["unix", "tcp"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    is_unix = request.param == "unix"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET))
        listener.bind(str(tmp_path / "socket") if is_unix else ("127.0.0.1", 0))
        listener.listen()
        clock = Clock()
        server = Server(listener, Connections(clock), clock)
        name = listener.getsockname()
        server.connections.listen_at(name if is_unix else name[1])
        yield server
        for each in (*server.ours, *server.theirs):
            each.close()


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
def test_of_strangers_only_the_last_stay(server: Server) -> None:
    server.connect(2)
    with server.connections.call(server.peer(1), is_proven=True):
        pass
    server.connections.close_strangers()
    server.clock.now = 1.0
    server.connect(MAX_STRANGERS)
    server.connections.close_strangers()
    assert server.open == list(range(1, MAX_STRANGERS + 2))


@pytest.mark.parametrize("server", ["tcp"], indirect=True)
def test_a_connection_without_a_credential_is_short(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.connect(4)
    server.connections.close_strangers()
    with server.connections.call(server.peer(0), is_proven=True):
        pass
    with server.connections.call(server.peer(1), is_proven=False):
        server.clock.now = SHORT_S
        with server.connections.call(server.peer(2), is_proven=False):
            server.connections.close_strangers()
            assert server.open == [0, 1, 2, 3]
        server.clock.now = LONG_S
        server.connections.close_strangers()
        assert server.open == [0, 1, 2], "one call goes on, one ended a moment ago"
        server.clock.now += LONG_S
        server.connections.close_strangers()
        assert server.open == [0, 1]
    assert [each.getMessage() for each in caplog.records] == ["connections closed"] * 2


def test_beyond_the_limit_of_memory_the_newest_without_a_session_are_closed(
    server: Server,
) -> None:
    server.connect(2)
    server.connections.look()
    server.clock.now = 1.0
    server.connect(2)
    server.connections.close_for_memory(GIB, GIB, ())
    assert server.open == [0, 1, 2, 3]
    server.connections.close_for_memory(GIB + 1, GIB, ())
    assert server.open == [0, 1]


def test_sessions_go_on_whatever_memory_is_used(server: Server) -> None:
    server.connect(2)
    with contextlib.ExitStack() as calls:
        readers = [os.getpid()]
        if server.listener.family == socket.AF_INET:
            readers = []
            for number in (0, 1):
                calls.enter_context(server.connections.call(server.peer(number), is_proven=True))
        server.connections.close_for_memory(2 * GIB, GIB, readers)
    assert server.open == [0, 1]


def test_the_limit_follows_the_control_group() -> None:
    assert own_limit_bytes(1 << 20) == GIB
    assert own_limit_bytes(3 * GIB) == 3 * GIB // 2
    assert own_limit_bytes(None) >= GIB
    assert 0 < own_bytes() < own_limit_bytes(None)
