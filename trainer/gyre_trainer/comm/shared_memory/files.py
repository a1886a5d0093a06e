"""Memory that processes of one host share: files without a name.

The kernel frees such a file with the last process that has it open or mapped.
"""

import mmap
import os
import weakref
from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor


class SharedMemory:
    """This process's memory that others can map. Each tensor has a file of its own.

    A file stays open until its tensor is released.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._files: dict[int, int] = {}
        self._numbers_by_address: dict[int, int] = {}

    @property
    def files(self) -> Mapping[int, int]:
        """File descriptors by file number; no number is given twice."""
        return self._files

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of one or more elements in a new file.

        Raises:
            OSError: the kernel gives no such file.
        """
        num_bytes = numel * dtype.itemsize
        fd = os.memfd_create("gyre")
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        tensor = torch.frombuffer(memory, dtype=dtype)
        number, address = next(self._numbers), tensor.data_ptr()
        self._files[number], self._numbers_by_address[address] = fd, number
        weakref.finalize(memory, self._close, number, address)
        return tensor

    def number(self, tensor: Tensor) -> int:
        """The number of the file that begins where ``tensor`` begins."""
        return self._numbers_by_address[tensor.data_ptr()]

    def _close(self, number: int, address: int) -> None:
        os.close(self._files.pop(number))
        # Another file may have been mapped at this address in the meantime.
        if self._numbers_by_address.get(address) == number:
            del self._numbers_by_address[address]


def mapped(fd: int) -> Tensor:
    """The bytes of another process's file, uint8; the caller may close ``fd`` afterwards."""
    with torch.inference_mode(mode=False):
        return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
