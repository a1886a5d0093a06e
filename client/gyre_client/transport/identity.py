"""Identifies this process to the daemon.

A call over a Unix socket carries the token of a connection to the side channel, on which the kernel
tells the daemon the user and the process. A call over TCP carries the token of a file, if there is
one.
"""

import contextlib

from gyre_client.transport.address import Address
from gyre_client.transport.credentials import CredentialFiles
from gyre_client.transport.side_channel import TIMEOUT_S, TOKEN_KEY, SideChannel

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
