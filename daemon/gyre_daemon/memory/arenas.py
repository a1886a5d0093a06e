"""The memory of one shared stream: slots in several arenas.

[Note: The life of a slot] The kernel needs about a second to allocate a few GiB of fresh memory. So
the first arena is small, and all threads allocate it together. The rest of the share follows piece
by piece, one arena whenever a batch group finds no slot; a trainer faster than its storage
never needs most of it. A slot is taken for a batch group before the group is read. The group owns
the slot until no consumer needs any of its batches (`Free` in `sessions.stream_state`); then the
slot is put back. Code that reads or writes in a slot meanwhile holds a lease of the arena; see
[Note: Who owns an arena] in `arena`.

If the share becomes smaller, whole arenas *leave*: no slot is taken there any more, clients are
told to unmap them, and each is given back when its last slot is put back. Batches there that were
not sent yet are forgotten and read again elsewhere. So only batches that clients hold delay this.

[Note: Reserved bytes] A session reserves its share of the budget. If the share has become smaller
and leaving arenas exceed it, this module reserves the excess until they are given back. So the
arenas never take more memory than the budget has, and no arena is made while leaving ones take its
room.
"""

import asyncio
from collections.abc import Callable, Sequence
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
# The first arena is at most a fourth of the share, but not less than this. It never leaves, so a
# session cannot shrink below it: with more, a new session finds less memory; with less, the first
# batches of a job wait for a second arena.
_MIN_FIRST_BYTES = 2 << 20
# A thread allocates this much before another job has its turn. With more, other jobs wait for their
# turn; with less, the threads change jobs more often.
_STEP_BYTES = 8 << 20


class Arenas:
    """Slots in the arenas of one share.

    Attributes:
        first_bytes: the size of the first arena, which never leaves.
    """

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
            budget: where the memory of leaving arenas is reserved; see the note above.
            registry: is told of each arena.
            workers: the threads that allocate.
            shares_with_copy_workers: whether copy workers write into the arenas.
        """
        self.first_bytes = _first_bytes(share)
        self._share = share
        self._piece_bytes = _whole(share.group_bytes)
        self._budget = budget
        self._registry = registry
        self._workers = workers
        self._shares_with_copy_workers = shares_with_copy_workers
        self._reserved_bytes = 0  # beyond the share: see [Note: Reserved bytes]
        self._making_bytes = 0  # the size of the arena in the making, or 0
        self._own: list[Arena] = []
        self._leaving: list[Arena] = []
        self._is_closed = False
        self._is_short = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """Whether no further arena can be made: all are there, or leaving ones take their room."""
        return self._missing_bytes <= 0

    @property
    def first(self) -> Arena:
        """The first arena, which never leaves."""
        return self._own[0]

    @property
    def held_bytes(self) -> int:
        """The bytes of all taken slots."""
        return sum(arena.held_bytes for arena in self._own + self._leaving)

    @property
    def is_giving_back(self) -> bool:
        """Whether some arenas are leaving."""
        return bool(self._leaving)

    @property
    def leaving_bytes(self) -> int:
        """The bytes that the budget gets back when no slot is taken in leaving arenas any more."""
        return self._share.with_metadata(
            min(_bytes_of(self._leaving), max(0, -self._missing_bytes))
        )

    def is_leaving(self, slot: Slot) -> bool:
        """Whether the slot's arena is given back as soon as no slot is taken there."""
        return slot.arena in self._leaving

    async def allocate(self, flow: Flow) -> None:
        """Make the first arena; `complete` makes the others.

        Raises:
            Overloaded: the machine does not have the memory.
        """
        await self._make(self.first_bytes, flow)

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
        if self._leaving:
            self._drop_empty()

    def reshape(self, share: Share) -> None:
        """Shrink to a smaller share: arenas beyond it leave."""
        self._share = share
        self._trim()

    def close(self) -> None:
        """Give all arenas back; a leased one, when its last lease is returned.

        An arena in the making is given back, too: by the task that makes it, which may learn
        of its cancellation only after it has made it.
        """
        self._is_closed = True
        for arena in self._own + self._leaving:
            arena.close()
        self._own.clear()
        self._leaving.clear()
        self._making_bytes = 0
        self._settle()

    @property
    def _missing_bytes(self) -> int:
        """The bytes of the share without an arena; negative while leaving arenas exceed it."""
        there = _bytes_of(self._own) + _bytes_of(self._leaving) + self._making_bytes
        return self._share.num_bytes - there

    def _trim(self) -> None:
        while (
            len(self._own) > 1 and _bytes_of(self._own) + self._making_bytes > self._share.num_bytes
        ):
            arena = self._own.pop()
            self._leaving.append(arena)
            arena.leave()
        self._drop_empty()

    def _drop_empty(self) -> None:
        for arena in [arena for arena in self._leaving if not arena.held_bytes]:
            self._leaving.remove(arena)
            arena.close()
        self._settle()

    def _settle(self) -> None:
        """Reserve bytes as [Note: Reserved bytes] explains."""
        share, reserved_bytes = self._share, max(0, -self._missing_bytes)
        self._budget.adjust(
            share.with_metadata(reserved_bytes) - share.with_metadata(self._reserved_bytes)
        )
        self._reserved_bytes = reserved_bytes

    async def _make_piece(self, num_bytes: int, flow: Flow) -> None:
        self._making_bytes = num_bytes
        try:
            await self._make(num_bytes, flow)
        finally:
            self._making_bytes = 0
            self._trim()  # the share may have become smaller meanwhile

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


def _bytes_of(arenas: Sequence[Arena]) -> int:
    return sum(arena.num_bytes for arena in arenas)


def _first_bytes(share: Share) -> int:
    """The size of the first arena: a piece, but at most a fourth of a large share."""
    group_bytes = share.group_bytes
    fourth = max(share.num_bytes // 4, _MIN_FIRST_BYTES) // group_bytes * group_bytes
    return min(_whole(group_bytes), max(group_bytes, fourth), share.num_bytes)


def _whole(group_bytes: int) -> int:
    """The size of a piece: as many whole batch groups as fit, and at least one."""
    return max(1, _PIECE_BYTES // group_bytes) * group_bytes
