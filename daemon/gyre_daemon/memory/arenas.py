"""The memory of one shared stream: slots in several arenas.

[Note: The life of a slot] The kernel needs about a second to allocate a few GiB of fresh memory. So
the first arena is small, and all threads allocate it together. The rest of the share follows piece
by piece, one arena whenever a batch group finds no slot; a trainer faster than its storage
never needs most of it. A slot is taken for a batch group before the group is read. The group owns
the slot until no consumer needs any of its batches (`Free` in `sessions.stream_state`); then the
slot is put back. Code that reads or writes in a slot meanwhile holds a lease of the arena; see
[Note: Who owns an arena] in `arena`.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from gyre_daemon.memory.arena import Arena, Slot
from gyre_daemon.memory.arena_registry import ArenaRegistry
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.share import Share
from gyre_daemon.runtime.fair import FairExecutor, Flow

# An arena has about this many bytes, and at least one batch group. If it is larger, a trainer that
# is a little slow makes the daemon allocate more memory than it needs; if smaller, more file
# descriptors travel to each client.
_PIECE_BYTES = 8 << 20
# A thread allocates this much before another job has its turn. With more, other jobs wait for their
# turn; with less, the threads change jobs more often.
_STEP_BYTES = 8 << 20


class Arenas:
    """Slots in the arenas of one share."""

    def __init__(
        self,
        share: Share,
        budget: Budget,
        registry: ArenaRegistry,
        workers: FairExecutor,
        *,
        shares_with_copy_workers: bool = False,
    ) -> None:
        """Make no arena yet; `allocate` makes the first.

        Args:
            share: the memory that the session has reserved.
            budget: told of the bytes that clients keep.
            registry: is told of each arena.
            workers: the threads that allocate.
            shares_with_copy_workers: whether copy workers write into the arenas.
        """
        self._share = share
        self._piece_bytes = _whole(share.group_bytes)
        self._budget = budget
        self._registry = registry
        self._workers = workers
        self._shares_with_copy_workers = shares_with_copy_workers
        self._making_bytes = 0  # the size of the arena in the making, or 0
        self._own: list[Arena] = []
        self._is_closed = False
        self._is_short = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether no further arena can be made: all are there."""
        return self._missing_bytes <= 0

    @property
    def first(self) -> Arena:
        """The first arena."""
        return self._own[0]

    @property
    def held_bytes(self) -> int:
        """The bytes of all taken slots."""
        return sum(arena.held_bytes for arena in self._own)

    async def allocate(self, flow: Flow) -> None:
        """Make the first arena; `complete` makes the others.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        await self._make(min(self._piece_bytes, self._share.num_bytes), flow)

    async def complete(self, flow: Flow, made: Callable[[], None]) -> None:
        """Make one more arena of the share whenever a batch group found no slot, until cancelled.

        Args:
            flow: the job that needs the memory.
            made: called after each new arena.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        while True:
            await self._is_short.wait()
            if not self.is_complete:
                missing_bytes = self._missing_bytes
                is_last = missing_bytes < 2 * self._piece_bytes
                await self._make_piece(missing_bytes if is_last else self._piece_bytes, flow)
                made()
            self._is_short.clear()

    def take(self, num_bytes: int) -> Slot | None:
        """Take a free slot of at least `num_bytes`.

        If there is none, return None and ask `complete` for a further arena.
        """
        slot = next((slot for arena in self._own if (slot := arena.take(num_bytes))), None)
        if slot is None:
            self._is_short.set()
        return slot

    def put_back(self, slot: Slot) -> None:
        """Free a slot whose batches are no longer needed."""
        slot.arena.put_back(slot)

    def close(self) -> None:
        """Give all arenas back; a leased one, when its last lease is returned.

        An arena in the making is given back, too: by the task that makes it, which may learn
        of its cancellation only after it has made it.
        """
        self._is_closed = True
        for arena in self._own:
            arena.close()
        self._own.clear()
        self._making_bytes = 0

    @property
    def _missing_bytes(self) -> int:
        """The bytes of the share without an arena."""
        there = sum(arena.num_bytes for arena in self._own)
        return self._share.num_bytes - there - self._making_bytes

    async def _make_piece(self, num_bytes: int, flow: Flow) -> None:
        self._making_bytes = num_bytes
        try:
            await self._make(num_bytes, flow)
        finally:
            self._making_bytes = 0

    async def _make(self, num_bytes: int, flow: Flow) -> None:
        await self._registry.room(num_bytes)
        await self._budget.settle(flow.user)
        arena = Arena(num_bytes, self._budget, self._registry.files)
        self._registry.add(arena)
        try:
            await self._allocate(arena, flow)
            arena.seal()
        except BaseException:
            arena.close()
            raise
        if self._is_closed:  # meanwhile, so `close` has not seen this one
            arena.close()
        else:
            self._own.append(arena)

    async def _allocate(self, arena: Arena, flow: Flow) -> None:
        works = [
            partial(arena.allocate, begin, min(begin + _STEP_BYTES, arena.num_bytes))
            for begin in range(0, arena.num_bytes, _STEP_BYTES)
        ]
        if self._shares_with_copy_workers:
            works.insert(0, partial(self._registry.map_in_copy_workers, arena))
        # Consumers wait for the first arena alone, so all threads allocate it together.
        num_at_once = 1 if self._own else 1 + self._workers.num_threads
        for index in range(0, len(works), num_at_once):
            some = works[index : index + num_at_once]
            await asyncio.gather(*(self._workers.run(flow, 0, 0, work) for work in some))


def _whole(group_bytes: int) -> int:
    """The size of a piece: as many whole batch groups as fit, and at least one."""
    return max(1, _PIECE_BYTES // group_bytes) * group_bytes
