"""Arenas: memory files divided into slots for batches.

[Note: Who owns an arena] A shared stream makes an arena and closes it. Code that reads or writes
there holds a lease: a thread while its work runs, a coroutine while it waits for bytes that land
there, a payload until it was sent. When the arena is closed and the last lease was returned, the
memory is given back at once, even if a frame or a traceback still refers to a slot. An arena that
is still being made when its stream ends is closed by the task that makes it.

[Note: Arenas that clients keep] A client gets a descriptor that only reads. The daemon cannot see
how the client uses it: it may keep it after it said that it has unmapped the arena, or pass it on
to another process. So an arena that was handed over counts against the budget, and against the
users who were handed it, until the kernel says that the file is gone.
"""

import bisect
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.file_watch import FileWatch
from gyre_daemon.memory.memfile import MemoryFile
from gyre_daemon.memory.pages import whole_pages
from gyre_daemon.storage.base import ArenaClosed
from gyre_daemon.workers.copy_workers import new_key


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The memory of one batch group.

    Attributes:
        arena: the arena that the slot is a part of.
        offset_bytes: where it begins in the arena.
        memory: writable, whole pages, at least as long as was asked for. Only the holder of a lease
            of the arena may touch it.
        address: of its first byte.
    """

    arena: "Arena"
    offset_bytes: int
    memory: memoryview
    address: int

    @property
    def num_bytes(self) -> int:
        """The slot's capacity."""
        return self.memory.nbytes


class Arena:
    """Slots for batches in one memory file; [Note: Who owns an arena] says who frees it.

    Attributes:
        key: its name, which no other arena of this process has or had.
        num_bytes: its size.
        address: of its first byte.
        held_bytes: size of the taken slots.
        is_closed: no further batch is put here.
        is_kept: whether a client was handed it and the kernel has not said that it is gone.
    """

    def __init__(
        self, num_bytes: int, budget: Budget | None = None, files: FileWatch | None = None
    ) -> None:
        """Map an empty file; `allocate` gives it memory, `seal` makes slots available.

        Args:
            num_bytes: at least, rounded up to whole pages.
            budget: told about bytes kept by clients; see [Note: Arenas that clients keep].
            files: tells when the file is gone.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.key = new_key()
        self.num_bytes = whole_pages(num_bytes)
        self._file = MemoryFile(self.num_bytes)
        self.address = self._file.address
        # (offset, length) of every free range, sorted, none touching the next
        self._free = [(0, self.num_bytes)]
        self.held_bytes = 0
        self._budget = budget or Budget(0)
        self._files = files or FileWatch()
        self._users: frozenset[str] = frozenset()  # names of those who were handed it
        self._clients: list[Callable[[Arena], None]] = []  # once for each mapping
        self.is_closed = self.is_kept = False
        self._when_unmapped: list[Callable[[], object]] = []
        self._when_gone: list[Callable[[], object]] = []
        self._lock = threading.Lock()  # guards the number of leases
        self._num_leases = 1  # the maker's, until `close`

    @property
    def descriptor(self) -> int:
        """The file's descriptor; -1 once the memory is given back."""
        return self._file.descriptor

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Hold a lease inside the block. In any thread.

        Raises:
            ArenaClosed: the memory was given back, so no reader waits for the bytes.
        """
        if not self.acquire():
            raise ArenaClosed
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> bool:
        """Take a lease, returned by `release`; False where the memory is gone. In any thread."""
        with self._lock:
            self._num_leases += self._num_leases > 0
            return self._num_leases > 0

    def release(self) -> None:
        """Return a lease; the last one gives the memory back. In any thread."""
        with self._lock:
            self._num_leases -= 1
            if self._num_leases:
                return
        self._file.close()
        for act in self._when_unmapped:
            act()

    def allocate(self, begin: int, end: int) -> None:
        """Give the bytes `[begin, end)` memory; see `MemoryFile.allocate`.

        Raises:
            Overloaded: the machine has no such memory.
            ArenaClosed: the arena was closed meanwhile.
        """
        with self.lease():
            self._file.allocate(begin, end)

    def seal(self) -> None:
        """Seal the file, see `MemoryFile.seal`; from now on slots can be taken."""
        self._file.seal()

    def take(self, num_bytes: int) -> Slot | None:
        """Take the first free slot of at least `num_bytes`, or None where none is large enough."""
        needed = whole_pages(num_bytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= needed:
                self._free[index : index + 1] = (
                    [(offset + needed, length - needed)] if length > needed else []
                )
                self.held_bytes += needed
                return Slot(
                    self, offset, self._file.memory[offset : offset + needed], self.address + offset
                )
        return None

    def put_back(self, slot: Slot) -> None:
        """Make a slot free for another batch group; no thread or client may touch it any more."""
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
        """Call `act` once the memory is unmapped, in the thread that returns the last lease."""
        self._when_unmapped.append(act)

    def when_gone(self, act: Callable[[], object]) -> None:
        """Call `act` on the event loop once no client keeps the arena; call it only if one does."""
        self._when_gone.append(act)

    def close(self) -> None:
        """Put no further batch here, and give the memory back with the last lease.

        As long as a client may keep the arena, it counts as abandoned. A second call changes
        nothing.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._free.clear()
        if self.is_kept:
            self._budget.abandon(self.num_bytes, self._users)
        self.leave()
        self.release()

    def open_for(self, user: str) -> int:
        """A descriptor for a client of this user; the caller closes it.

        Raises:
            OSError: no descriptor is left, or the kernel cannot tell when the arena is gone.
        """
        if not self.is_kept:
            self._files.add(self.descriptor, self._file_gone)
        descriptor = self._file.open_for_reading()
        if self.is_closed:  # and leased: a slow peer is still to be sent a batch
            if self.is_kept:
                self._budget.regain(self.num_bytes, self._users)
            self._budget.abandon(self.num_bytes, self._users | {user})
        self.is_kept = True
        self._users |= {user}
        return descriptor

    def leave(self) -> None:
        """Tell clients that no further batch is put here, so that they unmap it."""
        for on_left in set(self._clients):
            on_left(self)

    def add_client(self, on_left: "Callable[[Arena], None]") -> None:
        """Count a client that maps the arena; `on_left` tells it when it should unmap it."""
        self._clients.append(on_left)

    def remove_client(self, on_left: "Callable[[Arena], None]") -> None:
        """Count a client no longer, which has unmapped the arena, as it says."""
        self._clients.remove(on_left)

    def _file_gone(self) -> None:
        self.is_kept = False
        self._budget.regain(self.num_bytes, self._users)
        for act in self._when_gone:
            act()
