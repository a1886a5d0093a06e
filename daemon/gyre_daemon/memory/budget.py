"""The memory that all sessions of a daemon may have together."""

import asyncio

from gyre_daemon.errors import Overloaded


class Budget:
    """Bytes that all arenas may have together, with what is noted of the batches in them.

    Attributes:
        freed: set whenever there is more to be had.
        limit_bytes: of all.
        reserved_bytes: by sessions.
        abandoned_bytes: of arenas that nobody here uses any more, and that clients still map.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.abandoned_bytes = 0
        self.freed = asyncio.Event()

    @property
    def free_bytes(self) -> int:
        """What can still be reserved."""
        return self.limit_bytes - self.reserved_bytes - self.abandoned_bytes

    def reserve(self, num_bytes: int, purpose: str) -> None:
        """Take a share.

        Raises:
            Overloaded: it does not fit; says needed and limit.
        """
        if num_bytes > self.free_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but of the daemon's memory_budget of {self.limit_bytes} bytes only "
                f"{max(0, self.free_bytes)} are free{self._kept}; close a session, lower the batch size or raise memory_budget",
                {"needed_bytes": num_bytes, "free_bytes": max(0, self.free_bytes), "limit_bytes": self.limit_bytes},
            )
        self.reserved_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return a share."""
        self.reserved_bytes -= num_bytes
        self.freed.set()

    def adjust(self, num_bytes: int) -> None:
        """Reserve so much more of what was found to be free, or is in use anyway; less where it is negative."""
        self.reserved_bytes += num_bytes
        if num_bytes < 0:
            self.freed.set()

    def abandon(self, num_bytes: int) -> None:
        """So much more is kept by clients alone; less where it is negative."""
        self.abandoned_bytes += num_bytes
        self.freed.set()

    @property
    def _kept(self) -> str:
        return f" and {self.abandoned_bytes} are kept by clients whose sessions are over" if self.abandoned_bytes else ""
