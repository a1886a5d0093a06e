"""The side channel: how a client on the same machine gets the descriptors of the arenas that its batches lie in.

gRPC cannot pass descriptors and hides who its peer is. So a client that can share memory first connects here; the kernel says
which process and user it is, and it gets a token that its gRPC calls carry. It stays connected as long as it may read what it
was given: so the daemon knows when memory that several jobs read can be used again, also after one of them was killed.
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from gyre_daemon.errors import ConfigError
from gyre_daemon.memory.arena import Arena
from gyre_daemon.runtime.events import log_event

SUFFIX = ".side"
_BACKLOG = 128
_MAX_PEERS = 4096
_REFUSED_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")


class Peer:
    """A client beside the daemon, for as long as it may read shared memory.

    Attributes:
        pid: its process.
        uid: its user.
    """

    def __init__(self, connection: socket.socket, pid: int, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        self._connection = connection
        self._is_gone = False
        self._when_gone: list[Callable[[], None]] = []

    def hand_over(self, session_id: str, number: int, descriptor: int) -> bool:
        """Send an arena of a session; False where the client is gone or does not take it."""
        if self._is_gone:
            return False
        try:
            socket.send_fds(self._connection, [f"{session_id} {number}".encode()], [descriptor])
        except OSError:
            return False
        return True

    def when_gone(self, act: Callable[[], None]) -> None:
        """Do something once the client reads no shared memory any more: it says so by hanging up, and so does its death."""
        if self._is_gone:
            act()
        else:
            self._when_gone.append(act)

    def hang_up(self) -> None:
        """The client is gone."""
        self._connection.close()
        self._is_gone = True
        while self._when_gone:
            self._when_gone.pop()()


class ShownArenas:
    """The arenas of one session that its client maps, by number."""

    def __init__(self, session_id: str, peer: Peer, on_left: Callable[[Arena, int], None]) -> None:
        """None yet.

        Args:
            session_id: whose they are.
            peer: the client.
            on_left: called with an arena that the client should unmap, and its number. From then on the client does not
                know the arena; where it is shown once more, it has another number.
        """
        self._session_id = session_id
        self._peer = peer
        self._on_left = on_left
        self._numbers: dict[Arena, int] = {}
        self._num_shown = 0
        self._leaving: dict[int, Arena] = {}  # until the client has unmapped them
        peer.when_gone(self._peer_gone)

    def number(self, arena: Arena) -> int | None:
        """What the client calls an arena, which it is given if it does not have it; None if that cannot be done."""
        number = self._numbers.get(arena)
        if number is None and self._peer.hand_over(self._session_id, self._num_shown, arena.descriptor):
            number = self._numbers[arena] = self._num_shown
            self._num_shown += 1
            arena.add_reader(self)
        return number

    def arena_left(self, arena: Arena) -> None:
        """See `Reader`."""
        number = self._numbers.pop(arena, None)
        if number is not None:
            self._leaving[number] = arena
            self._on_left(arena, number)

    def unmapped(self, number: int) -> None:
        """The client has this one no longer; what it was not asked to unmap changes nothing."""
        arena = self._leaving.pop(number, None)
        if arena:
            arena.remove_reader(self)

    def when_unread(self, act: Callable[[], None]) -> None:
        """See `Peer.when_gone`."""
        self._peer.when_gone(act)

    def _peer_gone(self) -> None:
        arenas = [*self._numbers, *self._leaving.values()]
        self._numbers.clear()
        self._leaving.clear()
        for arena in arenas:
            arena.remove_reader(self)


class SideChannel:
    """Listens beside a Unix socket and knows who is connected."""

    def __init__(self, path: Path) -> None:
        """Bind; the path is this daemon's by the claim on the socket beside it.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._path = path.with_name(path.name + SUFFIX)
        self._peers: dict[str, Peer] = {}
        self._connections: dict[str, socket.socket] = {}
        self._bind()

    @property
    def is_reachable(self) -> bool:
        """Clients that connect to the path find this daemon's socket."""
        try:
            return os.path.samestat(self._socket, self._path.stat())
        except OSError:
            return False

    def bind_again(self) -> None:
        """Listen at the path again, where the socket was removed; who is connected stays so.

        Raises:
            ConfigError: it cannot be bound.
        """
        before = self._listener
        self._bind()
        asyncio.get_running_loop().remove_reader(before)
        before.close()

    def _bind(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            self._path.chmod(0o660)
            listener.listen(_BACKLOG)
            self._socket = self._path.stat()
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {self._path}: {error.strerror}") from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def peer(self, token: str) -> Peer | None:
        """The client that was given this token and is still connected."""
        return self._peers.get(token)

    def close(self) -> None:
        """Disconnect everybody and remove the socket."""
        is_reachable = self.is_reachable
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for token in list(self._peers):
            self._drop(token)
        if is_reachable:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, say: the client goes on without shared memory
            log_event("side channel refused", {"reason": error.strerror}, logging.WARNING)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)  # who waits there goes on waiting, and would be refused again at once
            loop.call_later(_REFUSED_PAUSE_S, self._listen_again, self._listener)
            return
        connection.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        token = secrets.token_hex(16)
        if len(self._peers) >= _MAX_PEERS:
            connection.close()
            return
        self._peers[token], self._connections[token] = Peer(connection, pid, uid), connection
        asyncio.get_running_loop().add_reader(connection, self._hear, token)
        try:
            connection.send(token.encode())
        except OSError:
            self._drop(token)

    def _listen_again(self, listener: socket.socket) -> None:
        if listener is self._listener and listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept)

    def _hear(self, token: str) -> None:
        """A client has nothing to say here: what comes is its end, or nonsense that ends it; descriptors are not received."""
        self._drop(token)

    def _drop(self, token: str) -> None:
        connection = self._connections.pop(token)
        asyncio.get_running_loop().remove_reader(connection)
        self._peers.pop(token).hang_up()
