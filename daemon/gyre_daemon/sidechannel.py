"""The side channel: how a client on the same machine gets the descriptor of its session's arena.

gRPC cannot pass descriptors and hides who its peer is. So a client that can share memory first connects here; the kernel says
which process and user it is, and it gets a token that its gRPC calls carry.
"""

import asyncio
import secrets
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.errors import ConfigError
from gyre_daemon.events import log_event

SUFFIX = ".side"
_BACKLOG = 128
_MAX_PEERS = 4096
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """A connected client.

    Attributes:
        connection: to it.
        pid: its process.
        uid: its user.
    """

    connection: socket.socket
    pid: int
    uid: int

    def hand_over(self, session_id: str, descriptor: int) -> bool:
        """Send the arena of a session; False where the client is gone or does not take it."""
        try:
            socket.send_fds(self.connection, [session_id.encode()], [descriptor])
        except OSError:
            return False
        return True


class SideChannel:
    """Listens beside a Unix socket and knows who is connected."""

    def __init__(self, path: Path) -> None:
        """Bind; the path is this daemon's by the claim on the socket beside it.

        Raises:
            ConfigError: it cannot be bound.
        """
        self._path = path.with_name(path.name + SUFFIX)
        self._peers: dict[str, Peer] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            self._path.unlink(missing_ok=True)
            self._listener.bind(str(self._path))
            self._path.chmod(0o660)
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"cannot listen on {self._path}: {error.strerror}") from error
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def peer(self, token: str) -> Peer | None:
        """The client that was given this token and is still connected."""
        return self._peers.get(token)

    def close(self) -> None:
        """Disconnect everybody and remove the socket."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for token in list(self._peers):
            self._drop(token)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, say: the client goes on without shared memory
            log_event("side channel refused", {"reason": error.strerror})
            return
        connection.setblocking(False)
        pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        token = secrets.token_hex(16)
        if len(self._peers) >= _MAX_PEERS:
            connection.close()
            return
        self._peers[token] = Peer(connection, pid, uid)
        asyncio.get_running_loop().add_reader(connection, self._hear, token)
        try:
            connection.send(token.encode())
        except OSError:
            self._drop(token)

    def _hear(self, token: str) -> None:
        """A client has nothing to say here: what comes is its end, or nonsense that ends it; descriptors are not received."""
        self._drop(token)

    def _drop(self, token: str) -> None:
        connection = self._peers.pop(token).connection
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
