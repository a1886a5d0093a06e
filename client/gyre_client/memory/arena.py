"""A session's arenas, mapped: batches are used where the daemon put them, without a copy.

The mapping is private: writes of this process into a batch stay in this process, and the
daemon's bytes cannot be harmed. When a batch is released, the pages written to are
dropped, so that they do not show in a later batch of the same slot. Pages that were only read stay
mapped for the next batch.

[Note: Tensors after a session]
A tensor stays valid as long as it is held. When a session ends, the batches still held are
moved out of its arenas: each becomes memory of this process, at the same address. Then the arenas
are unmapped and the side channel is closed, which tells the daemon that it may free them. So one
batch in use never keeps an arena.

[Note: Forked children]
The daemon fills a slot again when this process has released it, whatever a child still reads. So
a child inherits no page of an arena, but copies: before a fork, all pages of the batches that the
script may hold become this process's own. The child then moves them out. Batches that were not
read yet are not copied. A batch that another thread takes while this one forks is not mapped in
the child. To start a program without `preexec_fn` runs none of this, and copies nothing.

[Note: Finalizers of memory]
The last view of a batch may die in any thread and at any line, also while an exception unwinds.
Code of Python that ran there could be interrupted half-way, so none does: the weak reference to the
memory appends itself to a queue, which gRPC's sending thread empties. The locks here are held in
background threads alone, where no signal is handled.
"""

import logging
import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable

from gyre_client.errors import DaemonFault, DaemonUnavailable
from gyre_client.memory.mapping import Memory, PrivateMapping
from gyre_client.memory.memory_file import check_memory
from gyre_client.memory.pages import PrivatePages
from gyre_client.transport.side_channel import NotShared, SideChannel

_log = logging.getLogger("gyre_client")


class Loan(weakref.ref[Memory]):
    """Memory of a lent batch group; it queues itself when the last view of it is gone.

    Attributes:
        begin: The first byte in the arena.
        end: The byte behind the last page.
        first_step: The first step of the group.
        num_batches: How many batches are there.
        is_read: Whether the script may hold views of it.
        is_copied: Whether all its pages are this process's own.
    """

    __slots__ = ("_arena", "begin", "end", "first_step", "is_copied", "is_read", "num_batches")

    def __new__(
        cls,
        memory: Memory,
        returned: "Callable[[Loan], None]",
        arena: "Arena",
        extent: tuple[int, int],
        first_step: int,
        num_batches: int,
    ) -> "Loan":
        """Makes a weak reference; `returned` is called with it when the memory is gone."""
        return super().__new__(cls, memory, returned)

    def __init__(
        self,
        memory: Memory,
        returned: "Callable[[Loan], None]",
        arena: "Arena",
        extent: tuple[int, int],
        first_step: int,
        num_batches: int,
    ) -> None:
        super().__init__(memory, returned)  # type: ignore[call-arg]
        self._arena = arena
        self.begin, self.end = extent
        self.first_step = first_step
        self.num_batches = num_batches
        self.is_read = self.is_copied = False

    def take_back(self) -> None:
        """Frees the memory, once it is gone; for a background thread."""
        self._arena.take_back(self)


class Arenas:
    """The memory files of one session, each mapped when its first batch comes.

    Attributes:
        returned: The loans whose memory is gone, not taken back yet.
    """

    def __init__(self, side: SideChannel, session_id: str, first_bytes: int) -> None:
        """Receives the first arena; `map_first` maps its pages.

        Args:
            side: Where the arenas come from; this object owns it.
            session_id: The session whose arenas they are.
            first_bytes: The size of the first arena, as the daemon announced it.

        Raises:
            NotShared: The daemon's memory cannot be mapped in this process.
            DaemonUnavailable: The arena did not arrive.
            DaemonFault: The arena is not sealed memory of that size.
        """
        self._side = side
        self._session_id = session_id
        self._num_received = 0
        self.returned: deque[Loan] = deque()
        self._mapped = {0: self._receive(0, first_bytes)}

    def num_lent(self, enough: int = 0) -> int:
        """Returns the number of batches whose memory is in use; any below `enough` if it is."""
        # The receiver may add an arena meanwhile, hence the copy.
        num_lent = sum(arena.num_lent for arena in list(self._mapped.values()))
        if num_lent > enough and self.returned:
            num_lent -= sum(loan.num_batches for loan in self.returned.copy())
        return num_lent

    def map_first(self) -> None:
        """Maps the pages of the first arena, while the daemon reads the first batches."""
        self._mapped[0].map_pages()

    def get(self, number: int) -> "Arena":
        """Returns the session's arena of this number; receives and maps it if it is new.

        Raises:
            NotShared: The daemon's memory cannot be mapped in this process.
            DaemonUnavailable: The arena did not arrive.
            DaemonFault: It is not the session's next arena, or not sealed memory.
        """
        arena = self._mapped.get(number)
        if arena is None:
            if number != self._num_received:
                raise DaemonFault(
                    f"the daemon put a batch into arena {number}, but the next one of this "
                    f"session is arena {self._num_received}"
                )
            arena = self._mapped[number] = self._receive(number)
            arena.map_pages()
        return arena

    def leave(self, numbers: Iterable[int]) -> list[int]:
        """Closes arenas that the daemon uses no longer; batches held there are moved out.

        Returns:
            The arenas that this process no longer maps.

        Raises:
            DaemonFault: One of them was never received, or was left before.
        """
        left = []
        for number in numbers:
            arena = self._mapped.pop(number, None)
            if arena is None:
                raise DaemonFault(f"the daemon left arena {number}, which this process has not")
            if arena.close():
                left.append(number)
        return left

    def close(self) -> None:
        """Closes all arenas at the session's end: see [Note: Tensors after a session]."""
        are_out = [arena.close() for arena in list(self._mapped.values())]
        if all(are_out):
            self._side.close()

    def _receive(self, number: int, num_bytes: int | None = None) -> "Arena":
        descriptor = self._side.receive(self._session_id, number)
        arena = Arena(descriptor, num_bytes, self.returned)
        self._num_received += 1
        return arena


