"""The side channel: where a client that runs beside its daemon gets the descriptors of a session's arenas."""

import os
import socket
import weakref

from gyre_client.address import Address
from gyre_client.errors import DaemonUnavailable

TOKEN_KEY = "gyre-side-token"
TOKEN_BYTES = 32
TIMEOUT_S = 10.0


class NotShared(DaemonUnavailable):
    """The daemon's memory cannot be had here, now or later."""


class SideChannel:
    """A connection to the daemon's side channel, which ends with this object.

    Attributes:
        token: Tells the daemon which connection an OpenSession belongs to.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._connection = connection
        self.token = token
        weakref.finalize(self, connection.close).atexit = False  # see `_close_all`
        _open_channels.add(self)

    @classmethod
    def connect(cls, address: Address) -> "SideChannel | None":
        """Returns a connection, or None where the daemon is not beside this process or shares no memory."""
        if address.side_path is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(TIMEOUT_S)
            connection.connect(address.side_path)
            token = connection.recv(TOKEN_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError):
            token = ""
        if len(token) == TOKEN_BYTES:
            return cls(connection, token)
        connection.close()
        return None

    def receive(self, session_id: str, number: int) -> int:
        """Returns the descriptor of a session's next arena, which the caller owns.

        Raises:
            NotShared: It was lost on the way.
            DaemonUnavailable: The daemon hung up, or sent another.
        """
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, 256, 1)
        except OSError as error:
            raise DaemonUnavailable(f"the daemon's side channel failed: {error}") from error
        is_expected = message == f"{session_id} {number}".encode()
        if is_expected and descriptors:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        if is_expected:
            raise NotShared("the descriptor of the daemon's memory does not reach this process")
        raise DaemonUnavailable("the daemon shared an arena that did not arrive on the side channel")

    def close(self) -> None:
        """The connection has ended. The daemon may use again what it shared over it."""
        self._connection.close()


_open_channels: "weakref.WeakSet[SideChannel]" = weakref.WeakSet()


def _close_all() -> None:
    """At the interpreter's exit every channel is closed, but not before its session has ended.

    Finalizers run newest first there. A loader ends its session in one; its channel is newer, so it must not be closed by a
    finalizer of its own, or the loader, which still receives, would take that for an outage. This one is older than all.
    """
    for channel in list(_open_channels):
        channel.close()


weakref.finalize(_open_channels, _close_all)
