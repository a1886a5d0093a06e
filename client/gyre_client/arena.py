"""A session's arena, mapped: batches are used where the daemon put them, without a copy.

The mapping is private: what this process writes into a batch stays in this process. The pages that it wrote are dropped when
the batch is released, so that they never show in a later batch of the same slot. The daemon's bytes cannot be harmed at all.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_MADV_POPULATE_READ = 22  # since Linux 5.14; not named in the standard library


class Arena:
    """The memory file of one session. It stays mapped as long as any tensor of it is held, whatever becomes of the daemon.

    Attributes:
        num_lent: batches whose memory is in use.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Maps the file and closes the descriptor.

        Args:
            descriptor: Of the arena; this object owns it.
            num_bytes: Of the arena.

        Raises:
            OSError: It cannot be mapped so.
        """
        try:
            self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # an older kernel faults the pages in one by one
            self._mapping.madvise(_MADV_POPULATE_READ)
        self.num_lent = 0

    def lend(self, offset_bytes: int, num_bytes: int, returned: Callable[[], None]) -> npt.NDArray[np.uint8]:
        """Returns a slot's memory, uint8 [num_bytes], writable; `returned` is called when the last view of it is gone.

        Raises:
            ValueError: There is no such slot.
        """
        memory = np.frombuffer(self._mapping, np.uint8, num_bytes, offset_bytes)
        self.num_lent += 1
        weakref.finalize(memory, self._take_back, offset_bytes, num_bytes, returned).atexit = False
        return memory

    def _take_back(self, offset_bytes: int, num_bytes: int, returned: Callable[[], None]) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED, offset_bytes, num_bytes)
        self.num_lent -= 1
        returned()
