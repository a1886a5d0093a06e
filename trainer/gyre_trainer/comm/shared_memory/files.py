"""Memory that processes of one host share: files without a name, gone with the last process that has them open or mapped."""

import mmap
import os
import weakref
from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor


class SharedMemory:
    """This process's memory that others can map; each piece of it is a file of its own, open as long as it is used here."""

    def __init__(self) -> None:
        self._numbers = count()
        self._files: dict[int, int] = {}
        self._by_address: dict[int, int] = {}  # → number

    @property
    def files(self) -> Mapping[int, int]:
        """Descriptors by the files' numbers, none of which is given twice."""
        return self._files

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of one or more elements in a new file.

        Raises:
            OSError: there is no such file to be had.
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
        self._files[number], self._by_address[address] = fd, number
        weakref.finalize(memory, self._close, number, address)
        return tensor

    def number(self, tensor: Tensor) -> int:
        """Of the file that a tensor lies in, from its beginning."""
        return self._by_address[tensor.data_ptr()]

    def _close(self, number: int, address: int) -> None:
        os.close(self._files.pop(number))
        if self._by_address.get(address) == number:  # else another file is mapped there by now
            del self._by_address[address]


def mapped(fd: int) -> Tensor:
    """The bytes of another process's file, as long as they are used; the descriptor is not needed any more."""
    with torch.inference_mode(mode=False):
        return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
