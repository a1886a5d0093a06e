"""A memory file of the daemon, mapped privately, which its owner takes apart range by range.

Python's own `mmap` keeps a duplicate of the descriptor, and all of the file's memory as long as one view of it is referred to.
"""

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.PyDLL(None, use_errno=True)  # with the interpreter's lock: see `move_out`
_mmap, _mremap, _munmap, _memmove, _madvise = _libc.mmap, _libc.mremap, _libc.munmap, _libc.memmove, _libc.madvise
_mmap.restype = _mremap.restype = _memmove.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PrivateMapping:
    """All of one file. Ranges are half-open, in bytes of the file, and of whole pages.

    Attributes:
        address: Of its first byte.
        num_bytes: Its length, of whole pages.
    """

    def __init__(self, descriptor: int) -> None:
        """Maps the file, which need not stay open.

        Raises:
            OSError: It cannot be mapped so.
        """
        self.num_bytes = os.fstat(descriptor).st_size
        self.address = _map(self.num_bytes, mmap.MAP_PRIVATE, descriptor)

    def view(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Returns uint8 [end - begin], writable; any bytes of the file. It keeps nothing alive.

        Raises:
            ValueError: There is no such range.
        """
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"bytes [{begin}, {end}) of a file of {self.num_bytes}")
        return np.asarray(_Memory(self.address + begin, end - begin))

    def drop_private(self, begin: int, end: int) -> None:
        """Forgets what this process wrote to a range: it shows the file again."""
        _madvise(self.address + begin, end - begin, mmap.MADV_DONTNEED)

    def move_out(self, begin: int, end: int) -> bool:
        """A range refers to the file no longer: memory of this process takes its place, at the same address, of the same bytes.

        Whoever reads meanwhile reads on: the kernel puts the one in the place of the other at once. No other thread of the
        interpreter runs meanwhile; what another thread computes in place just then, outside the interpreter, may be lost.

        Returns:
            Whether there was memory for it; otherwise nothing has changed.
        """
        address, num_bytes = self.address + begin, end - begin
        try:
            copy = _map(num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        except OSError:
            return False
        _memmove(copy, address, num_bytes)
        if _mremap(copy, num_bytes, num_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == address:
            return True
        _munmap(copy, num_bytes)
        return False

    def unmap(self, begin: int, end: int) -> None:
        """A range is there no longer; nobody may refer to it."""
        if end > begin:
            _munmap(self.address + begin, end - begin)


class _Memory:
    """What numpy makes an array of."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (num_bytes,), "data": (address, False)}


def _map(num_bytes: int, flags: int, descriptor: int) -> int:
    address: int | None = _mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
