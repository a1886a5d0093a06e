"""Copying many ranges of mapped files in one call, safe against files that shrink.

A plain copy out of a mapping takes one Python call per sample, holds the interpreter's lock through
every page fault, and dies of SIGBUS where the file was truncated. `process_vm_readv(2)` and
`process_vm_writev(2)` on one's own process take 1024 ranges per call, and report a missing page as
a short count. The first looks up and pins every page that it reads, the second every page that it
writes. Written pages are adjacent and read pages are not, so writing is cheaper for small ranges.
Large ranges are read: that is faster out of huge pages, and otherwise no slower.
"""

import ctypes
import errno
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]

_MAX_RANGES = 1024  # IOV_MAX
# Ranges are written up to this mean size and read above it. `benchmarks/loader/parts/gather.py`
# measures both; twice the value makes copies out of huge pages slower.
_MAX_WRITTEN_BYTES = 16 << 10

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p, ctypes.c_ulong,
        ctypes.c_void_p, ctypes.c_ulong,
        ctypes.c_ulong,
    ]  # fmt: skip


def gather(sources: Addresses, sizes: Sizes, targets: Addresses) -> int | None:
    """Copy `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, for all i.

    Args:
        sources: uint64 [n]; mapped memory, whose pages may be gone.
        sizes: int64 [n], in bytes.
        targets: uint64 [n]; writable and not overlapping. The caller keeps both sides alive.

    Returns:
        None if everything was copied, otherwise the index of the first range that could not be
        read whole.

    Raises:
        OSError: the kernel does not allow it (EPERM, ENOSYS: see `is_allowed`).
    """
    out_of = _ranges(sources, sizes)
    writes = len(sizes) > 0 and int(sizes.sum()) <= _MAX_WRITTEN_BYTES * len(sizes)
    for begin in range(0, len(sizes), _MAX_RANGES):
        some = slice(begin, begin + _MAX_RANGES)
        into = _joined(targets[some], sizes[some])
        if writes:
            copied = _call_kernel(_libc.process_vm_writev, out_of[some], into)
        else:
            copied = _call_kernel(_libc.process_vm_readv, into, out_of[some])
        ends = np.cumsum(sizes[some])
        if copied != ends[-1]:
            return begin + int(np.searchsorted(ends, copied, side="right"))
    return None


def read_each(
    descriptors: Iterable[int], offsets: Sizes, sizes: Sizes, targets: Addresses
) -> int | None:
    """Do the same by one `preadv(2)` per range, where `gather` is not allowed.

    Args:
        descriptors: n files.
        offsets: int64 [n], in the files.
        sizes: int64 [n], in bytes.
        targets: uint64 [n]; see `gather`.

    Returns:
        See `gather`.
    """
    ranges = zip(descriptors, offsets.tolist(), sizes.tolist(), targets.tolist(), strict=False)
    for index, (descriptor, offset, size, target) in enumerate(ranges):
        memory, done = memory_at(target, size), 0
        try:
            while done < size and (count := os.preadv(descriptor, [memory[done:]], offset + done)):
                done += count
        except OSError:
            return index
        if done < size:
            return index
    return None


def _ranges(addresses: Addresses, sizes: Sizes) -> Addresses:
    """An array of `iovec`s: uint64 [n, 2]."""
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


def _call_kernel(call: "ctypes._NamedFuncPointer", local: Addresses, remote: Addresses) -> int:
    """The number of bytes copied; the remote side is this process, too."""
    num_bytes: int = call(
        os.getpid(), local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
    )
    if num_bytes < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return max(num_bytes, 0)


def is_allowed() -> bool:
    """Whether this process may call `gather`; some sandboxes forbid it."""
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
