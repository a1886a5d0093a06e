"""The memory budget that all sessions of a daemon share."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection

from gyre_daemon.errors import Overloaded

_NUM_NAMED = 3  # users in an error message
# How long a user has to unmap arenas before its sessions find no memory. A client does it within
# milliseconds, unless its machine is busy.
_MAX_WAIT_S = 10.0


class Budget:
    """How many bytes arenas and the metadata of their batches may have together.

    Attributes:
        freed: set whenever bytes become free; waiters clear it.
        limit_bytes: the whole budget.
        reserved_bytes: reserved by sessions.
        abandoned_bytes: size of the arenas that the daemon has closed and that clients may keep.
        abandoned_by: the same by user. Where several users may keep an arena, it counts for each of
            them in equal parts, since the kernel does not tell which of them do.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.abandoned_bytes = 0
        self.abandoned_by: Counter[str] = Counter()
        self.freed = asyncio.Event()

    @property
    def free_bytes(self) -> int:
        """How many bytes can still be reserved."""
        return self.limit_bytes - self.reserved_bytes - self.abandoned_bytes

    def reserve(self, num_bytes: int, purpose: str, only_user: str | None = None) -> None:
        """Reserve bytes.

        Args:
            num_bytes: how many.
            purpose: the use of the bytes, for the error message.
            only_user: the one user whom the error message may name; None for all.

        Raises:
            Overloaded: they are not free.
        """
        if num_bytes > self.free_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but of the daemon's memory_budget of "
                f"{self.limit_bytes} bytes only {max(0, self.free_bytes)} are free"
                f"{self._kept(only_user)}. "
                "Close a session, lower the batch size or raise memory_budget.",
                {
                    "needed_bytes": num_bytes,
                    "free_bytes": max(0, self.free_bytes),
                    "limit_bytes": self.limit_bytes,
                },
            )
        self.reserved_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were reserved."""
        self.reserved_bytes -= num_bytes
        self.freed.set()

    async def settle(self, user: str) -> None:
        """Wait until a user's reserved memory can be used, but no longer than some seconds.

        A session whose stream ends goes on in another, with other arenas and the same reserved
        memory. A client that keeps the arenas of each stream would take more than there is.

        Raises:
            Overloaded: more is reserved and abandoned than there is, and the user keeps some.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_S):
                while self._is_overdrawn_by(user):
                    self.freed.clear()
                    await self.freed.wait()
        if self._is_overdrawn_by(user):
            raise Overloaded(
                f"{user} keeps {self.abandoned_by[user]} bytes of arenas that it was asked to "
                f"unmap, and the daemon's memory_budget of {self.limit_bytes} bytes is used up. "
                "Unmap them and close their descriptors."
            )

    def abandon(self, num_bytes: int, users: Collection[str]) -> None:
        """Count bytes of a closed arena that clients of these users may keep."""
        self.abandoned_bytes += num_bytes
        for user in users:
            self.abandoned_by[user] += num_bytes // len(users)
        self.freed.set()

    def regain(self, num_bytes: int, users: Collection[str]) -> None:
        """Count bytes no longer that were abandoned by these users."""
        self.abandoned_bytes -= num_bytes
        for user in users:
            self.abandoned_by[user] -= num_bytes // len(users)
        self.abandoned_by += Counter()  # forgets users at 0
        self.freed.set()

    def _is_overdrawn_by(self, user: str) -> bool:
        return self.free_bytes < 0 and self.abandoned_by[user] > 0

    def _kept(self, only_user: str | None) -> str:
        """Who keeps how much of closed arenas, for an error message."""
        if not self.abandoned_bytes:
            return ""
        users = self.abandoned_by.most_common(_NUM_NAMED)
        if only_user is not None:
            own_bytes = self.abandoned_by[only_user]
            users = [(only_user, own_bytes), ("other users", self.abandoned_bytes - own_bytes)]
        names = ", ".join(f"{user}: {num_bytes}" for user, num_bytes in users if num_bytes)
        return f" and {self.abandoned_bytes} are kept by clients whose sessions are over ({names})"
