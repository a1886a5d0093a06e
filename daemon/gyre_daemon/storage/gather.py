"""Copying many ranges of mapped files at once, without the interpreter's lock and without fear of a file that shrinks.

A plain copy out of a mapping takes one Python call per sample, holds the lock through every page fault, and dies of SIGBUS
where the file was truncated underneath. `process_vm_readv(2)` on one's own process takes 1024 ranges per call and reports a
page that is no longer there as a short count.
"""

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]

_MAX_RANGES = 1024  # IOV_MAX

_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


def gather(sources: Addresses, sizes: Sizes, targets: Addresses) -> int | None:
    """Copy `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, for all i.

    Args:
        sources: uint64 [n]; mapped, or pages that have gone.
        sizes: int64 [n], in bytes.
        targets: uint64 [n]; writable and not overlapping; the caller keeps both sides alive.

    Returns:
        None if all is copied, otherwise the index of the first range that could not be read whole.

    Raises:
        OSError: the kernel does not allow it (EPERM, ENOSYS: see `is_allowed`).
    """
    ranges = np.empty((2, len(sizes), 2), np.uint64)
    ranges[0, :, 0], ranges[1, :, 0] = targets, sources
    ranges[:, :, 1] = sizes
    for begin in range(0, len(sizes), _MAX_RANGES):
        count = min(_MAX_RANGES, len(sizes) - begin)
        into, out_of = ranges[0, begin:], ranges[1, begin:]
        copied = _readv(os.getpid(), into.ctypes.data, count, out_of.ctypes.data, count, 0)
        if copied < 0 and ctypes.get_errno() != errno.EFAULT:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        ends = np.cumsum(sizes[begin : begin + count])
        if copied != ends[-1]:
            return begin + int(np.searchsorted(ends, max(copied, 0), side="right"))
    return None


def is_allowed() -> bool:
    """Whether this process may read its own memory so; some sandboxes forbid the call."""
    source, target = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    try:
        failed = gather(address_of(source), np.ones(1, np.int64), address_of(target))
    except OSError:
        return False
    return failed is None and target[0] == 1


def address_of(array: npt.NDArray[np.uint8]) -> Addresses:
    """The address of an array's first byte, uint64 [1]."""
    return np.array([array.ctypes.data], np.uint64)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Writable memory at an address; the caller keeps it alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
