"""The side channel: where a client that runs beside its daemon gets the descriptors of a session's arenas."""

import os
import socket

from gyre_client.address import Address
from gyre_client.errors import DaemonUnavailable

TOKEN_KEY = "gyre-side-token"
TOKEN_BYTES = 32
TIMEOUT_S = 10.0


class NotShared(DaemonUnavailable):
    """The daemon's memory cannot be had here, now or later."""


class SideChannel:
    """A connection to the daemon's side channel, until `close`.

    Attributes:
        token: Tells the daemon which connection an OpenSession belongs to.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._connection = connection
        self.token = token

    def close(self) -> None:
        """Tells the daemon that nothing it gave here is read any more."""
        self._connection.close()

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
