"""The side channel: where a client that runs beside its daemon gets the descriptors of a session's arenas."""

import os
import socket
import weakref

from gyre_client.address import Address

TOKEN_KEY = "gyre-side-token"
TOKEN_BYTES = 32
TIMEOUT_S = 10.0


class SideChannel:
    """A connection to the daemon's side channel, which ends with this object.

    Attributes:
        token: Tells the daemon which connection an OpenSession belongs to.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._connection = connection
        self.token = token
        weakref.finalize(self, connection.close)

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

    def receive(self, session_id: str, number: int) -> int | None:
        """Returns the descriptor of a session's next arena, which the caller owns; None if it is another or did not come."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, 256, 1)
        except OSError:
            return None
        if message == f"{session_id} {number}".encode() and descriptors:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        return None
