"""A session's arenas, mapped: batches are used where the daemon put them, without a copy.

The mapping is private: what this process writes into a batch stays in this process. The pages that it wrote are dropped when
the batch is released, so that they never show in a later batch of the same slot. The daemon's bytes cannot be harmed at all.
Pages that were only read stay mapped for the next batch.
"""

import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gyre_client.pages import PrivatePages
from gyre_client.sidechannel import NotShared, SideChannel


class Arenas:
    """The memory files of one session, each mapped when its first batch comes."""

    def __init__(self, side: SideChannel, session_id: str) -> None:
        """Receives the first; see `ready`.

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

    def _receive(self, number: int) -> "Arena":
        return Arena(self._side.receive(self._session_id, number), self._side)


class Arena:
    """One memory file. It stays mapped as long as any tensor of it is held, whatever becomes of the daemon.

    Attributes:
        num_lent: batches whose memory is in use.
    """

    def __init__(self, descriptor: int, side: SideChannel) -> None:
        """Maps the file and closes the descriptor.

        Args:
            descriptor: Of the arena; this object owns it.
            side: Where it came from: connected until no batch of it is in use any more, for as long the daemon leaves it alone.

        Raises:
            NotShared: It cannot be mapped so.
        """
        self._side = side
        try:
            num_bytes = os.fstat(descriptor).st_size
            self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise NotShared(f"the daemon's memory cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._pages = PrivatePages(self._mapping)
        self.num_lent = 0

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
        """
        memory = np.frombuffer(self._mapping, np.uint8, end - begin, begin)
        self.num_lent += num_batches
        weakref.finalize(memory, self._take_back, begin, end, num_batches, returned).atexit = False
        return memory

    def _take_back(self, begin: int, end: int, num_batches: int, returned: Callable[[], None]) -> None:
        if self._pages.may_be_written(begin, end - begin):
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        self.num_lent -= num_batches
        returned()
