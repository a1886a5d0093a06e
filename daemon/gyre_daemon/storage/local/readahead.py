"""Tells the kernel which pages of local files are about to be copied.

A cold file is then read many blocks at once, instead of one after the other as the copy reaches
them. Files in memory need no announcement: a few reads of each job are looked up, and the job is
announced only if one of them is missing.

Before a cold job is announced, one of its reads is measured, and more if that takes long: see
`storage.latency`. This is done only while no other cold job is under way, because what waits behind
the announcements of others says nothing about the disk.
"""

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.base import Reads
from gyre_daemon.storage.latency import MountIsSlow
from gyre_daemon.storage.local.open_files import OpenShard
from gyre_daemon.storage.shard import Shard

# Reads looked up in a job. More cost time in every job, some 0.03 ms for these; fewer notice later
# that files have become cold.
_NUM_PROBES = 16
# Bytes read around a sample of a dataset that fits into memory. It is read whole sooner or later,
# so larger requests bring it there sooner.
_WHOLE_GRAIN_BYTES = 128 << 10

_Ranges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

_mincore = ctypes.PyDLL(None).mincore  # it never waits, so the interpreter's lock is kept
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


class ReadAhead:
    """Announces the reads of one dataset. Used from threads that may wait."""

    def __init__(self, shards: Sequence[Shard], *, measures: bool = False) -> None:
        """Choose how much is read around a sample.

        In a dataset that does not fit into memory, the bytes around a sample would be evicted
        before they are used.

        Args:
            shards: of the dataset.
            measures: whether a slow mount may be read in another way.
        """
        self._measures = measures
        self.grain_bytes = _WHOLE_GRAIN_BYTES if fits_into_memory(shards) else mmap.PAGESIZE

    @contextlib.contextmanager
    def around(self, reads: Reads, opened: Mapping[int, OpenShard]) -> Iterator[bool]:
        """Announce reads; the caller copies them inside the context.

        Yields:
            Whether some of them are not in memory.

        Raises:
            MountIsSlow: one of the mounts of the shards.
        """
        is_cold = self.announce(reads, opened) > 0
        latency = next(iter(opened.values())).mount.latency
        with latency.cold_job() if is_cold else contextlib.nullcontext():
            yield is_cold

    def announce(self, reads: Reads, opened: Mapping[int, OpenShard]) -> int:
        """Have the kernel begin to read the pages not in memory.

        Args:
            reads: not empty, of opened shards.
            opened: by shard number.

        Returns:
            The number of announced ranges; 0 if everything that was looked up is in memory.

        Raises:
            MountIsSlow: see `around`.
        """
        probes = iter(_probes(reads))
        cold = next(
            (probe for probe in probes if not _is_resident(opened[probe[0]], probe[1])), None
        )
        if cold is None:
            return 0
        if self._measures and _are_slow([cold, *probes], opened):
            raise MountIsSlow
        ranges = blocks(reads.shard, reads.start, reads.start + reads.size, self.grain_bytes)
        with contextlib.suppress(OSError):  # without the advice, the copy waits
            for shard, start, stop in zip(*(column.tolist() for column in ranges), strict=True):
                descriptor = opened[shard].descriptor
                os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
        return len(ranges[0])


def fits_into_memory(shards: Sequence[Shard]) -> bool:
    """Whether a dataset takes at most half of the machine's memory as page cache."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return sum(shard.size_bytes for shard in shards) <= memory_bytes // 2


def blocks(
    shard: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    grain_bytes: int,
) -> _Ranges:
    """The fewest ranges of whole blocks that cover n non-empty ranges `[start, stop)`.

    Returns:
        shard, start, stop: int64 [m], sorted. Ranges of one shard neither overlap nor touch. Starts
            and stops are multiples of `grain_bytes`, so a stop may lie beyond its shard's end.
    """
    known, place = np.unique(shard, return_inverse=True)
    begin = start // grain_bytes
    end = -(-stop // grain_bytes)
    stride = int(end.max()) + 1  # lays the shards one after the other, with a gap between them
    begin, end = begin + place * stride, end + place * stride
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate(([True], begin[1:] > reach[:-1])))
    last = np.append(first[1:], len(begin)) - 1
    of = begin[first] // stride
    starts, stops = begin[first] - of * stride, reach[last] - of * stride
    return known[of], starts * grain_bytes, stops * grain_bytes


def _probes(reads: Reads) -> list[tuple[int, int]]:
    """Shard and start of a few reads, spread over the job."""
    which = slice(None, None, -(-len(reads) // _NUM_PROBES))
    return list(zip(reads.shard[which].tolist(), reads.start[which].tolist(), strict=True))


def _are_slow(probes: Sequence[tuple[int, int]], opened: Mapping[int, OpenShard]) -> bool:
    """Whether the mount of some reads is slow; measures the first, and the others if it is late."""
    for shard, start in probes:
        file = opened[shard]
        if file.mount.latency.num_cold_jobs:
            return False
        began_s = time.perf_counter()
        with contextlib.suppress(OSError):  # the copy finds the error
            os.pread(file.descriptor, 1, start)
        is_late = file.mount.latency.add_since(began_s)
        if file.mount.latency.is_slow or not is_late:
            return file.mount.latency.is_slow
    return False


def _is_resident(shard: OpenShard, offset: int) -> bool:
    """Whether a byte of a shard can be read without a disk.

    The kernel reports every page of another user's file as resident, so a read that refuses to wait
    follows there. That read alone would not do: it starts readahead, and a disk that answers
    quickly would look like memory. It also releases the interpreter's lock, which a busy event loop
    gives back late.
    """
    if not is_mapped_in_memory(shard.address + offset):
        return False
    if shard.is_own:
        return True
    try:
        return os.preadv(shard.descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # the file system has no such reads
        return True


def is_mapped_in_memory(address: int) -> bool:
    """Whether the page at an address of a mapped file is in memory.

    True for every page of a file that this process neither owns nor may write.
    """
    resident = ctypes.create_string_buffer(1)
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return _mincore(page, 1, resident) != 0 or bool(resident.raw[0] & 1)
