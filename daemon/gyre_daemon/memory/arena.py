"""The memory of batches: arenas of slots that are reused.

[Note: Who owns an arena]
A feed makes an arena and closes it. While somebody reads or writes there, it holds a lease: each job of a thread for as long as
it runs, each coroutine that waits for bytes which land there, each payload until it was sent. The memory is given back when the
arena is closed and the last lease has been returned, and at that moment, whatever still refers to a slot.
"""

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gyre_daemon.copiers import new_key
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.memfile import MemoryFile
from gyre_daemon.memory.pages import whole_pages
from gyre_daemon.storage.base import ArenaClosed


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The memory of one strip of batches.

    Attributes:
        arena: that it is a part of.
        offset_bytes: in the arena.
        memory: writable; whole pages, at least as long as was asked for. Only who holds a lease of the arena may look into it.
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


class Reader(Protocol):
    """A client that maps arenas."""

    def arena_left(self, arena: "Arena") -> None:
        """No further batch comes to lie there: it should be unmapped."""


class Arena:
    """Slots for batches, in a sealed memory file: see the note above.

    Attributes:
        key: its name, which no other arena of this process has or had.
        num_bytes: its size.
        address: of its first byte.
        held_bytes: of slots that are taken.
    """

    def __init__(self, num_bytes: int, budget: Budget | None = None) -> None:
        """Map an empty file; `allocate` gives it its memory, `seal` ends that.

        Args:
            num_bytes: its size, if that is whole pages.
            budget: told what clients alone keep of it.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.key = new_key()
        self.num_bytes = whole_pages(num_bytes)
        self._file = MemoryFile(self.num_bytes)
        self.address = self._file.address
        self._free = [(0, self.num_bytes)]  # (offset, length) of every free range, sorted, none touching the next
        self.held_bytes = 0
        self._budget = budget or Budget(0)
        self._readers: list[Reader] = []  # one as often as it maps it
        self._is_closed = False
        self._when_unmapped: list[Callable[[], object]] = []
        self._lock = threading.Lock()  # over the next one
        self._num_leases = 1  # that of whoever made it

    @property
    def descriptor(self) -> int:
        """Of the file; -1 once the memory is given back."""
        return self._file.descriptor

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Inside, the memory is there. In any thread.

        Raises:
            ArenaClosed: it is not any more; nobody waits for what would be written.
        """
        if not self.acquire():
            raise ArenaClosed
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> bool:
        """Hold a lease until `release`; False where the memory was given back. In any thread."""
        with self._lock:
            self._num_leases += self._num_leases > 0
            return self._num_leases > 0

    def release(self) -> None:
        """Return a lease. In any thread."""
        with self._lock:
            self._num_leases -= 1
            if self._num_leases:
                return
        self._file.close()
        for act in self._when_unmapped:
            act()

    def allocate(self, begin: int, end: int) -> None:
        """See `MemoryFile.allocate`.

        Raises:
            Overloaded: the machine has no such memory.
            ArenaClosed: nobody needs it any more.
        """
        with self.lease():
            self._file.allocate(begin, end)

    def seal(self) -> None:
        """See `MemoryFile.seal`; from now on slots can be taken."""
        self._file.seal()

    def take(self, num_bytes: int) -> Slot | None:
        """The first free slot of at least so many bytes, or None until enough is given back."""
        needed = whole_pages(num_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= needed:
                self._free[index : index + 1] = [(offset + needed, length - needed)] if length > needed else []
                self.held_bytes += needed
                return Slot(self, offset, self._file.memory[offset : offset + needed], self.address + offset)
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
        """Do something, in the thread that returns the last lease, once this process has the memory no longer."""
        self._when_unmapped.append(act)

    def close(self) -> None:
        """Use it for no further batch; its memory is given back with the last lease. A second call changes nothing.

        What clients still map of it counts as abandoned until they have unmapped it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._free.clear()
        if self._readers:
            self._budget.abandon(self.num_bytes)
        self.leave()
        self.release()

    def leave(self) -> None:
        """No further batch comes to lie here: clients should unmap it."""
        for reader in set(self._readers):
            reader.arena_left(self)

    def add_reader(self, reader: "Reader") -> None:
        """A client maps it from now on."""
        self._readers.append(reader)

    def remove_reader(self, reader: "Reader") -> None:
        """A client has it no longer."""
        self._readers.remove(reader)
        if self._is_closed and not self._readers:
            self._budget.abandon(-self.num_bytes)
