"""The memory budget that all sessions of a daemon share."""

import asyncio

from gyre_daemon.errors import Overloaded


class Budget:
    """How many bytes arenas and the metadata of their batches may have together.

    Attributes:
        freed: set whenever bytes become free; waiters clear it.
        limit_bytes: the whole budget.
        reserved_bytes: reserved by sessions.
        abandoned_bytes: size of the arenas that the daemon has closed and clients still map.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.abandoned_bytes = 0
        self.freed = asyncio.Event()

    @property
    def free_bytes(self) -> int:
        """How many bytes can still be reserved."""
        return self.limit_bytes - self.reserved_bytes - self.abandoned_bytes

    def reserve(self, num_bytes: int, purpose: str) -> None:
        """Reserve bytes.

        Args:
            num_bytes: how many.
            purpose: what needs them, for the error message.

        Raises:
            Overloaded: they are not free.
        """
        if num_bytes > self.free_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but of the daemon's memory_budget of "
                f"{self.limit_bytes} bytes only {max(0, self.free_bytes)} are free{self._kept}; "
                "close a session, lower the batch size or raise memory_budget",
                {
                    "needed_bytes": num_bytes,
                    "free_bytes": max(0, self.free_bytes),
                    "limit_bytes": self.limit_bytes,
                },
            )
        self.reserved_bytes += num_bytes

    def check(self, num_bytes: int, purpose: str) -> None:
        """Check that the bytes could be reserved if nobody else had any.

        Args:
            num_bytes: how many.
            purpose: as for `reserve`.

        Raises:
            Overloaded: they could not.
        """
        if num_bytes > self.limit_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, more than the daemon's memory_budget of "
                f"{self.limit_bytes} bytes; lower the batch size or raise memory_budget",
                {"needed_bytes": num_bytes, "limit_bytes": self.limit_bytes},
            )

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were reserved."""
        self.reserved_bytes -= num_bytes
        self.freed.set()

    def adjust(self, num_bytes: int) -> None:
        """Reserve bytes that are known to be free or in use already; return them if negative."""
        self.reserved_bytes += num_bytes
        if num_bytes < 0:
            self.freed.set()

    def abandon(self, num_bytes: int) -> None:
        """Count bytes as abandoned; as no longer abandoned if negative."""
        self.abandoned_bytes += num_bytes
        self.freed.set()

    @property
    def _kept(self) -> str:
        return (
            f" and {self.abandoned_bytes} are kept by clients whose sessions are over"
            if self.abandoned_bytes
            else ""
        )
