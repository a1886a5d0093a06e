"""The memory of batches: one budget for the daemon, a share of it for every session, arenas of slots that are reused.

A session reserves its share when it opens and keeps it to its end, also while it reads along in another's arena: so one that
stops reading can never take memory from another. An arena is a sealed memory file: whoever gets its descriptor can map and read
it without a copy, and can neither write into it nor change its size; it vanishes with its last user, however that ends.
"""

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gyre_daemon.batch import whole_pages
from gyre_daemon.copiers import new_key
from gyre_daemon.errors import Overloaded

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not named in the standard library, as the next
_F_SEAL_FUTURE_WRITE = 0x0010  # since Linux 5.1
_SESSION_NOTE_BYTES = 256 << 10  # of a session, its feed and its connection
_STRIP_BYTES, _MAX_TOGETHER, _MAX_WINDOWS = 26 << 20, 256, 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise  # `mmap.madvise` keeps the interpreter's lock for as long as it takes
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE


class Budget:
    """Bytes that all arenas may have together, with what is noted of the batches in them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What can still be reserved."""
        return self.limit_bytes - self.reserved_bytes

    def reserve(self, num_bytes: int, purpose: str) -> None:
        """Take a share.

        Raises:
            Overloaded: it does not fit; says needed and limit.
        """
        if num_bytes > self.free_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but of the daemon's memory_budget of {self.limit_bytes} bytes only "
                f"{self.free_bytes} are free; close a session, lower the batch size or raise memory_budget",
                {"needed_bytes": num_bytes, "free_bytes": self.free_bytes, "limit_bytes": self.limit_bytes},
            )
        self.reserved_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return a share."""
        self.reserved_bytes -= num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The memory of one strip of batches.

    Attributes:
        arena: that it is a part of.
        offset_bytes: in the arena.
        memory: writable; whole pages, at least as long as was asked for.
        address: of its first byte.
    """

    arena: "Arena"
    offset_bytes: int
    memory: memoryview
    address: int

    @property
    def num_bytes(self) -> int:
        """Capacity."""
        return self.memory.nbytes


class Arena:
    """Slots for batches.

    Attributes:
        key: its name, which no other arena of this process has or had.
        address: of its first byte.
        held_bytes: of slots that are taken.
    """

    def __init__(self, num_bytes: int) -> None:
        """Map an empty file; `allocate` gives it its memory, `seal` ends that.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.key = new_key()
        self.num_bytes = whole_pages(num_bytes)
        self.descriptor = os.memfd_create("gyre-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        with self._refusal():
            os.ftruncate(self.descriptor, self.num_bytes)
            self._mapping = mmap.mmap(self.descriptor, self.num_bytes, flags=mmap.MAP_SHARED)
        self._memory = memoryview(self._mapping)
        self.address = np.frombuffer(self._mapping, np.uint8).ctypes.data
        self._free = [(0, self.num_bytes)]  # (offset, length) of every free range, sorted, none touching the next
        self.held_bytes = 0

    def allocate(self, begin: int, end: int) -> None:
        """Allocate and touch a part, of whole pages; takes some ms per 10 MiB. Different parts in any threads at once.

        Raises:
            Overloaded: the machine has no such memory.
        """
        with self._refusal():
            os.posix_fallocate(self.descriptor, begin, end - begin)
        mapping = self._mapping  # is here until the call returns
        _madvise(self.address + begin, end - begin, _MADV_POPULATE_WRITE)  # an older kernel: each page when it is written to
        del mapping

    def seal(self) -> None:
        """From now on nobody else can write, and nobody at all change the size; all memory is there and slots can be taken."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def take(self, num_bytes: int) -> Slot | None:
        """The first free slot of at least so many bytes, or None until enough is given back."""
        needed = whole_pages(num_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= needed:
                self._free[index : index + 1] = [(offset + needed, length - needed)] if length > needed else []
                self.held_bytes += needed
                return Slot(self, offset, self._memory[offset : offset + needed], self.address + offset)
        return None

    def put_back(self, slot: Slot) -> None:
        """Make a slot free for another batch; nobody may read it any more."""
        begin, end = slot.offset_bytes, slot.offset_bytes + slot.num_bytes
        self.held_bytes -= slot.num_bytes
        index = bisect.bisect(self._free, (begin,))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end - begin))

    def when_unmapped(self, act: Callable[[], object]) -> None:
        """Do something, in any thread, once this process has the memory no longer: after `close` and the last read or write."""
        weakref.finalize(self._mapping, act).atexit = False

    @contextlib.contextmanager
    def _refusal(self) -> Iterator[None]:
        """What an operating system without memory says inside."""
        try:
            yield
        except OSError as error:
            raise Overloaded(f"this machine has no {self.num_bytes} bytes of memory for a session: {error.strerror}") from error

    def close(self) -> None:
        """Let go of the memory; it lives on while anybody still reads or writes a slot, and is never used for another batch."""
        self._close()
        self._free.clear()


