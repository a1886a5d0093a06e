"""Copying many ranges of mapped files at once, without the interpreter's lock and without fear of a file that shrinks.

A plain copy out of a mapping takes one Python call per sample, holds the lock through every page fault, and dies of SIGBUS
where the file was truncated underneath. `process_vm_readv(2)` and `process_vm_writev(2)` on one's own process take 1024 ranges
per call and report a page that is no longer there as a short count. The one looks up and pins every page it reads, the other
every page it writes. Pages written lie in a row, pages read do not: small ranges are cheaper to write. Large ones are read:
out of a file that is mapped by huge pages that is faster, and otherwise no slower.
"""

import ctypes
import errno
import os

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]

_MAX_RANGES = 1024  # IOV_MAX
_MAX_WRITTEN_BYTES = 16 << 10  # mean of the ranges; see `benchmarks/loader/gather.py`

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


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
    out_of = _ranges(sources, sizes)
    writes = len(sizes) > 0 and int(sizes.sum()) <= _MAX_WRITTEN_BYTES * len(sizes)
    for begin in range(0, len(sizes), _MAX_RANGES):
        some = slice(begin, begin + _MAX_RANGES)
        into = _joined(targets[some], sizes[some])
        copied = _write(out_of[some], into) if writes else _read(out_of[some], into)
        ends = np.cumsum(sizes[some])
        if copied != ends[-1]:
            return begin + int(np.searchsorted(ends, copied, side="right"))
    return None


def _ranges(addresses: Addresses, sizes: Sizes) -> Addresses:
    """As the kernel takes them: uint64 [n, 2]."""
    ranges = np.empty((len(sizes), 2), np.uint64)
    ranges[:, 0], ranges[:, 1] = addresses, sizes
    return ranges


def _joined(addresses: Addresses, sizes: Sizes) -> Addresses:
    """The same bytes in the same order as the fewest ranges, uint64 [m, 2]; n > 0."""
    begins = np.empty(len(sizes), np.bool_)
    begins[0] = True
    np.not_equal(addresses[1:], addresses[:-1] + sizes[:-1].astype(np.uint64), out=begins[1:])
    first = np.flatnonzero(begins)
    return _ranges(addresses[first], np.add.reduceat(sizes, first))


def _read(out_of: Addresses, into: Addresses) -> int:
    return _copied(_libc.process_vm_readv(os.getpid(), into.ctypes.data, len(into), out_of.ctypes.data, len(out_of), 0))


def _write(out_of: Addresses, into: Addresses) -> int:
    return _copied(_libc.process_vm_writev(os.getpid(), out_of.ctypes.data, len(out_of), into.ctypes.data, len(into), 0))


def _copied(num_bytes: int) -> int:
    if num_bytes < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return max(num_bytes, 0)


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
