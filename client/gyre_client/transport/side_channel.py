"""Identifies this process to the daemon.

A call over a Unix socket carries the token of a connection to the side channel, on which the kernel
tells the daemon the user and the process. A call over TCP carries the token of a file, if there is
one.

The side channel is a Unix socket. The daemon also passes the descriptors of its arenas there. The
connection lasts as long as this process may read the arenas: its end tells the daemon that the
session's batches may be overwritten.
"""

import contextlib
import os
import select
import socket

from gyre_protos.text import printable

from gyre_client.errors import DaemonUnavailable, Overloaded
from gyre_client.transport.address import Address, check_peer
from gyre_client.transport.channel import CredentialFiles

TOKEN_KEY = "gyre-side-token"
TOKEN_BYTES = 32
REFUSED = "refused: "  # the daemon's answer instead of a token, before the reason
MAX_ANSWER_BYTES = 4096
TIMEOUT_S = 10.0  # the daemon answers within a millisecond; a stuck one must not hang the client


class NotShared(DaemonUnavailable):
    """The daemon's memory cannot be mapped in this process, now or later."""


class SideChannel:
    """A connection to the daemon's side channel, until `close`.

    Attributes:
        token: Tells the daemon which connection a call belongs to.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._connection = connection
        self.token = token

    def close(self) -> None:
        """Tells the daemon that this process no longer reads any arena it received here."""
        self._connection.close()

    @property
    def is_over(self) -> bool:
        """Whether the daemon has hung up; ask only where no arena is under way."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLIN)
        except ValueError:  # another thread has closed it
            return True
        return bool(poll.poll(0))

    @classmethod
    def connect(cls, address: Address, timeout_s: float = TIMEOUT_S) -> "SideChannel | None":
        """Returns a connection; None if the daemon is on another machine or cannot be reached.

        Raises:
            Overloaded: The daemon takes no further connection, for the reason that it says.
            UntrustedDaemon: The daemon belongs to a user that this process does not trust.
        """
        if address.side_path is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        token = b""
        try:
            connection.settimeout(min(timeout_s, TIMEOUT_S))
            with contextlib.suppress(OSError):
                connection.connect(address.side_path)
                check_peer(connection, address)
                token = connection.recv(MAX_ANSWER_BYTES)
                connection.settimeout(TIMEOUT_S)
            if len(token) == TOKEN_BYTES and token.isalnum():
                return cls(connection, token.decode())
        except BaseException:
            connection.close()
            raise
        connection.close()
        if token.startswith(REFUSED.encode()):
            reason = token.removeprefix(REFUSED.encode())
            raise Overloaded(printable(reason.decode(errors="replace")))
        return None

    def receive(self, session_id: str, number: int) -> int:
        """Returns the descriptor of a session's next arena; the caller owns it.

        Raises:
            NotShared: The message arrived without its descriptor.
            DaemonUnavailable: The daemon hung up, or sent another arena.
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
        raise DaemonUnavailable(
            "the daemon shared an arena that did not arrive on the side channel"
        )


Metadata = tuple[tuple[str, str], ...]


class Identity:
    """A connection to the side channel for the calls of one channel. Safe to use from any thread.

    It is made for the first call, and again after the daemon was restarted.
    """

    def __init__(self, address: Address, files: CredentialFiles) -> None:
        self._address = address
        self._files = files
        # The last one counts. A list, because an interrupt could leave a lock held: threads that
        # call at the same moment may each make a connection.
        self._sides: list[SideChannel] = []

    def metadata(self, timeout_s: float = TIMEOUT_S) -> Metadata:
        """Returns the metadata of a call; empty if there is neither side channel nor token.

        Args:
            timeout_s: How long the daemon may take to accept.

        Raises:
            InvalidRequest: Over TCP: see `CredentialFiles.metadata`.
        """
        if self._address.side_path is None:
            return self._files.metadata(self._address)
        side = next(reversed(self._sides), None)
        if side is not None and side.is_over:
            self.close()
            side = None
        if side is None:
            side = SideChannel.connect(self._address, timeout_s)
            if side is None:
                return ()
            self._sides.append(side)
        return ((TOKEN_KEY, side.token),)

    def close(self) -> None:
        """Ends the connections; a later call makes another."""
        with contextlib.suppress(IndexError):
            while True:
                self._sides.pop().close()
