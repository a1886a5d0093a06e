"""The memory of one feed: the arena that a session reserved, and what is added to it while subscribers wait for storage."""

import asyncio

from gyre_daemon.arena import Arena, Budget, Share, Slot
from gyre_daemon.errors import Overloaded
from gyre_daemon.fair import FairExecutor, Flow


class Arenas:
    """Slots in several arenas; the first is somebody's share already, the others are taken from the budget here.

    Attributes:
        num_windows: how many times the share's window there is memory for.
    """

    def __init__(self, share: Share, budget: Budget, limit_bytes: int, workers: FairExecutor) -> None:
        """No memory yet: see `allocate`."""
        self.num_windows = 1
        self._share = share
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._workers = workers
        self._arenas: list[Arena] = []
        self._leaving: list[Arena] = []
        self._growing: asyncio.Task[None] | None = None
        self._has_shrunk = asyncio.Event()

    @property
    def first(self) -> Arena:
        """The one that is there from beginning to end."""
        return self._arenas[0]

    @property
    def held_bytes(self) -> int:
        """Of slots that are taken."""
        return sum(arena.held_bytes for arena in self._all)

    @property
    def _all(self) -> list[Arena]:
        return self._arenas + self._leaving

    async def allocate(self, flow: Flow) -> None:
        """Make the first arena.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self._arenas.append(await self._workers.run(flow, 0, 0, lambda: Arena(self._share.num_bytes)))

    def take(self, num_bytes: int) -> Slot | None:
        """A free slot, or None until one is put back."""
        return next((slot for arena in self._arenas if (slot := arena.take(num_bytes))), None)

    def put_back(self, slot: Slot) -> None:
        """Nobody reads the slot any more."""
        slot.arena.put_back(slot)
        if self._leaving:
            self._drop_empty()

    def grow(self, flow: Flow) -> "asyncio.Task[None] | None":
        """Double the memory, if the limit allows it and the budget still has a share for somebody else; done with the task."""
        more = self.num_windows * self._share.num_ahead * self._share.batch_bytes
        has = sum(arena.num_bytes for arena in self._all)
        if self._growing or has + more > self._limit_bytes or more + self._share.num_bytes > self._budget.free_bytes:
            return None
        self._budget.reserve(more, "a longer window")
        self._growing = asyncio.create_task(self._add(more, flow))
        return self._growing

    def shrink(self) -> asyncio.Event | None:
        """Give back what was added, as soon as no batch lies there, which the event tells; None where nothing was added."""
        if self._growing:
            self._growing.cancel()
        if len(self._arenas) < 2:
            return None
        self.num_windows = 1
        self._leaving += self._arenas[1:]
        del self._arenas[1:]
        self._has_shrunk.clear()
        self._drop_empty()
        return self._has_shrunk

    def close(self) -> None:
        """Let go of everything; what is still read or written lives on and is never used again."""
        if self._growing:
            self._growing.cancel()
        self._budget.give_back(sum(arena.num_bytes for arena in self._all[1:]))
        for arena in self._all:
            arena.close()
        self._arenas.clear()
        self._leaving.clear()
        self._has_shrunk.set()

    def _drop_empty(self) -> None:
        for arena in [arena for arena in self._leaving if not arena.held_bytes]:
            self._leaving.remove(arena)
            arena.close()
            self._budget.give_back(arena.num_bytes)
        if not self._leaving:
            self._has_shrunk.set()

    async def _add(self, num_bytes: int, flow: Flow) -> None:
        try:
            arena = await self._workers.run(flow, 0, 0, lambda: Arena(num_bytes))
        except Overloaded:  # the machine has less than the budget says: go on with what there is
            self._budget.give_back(num_bytes)
            return
        except asyncio.CancelledError:
            self._budget.give_back(num_bytes)
            raise
        finally:
            self._growing = None
        self._arenas.append(arena)
        self.num_windows *= 2
