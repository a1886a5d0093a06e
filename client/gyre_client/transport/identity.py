"""Identifies this process to the daemon.

A call over a Unix socket carries the token of a connection to the side channel, on which the kernel
tells the daemon the user and the process. A call over TCP carries the token of a file, if there is
one.
"""

import threading

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
        self._lock = threading.Lock()
        self._side: SideChannel | None = None

    def metadata(self, timeout_s: float = TIMEOUT_S) -> Metadata:
        """Returns the metadata of a call; empty if there is neither side channel nor token.

        Args:
            timeout_s: How long the daemon may take to accept.

        Raises:
            InvalidRequest: Over TCP: see `CredentialFiles.metadata`.
        """
        if self._address.side_path is None:
            return self._files.metadata(self._address)
        with self._lock:
            if self._side is None or self._side.is_over:
                self._drop()
                self._side = SideChannel.connect(self._address, timeout_s)
            return ((TOKEN_KEY, self._side.token),) if self._side else ()

    def close(self) -> None:
        """Ends the connection; a later call makes another."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._side is not None:
            self._side.close()
            self._side = None
