"""The memory of one feed: arenas that a session reserved, and what is added to them while subscribers wait for storage.

To touch fresh memory takes a second per some GiB. So a first arena is small and allocated by all threads at once; the rest of
the share follows in pieces, each when batches have no room without it: who reads as fast as batches come never needs most of
it. A piece has room for the longest strips that the window may grow to. Every piece is allocated step by step: a feed that is
closed meanwhile leaves no thread busy.

[Note: What is reserved]
A session reserves its share. What there is beyond it is reserved here, at any time: arenas that were added, and those of a
share that has become smaller until they are given back. So no more memory is ever there than the budget says, and no arena is
made while others that are about to be given back take its room.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gyre_daemon.errors import Overloaded
from gyre_daemon.memory.arena import Arena, Slot
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.mapped import Mapped
from gyre_daemon.memory.share import Share
from gyre_daemon.runtime.fair import FairExecutor, Flow

_PIECE_BYTES = 8 << 20  # or one strip
_MIN_FIRST_BYTES = 2 << 20
_STEP_BYTES = 8 << 20  # that are allocated in one job of a thread


class Arenas:
    """Slots in several arenas: those of somebody's share, and others that are taken from the budget here.

    Attributes:
        num_windows: how many times the share's window there is memory for.
        extent: what the share has grown to, where strips become longer with it.
        first_bytes: of the first arena, which stays from beginning to end.
    """

    def __init__(
        self, share: Share, budget: Budget, mapped: Mapped, limit_bytes: int, workers: FairExecutor, *, in_bulk: bool = False
    ) -> None:
        """No memory yet: see `allocate`.

        Args:
            share: whose memory this is.
            budget: of what is added.
            mapped: told of each arena.
            limit_bytes: of all arenas together.
            workers: allocate.
            in_bulk: copiers may write into the arenas, and what is added is for longer strips.
        """
        self.num_windows = 1
        self.extent = self._share = share
        self._piece = _whole(share.strip_bytes * (share.max_windows if share.may_grow else 1))
        self._budget = budget
        self._mapped = mapped
        self._limit_bytes = limit_bytes
        self._workers = workers
        self._in_bulk = in_bulk
        self.first_bytes = _first_bytes(share)
        self._reserved_bytes = 0  # here, of arenas: see the note above
        self._making_bytes = 0  # of one more own arena
        self._growing_bytes = 0  # still to be added
        self._own: list[Arena] = []
        self._added: list[Arena] = []
        self._leaving: list[Arena] = []
        self._growing: asyncio.Task[None] | None = None
        self._has_shrunk = asyncio.Event()
        self._is_short = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        """All of the share is there, or what is about to be given back takes its room."""
        return self._missing_bytes + self._making_bytes <= 0

    @property
    def first(self) -> Arena:
        """The one that is there from beginning to end."""
        return self._own[0]

    @property
    def held_bytes(self) -> int:
        """Of slots that are taken."""
        return sum(arena.held_bytes for arena in self._all)

    @property
    def _all(self) -> list[Arena]:
        return self._own + self._added + self._leaving

    async def allocate(self, flow: Flow) -> None:
        """Make the first arena; `complete` makes the rest.

        Raises:
            Overloaded: the machine has no such memory.
        """
        await self._make(self.first_bytes, flow, self._own)

    async def complete(self, flow: Flow, made: Callable[[], None]) -> None:
        """Make what the share has beyond the first arena, each piece when somebody found no slot, for ever.

        Args:
            flow: for whom.
            made: called when there is a piece more.

        Raises:
            Overloaded: the machine has no such memory.
        """
        while True:
            await self._is_short.wait()
            if not self.is_complete:
                await self._make_piece(next(self._pieces(self._missing_bytes)), flow)
                made()
            self._is_short.clear()

    async def _make_piece(self, num_bytes: int, flow: Flow) -> None:
        self._making_bytes = num_bytes
        try:
            await self._make(num_bytes, flow, self._own)
        finally:
            self._making_bytes = 0
            self._trim()  # the share may have become smaller meanwhile

    def take(self, num_bytes: int) -> Slot | None:
        """A free slot, or None until one is put back or another arena is there."""
        slot = next((slot for arena in self._own + self._added if (slot := arena.take(num_bytes))), None)
        if slot is None:
            self._is_short.set()
        return slot

    def put_back(self, slot: Slot) -> None:
        """Nobody reads the slot any more."""
        slot.arena.put_back(slot)
        if self._leaving:
            self._drop_empty()

    def grow(self, num_windows: int, flow: Flow) -> "asyncio.Task[None] | None":
        """Have memory for so many windows, if the limit allows it and the budget still has a share for somebody else.

        Returns:
            What is done once it is there; None where it cannot be had.
        """
        share = self._share
        window_bytes = (
            -(-share.num_bytes // self._piece) * self._piece if self._in_bulk else share.num_ahead * share.batch_bytes
        )
        more = (num_windows - self.num_windows) * window_bytes
        has = self._share.num_bytes + _bytes_of(self._added) + _bytes_of(self._leaving)
        needed = share.with_notes(more)
        if self._growing or has + more > self._limit_bytes or needed + share.reserved_bytes > self._budget.free_bytes:
            return None
        self._growing_bytes = more
        self._settle()
        self._growing = asyncio.create_task(self._add(more, num_windows, flow))
        return self._growing

    def shrink(self) -> asyncio.Event | None:
        """Give back what was added, as soon as no batch lies there, which the event tells; None where nothing was added."""
        if self._growing:
            self._growing.cancel()
        if not self._added:
            return None
        self._resize(1)
        for arena in self._added:
            arena.leave()
        self._leaving += self._added
        self._added.clear()
        self._has_shrunk.clear()
        self._drop_empty()
        return self._has_shrunk

    def reshape(self, share: Share) -> None:
        """Have a smaller share: what is beyond it is given back as soon as no batch lies there."""
        self.shrink()
        self._share = self.extent = share
        self._trim()

    def _trim(self) -> None:
        """Leave what is beyond the share."""
        while len(self._own) > 1 and _bytes_of(self._own) + self._making_bytes > self._share.num_bytes:
            arena = self._own.pop()
            self._leaving.append(arena)
            arena.leave()
        self._has_shrunk.clear()
        self._drop_empty()

    def _settle(self) -> None:
        """Have reserved what the note above says."""
        share, reserved_bytes = self._share, _bytes_of(self._added) + self._growing_bytes + max(0, -self._missing_bytes)
        self._budget.adjust(share.with_notes(reserved_bytes) - share.with_notes(self._reserved_bytes))
        self._reserved_bytes = reserved_bytes

    @property
    def is_giving_back(self) -> bool:
        """Some arenas are given back as soon as no batch lies there."""
        return bool(self._leaving)

    def is_leaving(self, slot: Slot) -> bool:
        """Its arena is given back as soon as no batch lies there."""
        return slot.arena in self._leaving

    @property
    def leaving_bytes(self) -> int:
        """What is free for others as soon as no batch lies there."""
        return self._share.with_notes(min(_bytes_of(self._leaving), max(0, -self._missing_bytes)))

    @property
    def _missing_bytes(self) -> int:
        """Of the share; negative where more is there, what is about to be given back included."""
        return self._share.num_bytes - _bytes_of(self._own) - _bytes_of(self._leaving) - self._making_bytes

    def close(self) -> None:
        """Give everything back; what is still read or written as soon as that is over."""
        if self._growing:
            self._growing.cancel()
        for arena in self._all:
            arena.close()
        for arenas in (self._own, self._added, self._leaving):
            arenas.clear()
        self._making_bytes = self._growing_bytes = 0
        self._settle()
        self._has_shrunk.set()

    def _pieces(self, num_bytes: int) -> Iterator[int]:
        """So many bytes, in pieces."""
        while num_bytes >= 2 * self._piece:
            yield self._piece
            num_bytes -= self._piece
        if num_bytes:
            yield num_bytes

    def _drop_empty(self) -> None:
        for arena in [arena for arena in self._leaving if not arena.held_bytes]:
            self._leaving.remove(arena)
            arena.close()
        self._settle()
        if not self._leaving:
            self._has_shrunk.set()

    async def _add(self, num_bytes: int, num_windows: int, flow: Flow) -> None:
        try:
            for piece in self._pieces(num_bytes) if self._in_bulk else (num_bytes,):
                await self._make(piece, flow, self._added)
                self._growing_bytes -= piece
            self._resize(num_windows)
        except Overloaded:  # the machine has less than the budget says: go on with what there is
            pass
        finally:
            self._growing_bytes = 0
            self._settle()
            self._growing = None

    def _resize(self, num_windows: int) -> None:
        self.num_windows = num_windows
        if self._in_bulk:
            self.extent = self._share.times(num_windows)

    async def _make(self, num_bytes: int, flow: Flow, into: list[Arena]) -> None:
        await self._mapped.room(num_bytes)
        arena = Arena(num_bytes, self._budget)
        self._mapped.add(arena)
        try:
            await self._allocate(arena, flow)
            arena.seal()
        except BaseException:
            arena.close()
            raise
        into.append(arena)

    async def _allocate(self, arena: Arena, flow: Flow) -> None:
        works = [
            partial(arena.allocate, begin, min(begin + _STEP_BYTES, arena.num_bytes))
            for begin in range(0, arena.num_bytes, _STEP_BYTES)
        ]
        if self._in_bulk:
            works.insert(0, partial(self._mapped.share, arena))
        num_at_once = 1 if self._own else 1 + self._workers.num_threads  # nobody waits for more than the first
        for index in range(0, len(works), num_at_once):
            await asyncio.gather(*(self._workers.run(flow, 0, 0, work) for work in works[index : index + num_at_once]))


def _bytes_of(arenas: Sequence[Arena]) -> int:
    return sum(arena.num_bytes for arena in arenas)


def _first_bytes(share: Share) -> int:
    """A piece, but no more than a fourth of the share unless that is little: all the rest can be given back one day."""
    strip_bytes = share.strip_bytes
    fourth = max(share.num_bytes // 4, _MIN_FIRST_BYTES) // strip_bytes * strip_bytes
    return min(_whole(strip_bytes), max(strip_bytes, fourth), share.num_bytes)


def _whole(strip_bytes: int) -> int:
    """Strips of a piece, or one."""
    return max(1, _PIECE_BYTES // strip_bytes) * strip_bytes
