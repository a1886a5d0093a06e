"""Memory that the daemon shares with one process that decodes; used again for the next chunk."""

import fcntl
import mmap
import os
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import Overloaded

_PAGE_BYTES = mmap.PAGESIZE
# Files are as large as powers of two from here on, so that one serves chunks of similar sizes.
_MIN_FILE_BYTES = 1 << 20
# Unused files that are kept. More would take memory that nothing counts; with fewer, the kernel
# clears fresh pages for every chunk.
_MAX_KEPT_BYTES = 64 << 20


def pages(num_bytes: int) -> int:
    """This many bytes in whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Exchange:
    """A memory file that nobody can resize, mapped by the daemon.

    Attributes:
        num_bytes: its size.
        file: the open file.
        memory: uint8 [num_bytes]; another process may write to it at any time.
    """

    def __init__(self, num_bytes: int) -> None:
        """Make a file.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.num_bytes = num_bytes
        try:
            descriptor = os.memfd_create("gyre-decode", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
            os.ftruncate(descriptor, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            mapping = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise Overloaded(
                f"there is no memory for a chunk of {num_bytes} bytes that is being decoded: "
                f"{error.strerror}"
            ) from error
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Give up the file; its memory goes with the last array that refers to it."""
        self.file.close()
        self.memory = np.empty(0, np.uint8)


class Exchanges:
    """Files that are not in use."""

    def __init__(self) -> None:
        self._unused: list[Exchange] = []
        self._unused_bytes = 0

    def take(self, num_bytes: int) -> Exchange:
        """A file of at least this size."""
        size = max(_MIN_FILE_BYTES, 1 << (num_bytes - 1).bit_length())
        for place, exchange in enumerate(self._unused):
            if exchange.num_bytes == size:
                self._unused_bytes -= size
                return self._unused.pop(place)
        return Exchange(size)

    def give_back(self, exchange: Exchange) -> None:
        """Keep a file for later, or close it."""
        if self._unused_bytes + exchange.num_bytes > _MAX_KEPT_BYTES:
            exchange.close()
            return
        self._unused.append(exchange)
        self._unused_bytes += exchange.num_bytes

    def close(self) -> None:
        """Close all that is kept."""
        for exchange in self._unused:
            exchange.close()
        self._unused.clear()
        self._unused_bytes = 0
