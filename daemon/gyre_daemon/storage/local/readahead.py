"""Telling the kernel which pages of local files are about to be copied, so that a cold file is read many blocks at once.

Without it a copy out of a mapping waits for one block after the other. Nothing is told of files that are in memory already: of
a job a few reads are looked up, and only where one of them is not there, the whole job is announced. While nothing is missing,
fewer and fewer jobs are looked at: every look-up gives the interpreter's lock away, which costs more than the look. A copy that
had to wait for a disk all the same, which the kernel counts, brings all looks back.
"""

import contextlib
import ctypes
import mmap
import os
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.base import Reads
from gyre_daemon.storage.local.openfiles import OpenShard
from gyre_daemon.storage.shard import Shard

_NUM_PROBES = 16
_MAX_STRIDE = 64  # jobs of which one is looked at
_WHOLE_GRAIN_BYTES = 128 << 10

_Ranges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

_mincore = ctypes.PyDLL(None).mincore  # it waits for nothing: the interpreter's lock is kept
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


@dataclass(slots=True)
class Wait:
    """Of one job for a disk.

    Attributes:
        is_sure: what it copies is not all in memory.
        was_seen: it waited.
    """

    is_sure: bool
    was_seen: bool


class ReadAhead:
    """Announces the reads of one dataset. Used from threads that may wait."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Choose how much is read around a sample.

        A dataset that fits into memory will be there as a whole, and larger requests bring it there sooner; of one that does
        not, what lies around a sample would be dropped before it is used.
        """
        self.grain_bytes = _WHOLE_GRAIN_BYTES if fits_into_memory(shards) else mmap.PAGESIZE
        self._stride = 1
        self._num_unseen = 0

    @contextlib.contextmanager
    def around(self, reads: Reads, opened: Mapping[int, OpenShard]) -> Iterator[Wait]:
        """Announce reads, then notice whether copying them, inside, waited for a disk: every job is looked at again then.

        Gives whether it will have to wait; what others see of its waiting is noted there.
        """
        num_announced = self.announce(reads, opened)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        wait = Wait(num_announced > 0, num_announced > 0)
        yield wait
        wait.was_seen |= resource.getrusage(resource.RUSAGE_THREAD).ru_majflt != before
        if wait.was_seen:
            self._stride = 1

    def announce(self, reads: Reads, opened: Mapping[int, OpenShard]) -> int:
        """Have the kernel begin to read what is not in memory.

        Args:
            reads: none empty; of opened shards.
            opened: by shard.

        Returns:
            How many ranges were announced: 0 where all that was looked up is in memory, or nothing was looked up.
        """
        if self._num_unseen + 1 < self._stride:
            self._num_unseen += 1
            return 0
        self._num_unseen = 0
        if all(_is_resident(opened[shard], start) for shard, start in _probes(reads)):
            self._stride = min(2 * self._stride, _MAX_STRIDE)
            return 0
        self._stride = 1
        shards, starts, stops = blocks(reads.shard, reads.start, reads.start + reads.size, self.grain_bytes)
        with contextlib.suppress(OSError):  # it is advice: where it cannot be given, the copy waits
            for shard, start, stop in zip(shards.tolist(), starts.tolist(), stops.tolist(), strict=True):
                os.posix_fadvise(opened[shard].descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
        return len(shards)


def fits_into_memory(shards: Sequence[Shard]) -> bool:
    """Whether the page cache may hold all of a dataset and leave half of the machine's memory to others."""
    return sum(shard.size_bytes for shard in shards) <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2


def blocks(
    shard: npt.NDArray[np.int64], start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64], grain_bytes: int
) -> _Ranges:
    """The fewest ranges of whole blocks that cover n ranges `[start, stop)`, none of them empty.

    Returns:
        shard, start, stop: int64 [m], sorted; ranges of one shard neither overlap nor touch; starts and stops are multiples of
        `grain_bytes`, so that a stop may lie behind the end of its shard.
    """
    known, place = np.unique(shard, return_inverse=True)
    begin = start // grain_bytes
    end = -(-stop // grain_bytes)
    stride = int(end.max()) + 1  # lays the shards one behind the other, with a gap between them
    begin, end = begin + place * stride, end + place * stride
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate(([True], begin[1:] > reach[:-1])))
    last = np.append(first[1:], len(begin)) - 1
    of = begin[first] // stride
    return known[of], (begin[first] - of * stride) * grain_bytes, (reach[last] - of * stride) * grain_bytes


def _probes(reads: Reads) -> list[tuple[int, int]]:
    """Shard and start of a few reads, spread over the job."""
    which = slice(None, None, -(-len(reads) // _NUM_PROBES))
    return list(zip(reads.shard[which].tolist(), reads.start[which].tolist(), strict=True))


def _is_resident(shard: OpenShard, offset: int) -> bool:
    """Whether a byte of a shard can be read without a disk.

    Where the kernel calls the page resident, which it does of every page of another's file, a read that refuses to wait is
    tried. That alone would not do: it begins to read ahead, and a disk that answers meanwhile looks like memory.
    """
    if not is_mapped_in_memory(shard.address + offset):
        return False
    try:
        return os.preadv(shard.descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # a file system without such reads
        return True


def is_mapped_in_memory(address: int) -> bool:
    """Whether the page at an address of a mapped file is in memory.

    Of files that this process neither owns nor may write, the kernel says so of every page.
    """
    resident = ctypes.create_string_buffer(1)
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return _mincore(page, 1, resident) != 0 or bool(resident.raw[0] & 1)
