"""A private mapping of one of the daemon's memory files, which can be unmapped range by range.

Python's own `mmap` cannot do that: it keeps a duplicate of the descriptor, and it keeps the whole
file mapped as long as a single view of it exists.
"""

import ctypes
import errno
import mmap
import os
import weakref
from functools import partial

import numpy as np
import numpy.typing as npt

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not named in the standard library
_FAILED = ctypes.c_void_p(-1).value

# PyDLL keeps the interpreter's lock during a call; `move_out` depends on it.
_libc = ctypes.PyDLL(None, use_errno=True)
_mmap, _mremap, _munmap, _memmove, _madvise = (
    _libc.mmap,
    _libc.mremap,
    _libc.munmap,
    _libc.memmove,
    _libc.madvise,
)
_mmap.restype = _mremap.restype = _memmove.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# `munmap` as the callback of a weak reference, which is its third argument and is ignored. No code
# of Python runs, so a signal cannot interrupt it.
_munmap_for = _libc["munmap"]
_munmap_for.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]

Memory = npt.NDArray[np.uint8]
# The memory that was moved out, by its address; entries of freed memory are removed later.
_moved_out: "dict[int, weakref.ref[Memory]]" = {}


class PrivateMapping:
    """The mapping of one file. Ranges are half-open, in bytes of the file, and of whole pages.

    Attributes:
        address: The address of the first byte.
        num_bytes: The length of the file, a multiple of the page size.
    """

    def __init__(self, descriptor: int) -> None:
        """Maps the file; the caller may close the descriptor afterwards.

        Raises:
            OSError: The file cannot be mapped privately.
        """
        self.num_bytes = os.fstat(descriptor).st_size
        self.address = _map(self.num_bytes, mmap.MAP_PRIVATE, descriptor)
        # The daemon's later writes must not appear in a forked child: see `arena`.
        _madvise(self.address, self.num_bytes, mmap.MADV_DONTFORK)

    def view(self, begin: int, end: int) -> Memory:
        """Returns the bytes [begin, end) as a writable array, uint8 [end - begin].

        The array does not keep the mapping alive, and the range need not be of whole pages.

        Raises:
            ValueError: The range is not inside the file.
        """
        if not 0 <= begin <= end <= self.num_bytes:
            raise ValueError(f"bytes [{begin}, {end}) of a file of {self.num_bytes}")
        return np.asarray(_Memory(self.address + begin, end - begin))

    def drop_private(self, begin: int, end: int) -> None:
        """Drops this process's copies of the pages in a range: it shows the file again."""
        _madvise(self.address + begin, end - begin, mmap.MADV_DONTNEED)
        _madvise(self.address + begin, end - begin, mmap.MADV_DONTFORK)

    def copy_for_child(self, begin: int, end: int) -> bool:
        """Makes every page of a range this process's own copy, which a forked child inherits.

        The kernel copies as if each page were written to, so no write of another thread is lost.
        (Before Linux 5.14 one byte of each page is read and written back here: a write to that byte
        by a thread outside the interpreter at that moment may be lost.)

        Returns:
            Whether there was memory for the copies; if not, the child does not inherit the range.
        """
        address, num_bytes = self.address + begin, end - begin
        if _madvise(address, num_bytes, _MADV_POPULATE_WRITE):
            if ctypes.get_errno() != errno.EINVAL:
                return False
            self.view(begin, end)[:: mmap.PAGESIZE] |= 0
        return not _madvise(address, num_bytes, mmap.MADV_DOFORK)

    def move_out(self, begin: int, end: int, memory: Memory) -> bool:
        """Replaces a range by memory of this process, with the same bytes at the same address.

        The kernel swaps the pages in one step, so threads that read the range are not disturbed.
        The interpreter's lock is held, so no Python code writes to the range meanwhile. Writes of a
        thread outside the interpreter at that moment may be lost.

        Args:
            begin: The first byte.
            end: The byte behind the last one.
            memory: The array over the range; it is unmapped when the array is gone.

        Returns:
            Whether there was memory for the copy; if not, the range still shows the file.
        """
        address, num_bytes = self.address + begin, end - begin
        for each in [each for each, kept in list(_moved_out.items()) if kept() is None]:
            _moved_out.pop(each, None)
        _moved_out[address] = weakref.ref(memory, partial(_munmap_for, address, num_bytes))
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
        """Unmaps a range; arrays over it must not be used any more."""
        if end > begin:
            _munmap(self.address + begin, end - begin)


class _Memory:
    """Memory at an address, in the form that `numpy.asarray` takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


def _map(num_bytes: int, flags: int, descriptor: int) -> int:
    address: int | None = _mmap(
        None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
    )
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address
