"""One copier, as the thread sees it that has borrowed it."""

import contextlib
import socket
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from gyre_daemon.copiers.ranges import NOTHING, Ranges
from gyre_daemon.copiers.wire import Kind, Reply, receive_reply, send_request


class File(Protocol):
    """A file that is open.

    Attributes:
        key: its name here.
        descriptor: of it.
    """

    @property
    def key(self) -> int:
        """See above."""

    @property
    def descriptor(self) -> int:
        """See above."""


class Copier:
    """A process that copies; one thread at a time speaks to it. Every method raises OSError where the process is gone.

    Attributes:
        pid: of the process.
        arenas: what it has mapped, by key.
        unneeded: files that nobody reads any more; any thread may append to it.
    """

    def __init__(self, connection: socket.socket, pid: int, arenas: Iterable[int]) -> None:
        self.pid = pid
        self.arenas = set(arenas)
        self.unneeded: deque[int] = deque()
        self._connection = connection
        self._files: set[int] = set()

    def map(self, key: int, descriptor: int, num_bytes: int) -> None:
        """It has one more arena, unless it could not be mapped."""
        if self._ask(Kind.MAP, key, num_bytes=num_bytes, descriptor=descriptor).is_done:
            self.arenas.add(key)

    def unmap(self, key: int) -> None:
        """It has that arena no longer."""
        if key in self.arenas:
            self.arenas.remove(key)
            self._ask(Kind.UNMAP, key)

    def copy(self, arena: int, files: Iterable[File], ranges: Ranges) -> Reply:
        """Copy ranges of these files."""
        self._close_unneeded()
        for file in files:
            if file.key not in self._files:
                self._files.add(file.key)
                send_request(self._connection, Kind.OPEN, file.key, descriptor=file.descriptor)
        return self._ask(Kind.COPY, arena, ranges=ranges)

    def fork(self) -> "Copier":
        """Another, with the same arenas."""
        ours, theirs = socket.socketpair()
        with theirs:
            return Copier(ours, self._ask(Kind.FORK, descriptor=theirs.fileno()).value, self.arenas)

    def hang_up(self) -> None:
        """The process ends, and whoever waits for it hears so."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """It ends, and nobody speaks to it any more."""
        self.hang_up()
        self._connection.close()

    def _close_unneeded(self) -> None:
        while self.unneeded:
            key = self.unneeded.popleft()
            if key in self._files:
                self._files.remove(key)
                send_request(self._connection, Kind.CLOSE, key)

    def _ask(self, kind: Kind, key: int = 0, *, num_bytes: int = 0, descriptor: int = -1, ranges: Ranges = NOTHING) -> Reply:
        send_request(self._connection, kind, key, num_bytes=num_bytes, descriptor=descriptor, ranges=ranges)
        return receive_reply(self._connection)
