"""A session's arenas, mapped: batches are used where the daemon put them, without a copy.

The mapping is private: what this process writes into a batch stays in this process. The pages that it wrote are dropped when
the batch is released, so that they never show in a later batch of the same slot. The daemon's bytes cannot be harmed at all.
Pages that were only read stay mapped for the next batch.

[Note: What outlives its session]
A tensor stays valid as long as it is held. When the session is over, the batches that are still held are moved out of the
arenas: each becomes memory of this process, at the same address. Then the arenas are unmapped, and the side channel is closed,
which tells the daemon that it may free them. So one batch that is kept never keeps an arena.
"""

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from gyre_client.errors import DaemonUnavailable
from gyre_client.mapping import PrivateMapping
from gyre_client.pages import PrivatePages
from gyre_client.sidechannel import NotShared, SideChannel


class Arenas:
    """The memory files of one session, each mapped when its first batch comes."""

    def __init__(self, side: SideChannel, session_id: str) -> None:
        """Receives the first; see `ready`.

        Args:
            side: Where they come from; this object owns it.
            session_id: Whose they are.

        Raises:
            NotShared: Memory of the daemon cannot be had here.
            DaemonUnavailable: It did not arrive.
        """
        self._side = side
        self._session_id = session_id
        self._mapped = {0: self._receive(0)}

    @property
    def num_lent(self) -> int:
        """Batches whose memory is in use."""
        return sum(arena.num_lent for arena in list(self._mapped.values()))  # the receiver may be adding one

    def ready(self) -> None:
        """The first one's pages are mapped: to be called where that does not keep the daemon waiting."""
        self._mapped[0].map_pages()

    def get(self, number: int) -> "Arena":
        """Returns the session's arena of this number.

        Raises:
            NotShared: Memory of the daemon cannot be had here.
            DaemonUnavailable: It did not arrive.
        """
        arena = self._mapped.get(number)
        if arena is None:
            arena = self._mapped[number] = self._receive(number)
            arena.map_pages()
        return arena

    def leave(self, numbers: Iterable[int]) -> list[int]:
        """No further batch comes to lie in these arenas; what is held there is moved out.

        Returns:
            Those that this process has no longer.
        """
        left = [(number, self._mapped.pop(number, None)) for number in numbers]
        return [number for number, arena in left if arena is None or arena.close()]

    def close(self) -> None:
        """The session is over: see the note above."""
        if _close_all(list(self._mapped.values())):
            self._side.close()

    def _receive(self, number: int) -> "Arena":
        return Arena(self._side.receive(self._session_id, number))


class Arena:
    """One memory file. What is lent of it stays as it is until it is given back, whatever becomes of the daemon.

    Attributes:
        num_lent: batches whose memory is in use.
    """

    def __init__(self, descriptor: int) -> None:
        """Maps the file and closes the descriptor.

        Args:
            descriptor: Of the arena; this object owns it.

        Raises:
            NotShared: It cannot be mapped so.
        """
        try:
            self._mapping = PrivateMapping(descriptor)
        except OSError as error:
            raise NotShared(f"the daemon's memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._pages = PrivatePages(self._mapping.address, self._mapping.num_bytes)
        self.num_lent = 0
        self._lent: dict[int, int] = {}  # the end of each range that is lent, by its begin
        self._is_closed = False
        self._lock = threading.Lock()  # over all of the above
        self._returned: deque[tuple[int, int, Callable[[], None]]] = deque()  # not yet taken back

    def map_pages(self) -> None:
        """All its pages are mapped: at once, which takes half as long as one by one."""
        self._pages.map_pages()

    def lend(self, begin: int, end: int, num_batches: int, returned: Callable[[], None]) -> npt.NDArray[np.uint8]:
        """Returns the memory of so many batches, uint8 [end - begin], writable.

        Args:
            begin: Its first byte in the file, of a page.
            end: Behind its last.
            num_batches: How many lie there.
            returned: Called when the last view of it is gone.

        Raises:
            ValueError: There is no such memory.
            DaemonUnavailable: The session is over.
        """
        memory = self._mapping.view(begin, end)
        with self._lock:
            if self._is_closed:
                raise DaemonUnavailable("the session is over")
            if begin in self._lent:
                raise ValueError(f"what lies at byte {begin} is lent already")
            self._lent[begin] = _page_end(end)
            self.num_lent += num_batches
        weakref.finalize(memory, self._give_back, begin, num_batches, returned).atexit = False
        self._take_back()
        return memory

    def close(self) -> bool:
        """Moves out what is lent, and unmaps the rest.

        Returns:
            Whether nothing refers to the file any more.
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
        """The last view of a range is gone: told at any moment in any thread, also while that thread holds the lock."""
        self._returned.append((begin, num_batches, returned))
        self._take_back()

    def _take_back(self) -> None:
        """Whoever finds the lock free, or gives it free, does what others left."""
        while self._returned and self._lock.acquire(blocking=False):
            try:
                begin, num_batches, returned = self._returned.popleft()
                self._forget(begin, self._lent.pop(begin))
                self.num_lent -= num_batches
            except IndexError:  # another thread was faster
                continue
            finally:
                self._lock.release()
            returned()

    def _forget(self, begin: int, end: int) -> None:
        if self._is_closed:
            self._mapping.unmap(begin, end)
        elif self._pages.may_be_written(begin, end - begin):
            self._mapping.drop_private(begin, end)


def _close_all(arenas: Iterable[Arena]) -> bool:
    are_out = [arena.close() for arena in arenas]
    return all(are_out)


def _page_end(end: int) -> int:
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
