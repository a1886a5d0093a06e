"""A session's arenas, mapped: batches are used where the daemon put them, without a copy.

The mapping is private: what this process writes into a batch stays in this process, and the
daemon's bytes cannot be harmed. When a batch is released, the pages that were written to are
dropped, so that they do not show in a later batch of the same slot. Pages that were only read stay
mapped for the next batch.

[Note: What outlives its session]
A tensor stays valid as long as it is held. When a session ends, the batches that are still held are
moved out of its arenas: each becomes memory of this process, at the same address. Then the arenas
are unmapped and the side channel is closed, which tells the daemon that it may free them. So one
batch that is kept never keeps an arena.
"""

import mmap
import os
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from gyre_client.errors import DaemonFault, DaemonUnavailable
from gyre_client.memory.mapping import PrivateMapping
from gyre_client.memory.memory_file import check_memory
from gyre_client.memory.pages import PrivatePages
from gyre_client.transport.side_channel import NotShared, SideChannel


class Arenas:
    """The memory files of one session, each mapped when its first batch comes."""

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
        self._mapped = {0: self._receive(0, first_bytes)}

    @property
    def num_lent(self) -> int:
        """The number of batches whose memory is in use."""
        # The receiver may add an arena meanwhile, hence the copy.
        return sum(arena.num_lent for arena in list(self._mapped.values()))

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
        """Closes all arenas at the session's end: see [Note: What outlives its session]."""
        are_out = [arena.close() for arena in list(self._mapped.values())]
        if all(are_out):
            self._side.close()

    def _receive(self, number: int, num_bytes: int | None = None) -> "Arena":
        arena = Arena(self._side.receive(self._session_id, number), num_bytes)
        self._num_received += 1
        return arena


class Arena:
    """One memory file. Memory lent out of it stays as it is until it is given back.

    Attributes:
        num_lent: The number of batches whose memory is in use.
    """

    def __init__(self, descriptor: int, num_bytes: int | None = None) -> None:
        """Maps the file and closes the descriptor, which this object owns.

        Args:
            descriptor: Of a memory file of a daemon.
            num_bytes: The size that it was announced with; None if it was not.

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
        self.num_lent = 0
        self._lent: dict[int, int] = {}  # the end of each lent range, by its begin
        self._begins: list[int] = []  # of the lent ranges, in rising order
        self._is_closed = False
        self._lock = threading.Lock()  # guards all of the above
        # Ranges whose last view is gone, and that nobody has taken back yet.
        self._returned: deque[tuple[int, int, Callable[[], None]]] = deque()

    def map_pages(self) -> None:
        """Maps all pages at once, which takes half as long as one by one."""
        self._pages.map_pages()

    def lend(
        self, begin: int, end: int, num_batches: int, returned: Callable[[], None]
    ) -> npt.NDArray[np.uint8]:
        """Returns the memory of `num_batches` batches, uint8 [end - begin], writable.

        Args:
            begin: The first byte in the file; the first of a page.
            end: The byte behind the last one.
            num_batches: How many batches lie there.
            returned: Called when the last view of the memory is gone.

        Raises:
            ValueError: The range lies outside the file, does not begin with a page, or overlaps
                one that is lent already.
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
            before = self._lent[self._begins[place - 1]] if place else 0
            if before > begin or any(each < end for each in self._begins[place : place + 1]):
                raise ValueError(f"what lies at bytes [{begin}, {end}) is lent already")
            self._begins.insert(place, begin)
            self._lent[begin] = end
            self.num_lent += num_batches
        weakref.finalize(memory, self._give_back, begin, num_batches, returned).atexit = False
        self._take_back()
        return memory

    def close(self) -> bool:
        """Moves out what is lent, and unmaps the rest.

        Returns:
            Whether no memory of this process refers to the file any more.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            is_out = was_closed or self._move_out()
        self._take_back()
        return is_out

    def _move_out(self) -> bool:
        self._pages.close()
        is_out, gap_begin = True, 0
        for begin, end in sorted(self._lent.items()):
            self._mapping.unmap(gap_begin, begin)
            is_out &= self._mapping.move_out(begin, end)
            gap_begin = end
        self._mapping.unmap(gap_begin, self._mapping.num_bytes)
        return is_out

    def _give_back(self, begin: int, num_batches: int, returned: Callable[[], None]) -> None:
        """Queues a range whose last view is gone.

        A garbage collection may call this in any thread, also in one that holds the lock. So it
        never waits for the lock: see `_take_back`.
        """
        self._returned.append((begin, num_batches, returned))
        self._take_back()

    def _take_back(self) -> None:
        """Frees the queued ranges, unless another thread holds the lock and will do it."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                begin, num_batches, returned = self._returned.popleft()
                self._free(begin, self._lent.pop(begin))
                self._begins.remove(begin)
                self.num_lent -= num_batches
            except IndexError:  # another thread took it first
                continue
            finally:
                self._lock.release()
            returned()

    def _free(self, begin: int, end: int) -> None:
        if self._is_closed:
            self._mapping.unmap(begin, end)
        elif self._pages.may_be_written(begin, end - begin):
            self._mapping.drop_private(begin, end)