@dataclass(frozen=True, slots=True)
class Share:
    """How a session divides its memory.

    Attributes:
        batch_bytes: upper bound of one batch.
        note_bytes: upper bound of what is noted of one batch beside its memory.
        num_bytes: of its arenas.
        num_ahead: batches in flight or ready: the prefetch window.
        num_together: batches that make a strip: they are read together and lie in one slot.
        max_windows: how many times the memory makes strips as long as they may be.
        num_queued: batches that its client may have received and not taken.
        num_kept: batches that its client may go on to use after it took the next.
        may_grow: nobody asked for just this window.
    """

    batch_bytes: int
    note_bytes: int
    num_bytes: int
    num_ahead: int
    num_together: int
    max_windows: int
    num_queued: int
    num_kept: int
    may_grow: bool

    @property
    def strip_bytes(self) -> int:
        """Upper bound of a strip."""
        return self.batch_bytes * self.num_together

    @property
    def reserved_bytes(self) -> int:
        """What a session with it takes of the budget."""
        return _SESSION_NOTE_BYTES + self.with_notes(self.num_bytes)

    def with_notes(self, num_bytes: int) -> int:
        """So many bytes of arenas, with what is noted of the batches in them."""
        return num_bytes + num_bytes // self.batch_bytes * self.note_bytes

    def times(self, num_windows: int) -> "Share":
        """As many times the memory, for longer strips."""
        return replace(
            self,
            num_bytes=self.num_bytes * num_windows,
            num_ahead=self.num_ahead * num_windows,
            num_together=self.num_together * num_windows,
            num_queued=self.num_queued * num_windows,
            num_kept=self.num_kept * num_windows,
        )


def divide(
    batch_bytes: int,
    num_ahead: int,
    limit_bytes: int,
    *,
    note_bytes: int = 0,
    in_strips: bool = False,
    may_grow: bool = False,
) -> Share:
    """The share of a session that wants to be so many batches ahead: within the limit, but room for one batch in any case.

    Args:
        batch_bytes: upper bound of a batch.
        num_ahead: the prefetch window it would like.
        limit_bytes: what it may have.
        note_bytes: see `Share`.
        in_strips: whether several small batches are read together; a third of the window at most.
        may_grow: whether more may be added later.
    """
    batch_bytes = whole_pages(batch_bytes)
    num_wanted = 2 * num_ahead + max(2, 2 * num_ahead // 3)
    num_slots = max(1, min(num_wanted, (limit_bytes - _SESSION_NOTE_BYTES) // (batch_bytes + note_bytes)))
    if num_slots < num_wanted:
        num_ahead = max(1, 3 * (num_slots - 1) // 8)
    longest = max(1, min(_STRIP_BYTES // batch_bytes, _MAX_TOGETHER)) if in_strips else 1
    num_together = max(1, min(longest, num_ahead // 3))
    max_windows = min(_MAX_WINDOWS, longest // num_together) if num_ahead >= 3 else 1  # three strips at least are under way
    num_queued = min(num_ahead, max(1, num_slots - num_ahead)) // num_together * num_together  # whole strips travel
    num_kept = max(0, num_slots - num_ahead - num_queued)
    num_bytes = num_slots * batch_bytes
    return Share(batch_bytes, note_bytes, num_bytes, num_ahead, num_together, max_windows, num_queued, num_kept, may_grow)