class Arena:
    """One memory file. Memory lent out of it stays as it is until it is given back.

    Attributes:
        num_lent: The number of batches whose memory was lent and not taken back.
    """

    def __init__(
        self,
        descriptor: int,
        num_bytes: int | None = None,
        returned: deque[Loan] | None = None,
    ) -> None:
        """Maps the file and closes the descriptor, which this object owns.

        Args:
            descriptor: The descriptor of a daemon's memory file.
            num_bytes: The size that it was announced with; None if it was not.
            returned: Where loans go whose memory is gone.

        Raises:
            NotShared: The file cannot be mapped.
            DaemonFault: The file may shrink, or has another size.
        """
        try:
            check_memory(descriptor, num_bytes)
            self._mapping = PrivateMapping(descriptor)
        except OSError as error:
            raise NotShared(f"the daemon's memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._pages = PrivatePages(self._mapping.address, self._mapping.num_bytes)
        self._returned = deque() if returned is None else returned
        self.num_lent = 0
        self._loans: dict[int, Loan] = {}  # by the first byte
        self._begins: list[int] = []  # of the loans, in rising order
        self._is_closed = False
        self._lock = threading.Lock()  # guards all of the above, in background threads
        _open_arenas.add(self)

    def map_pages(self) -> None:
        """Maps all pages at once, which takes half as long as one by one."""
        self._pages.map_pages()

    def lend(
        self, begin: int, end: int, num_batches: int = 1, first_step: int = 0
    ) -> tuple[Memory, Loan]:
        """Returns the memory of `num_batches` batches, uint8 [end - begin], writable; and its loan.

        Args:
            begin: The first byte in the file; the first of a page.
            end: The byte behind the last one.
            num_batches: How many batches are there.
            first_step: The step of the first one.

        Raises:
            ValueError: The range is not inside the file, does not begin with a page, or overlaps
                a lent one.
            DaemonUnavailable: The session is over.
        """
        if begin % mmap.PAGESIZE:
            raise ValueError(f"byte {begin} is not the first of a page")
        memory = self._mapping.view(begin, end)
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            if self._is_closed:
                raise DaemonUnavailable("the session is over")
            place = bisect(self._begins, begin)
            before = self._loans[self._begins[place - 1]].end if place else 0
            if before > begin or any(each < end for each in self._begins[place : place + 1]):
                raise ValueError(f"the memory at bytes [{begin}, {end}) is lent already")
            loan = Loan(memory, self._returned.append, self, (begin, end), first_step, num_batches)
            self._begins.insert(place, begin)
            self._loans[begin] = loan
            self.num_lent += num_batches
        return memory, loan

    def take_back(self, loan: Loan) -> None:
        """Frees a range whose last view is gone; it shows the file again."""
        with self._lock:
            if self._is_closed:
                return
            del self._loans[loan.begin]
            self._begins.remove(loan.begin)
            self.num_lent -= loan.num_batches
            if loan.is_copied or self._pages.may_be_written(loan.begin, loan.end - loan.begin):
                self._mapping.drop_private(loan.begin, loan.end)

    def close(self) -> bool:
        """Moves out the lent ranges, and unmaps the rest.

        Returns:
            Whether no memory of this process refers to the file any more.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if was_closed:
                return True
            _open_arenas.discard(self)
            self._pages.close()
            is_out, gap_begin = True, 0
            for begin, loan in sorted(self._loans.items()):
                memory = loan()  # keeps the range as it is meanwhile
                if memory is not None:
                    self._mapping.unmap(gap_begin, begin)
                    is_out &= self._mapping.move_out(begin, loan.end, memory)
                    gap_begin = loan.end
            self._mapping.unmap(gap_begin, self._mapping.num_bytes)
            return is_out

    def copy_for_child(self) -> None:
        """Copies the batches that the script may hold: see [Note: Forked children]."""
        for loan in list(self._loans.values()):
            memory = loan()  # so that it is not taken back meanwhile
            if memory is None or not loan.is_read or loan.is_copied:
                continue
            loan.is_copied = self._mapping.copy_for_child(loan.begin, loan.end)
            if not loan.is_copied:
                _log.error(
                    "there is no memory to copy the batches that this process holds: the kernel "
                    "ends a forked child that reads them"
                )

    def leave_to_child(self) -> None:
        """In a forked child: keeps the copies made for it, and nothing of the daemon's.

        Other threads do not exist here, and may have held the lock.
        """
        self._pages.close()
        self._lock = threading.Lock()
        self._is_closed = True
        for loan in list(self._loans.values()):
            memory = loan()
            if memory is not None and loan.is_copied:
                self._mapping.move_out(loan.begin, loan.end, memory)


_open_arenas: set[Arena] = set()  # of all sessions of this process


def _before_fork() -> None:
    interrupt: BaseException | None = None
    while True:
        try:
            for arena in list(_open_arenas):
                arena.copy_for_child()
            break
        except KeyboardInterrupt as error:  # the fork takes place in any case
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _in_child() -> None:
    for arena in list(_open_arenas):
        arena.leave_to_child()
    _open_arenas.clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
