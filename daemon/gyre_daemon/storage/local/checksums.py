"""Checksums of local shards, block by block: what tells a shard that was only touched from one that was overwritten.

[Note: When a local shard is served]

A shard is served as it is while its size and its times are those that were listed. Where they are not (see `Stamp`),
the bytes decide. Every block of a shard has a checksum, taken while the shard was as listed. A shard of the same size and
time of modification whose time of change moved is read and compared: of each read the blocks that it touches. That
happens where a file has a new mode or link, where a backup was put back with `cp -p`, and where somebody overwrote it
and set the time back. Blocks that are the same are served, others are a `CorruptSample`. Once all blocks were compared
the shard is trusted again, with its new times. Where no checksums had been taken nobody can tell, and the error says so.
Why it is so: `docs/adr/0026`.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.local.stamps import Stamp
from gyre_daemon.storage.shard import Shard, changed

Checksums = npt.NDArray[np.uint8]  # [blocks, 16]

# A read from a shard that was touched hashes every block that it touches: smaller blocks cost less for a small sample, and
# more memory for all (16 bytes each). 1 MiB takes 1 to 2 ms to hash, and a TiB of shards 16 MiB of checksums.
BLOCK_BYTES = 1 << 20
_CHECKSUM_BYTES = 16
_PART_BLOCKS = 8


class ShardChecksums:
    """The checksums of one dataset's local shards, and which blocks were compared since. Safe for several threads."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._known: dict[int, Checksums] = {}
        self._compared: dict[int, tuple[Stamp, int, npt.NDArray[np.bool_]]] = {}

    @property
    def known(self) -> Mapping[int, Checksums]:
        """Of shards, by number."""
        return self._known

    def add(self, shard: int, checksums: Checksums) -> None:
        """Know a shard's checksums, taken while it was as listed; what has another number of blocks is not believed."""
        if checksums.shape == (num_blocks(self._shards[shard].size_bytes), _CHECKSUM_BYTES):
            self._known[shard] = checksums

    def compare(
        self, shard: int, descriptor: int, stamp: Stamp, start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64]
    ) -> bool:
        """Compare the blocks of some ranges with their checksums; each is read once for as long as the stamp stays.

        Args:
            shard: its number.
            descriptor: of the file.
            stamp: of the file now.
            start: int64 [n], first byte of each range.
            stop: int64 [n], the byte after its last; none is empty.

        Returns:
            Whether all blocks of the shard have been compared by now.

        Raises:
            CorruptSample: a block is another, or nobody can tell.
            OSError: it cannot be read.
        """
        listed, known = self._shards[shard], self._known.get(shard)
        if known is None:
            raise unknown(listed.name)
        same = self._same(shard, descriptor, stamp, len(known))
        for block in np.flatnonzero(_touched(start, stop, len(known)) & ~same).tolist():
            if _checksum(os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)) != known[block].tobytes():
                raise changed(listed.name)
            same[block] = True
        return bool(same.all())

    def _same(self, shard: int, descriptor: int, stamp: Stamp, count: int) -> npt.NDArray[np.bool_]:
        """Which blocks were the same already, in this file under this stamp."""
        inode = os.fstat(descriptor).st_ino
        found = self._compared.get(shard)
        if found is None or found[:2] != (stamp, inode):
            found = self._compared[shard] = (stamp, inode, np.zeros(count, np.bool_))
        return found[2]


def num_blocks(size_bytes: int) -> int:
    """Of a shard."""
    return -(-size_bytes // BLOCK_BYTES)


def take_checksums(
    descriptor: int, size_bytes: int, go_on: Callable[[int], bool], *, stays_in_memory: bool = True
) -> Checksums | None:
    """Read a file whole.

    A file that is shorter than it should be gives checksums of nothing for the rest.

    Args:
        descriptor: of the file.
        size_bytes: its length.
        go_on: called after every 8 MiB and at the end with how much was read since; may wait. Where it says no, nothing
            comes of it.
        stays_in_memory: what was read; else the page cache need not keep it.

    Raises:
        OSError: it cannot be read.
    """
    checksums = np.empty((num_blocks(size_bytes), _CHECKSUM_BYTES), np.uint8)
    for first in range(0, len(checksums), _PART_BLOCKS):
        part = range(first, min(first + _PART_BLOCKS, len(checksums)))
        for block in part:
            data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
            checksums[block] = np.frombuffer(_checksum(data), np.uint8)
        if not stays_in_memory:  # what jobs have mapped stays all the same
            os.posix_fadvise(descriptor, first * BLOCK_BYTES, len(part) * BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
        if not go_on(len(part) * BLOCK_BYTES):
            return None
    return checksums


def checksums_as_listed(
    path: Path, listed: Shard, go_on: Callable[[int], bool], *, stays_in_memory: bool = True
) -> Checksums | None:
    """The checksums of a shard that is what was listed; None where it is not, or where `go_on` said no; see `take_checksums`.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not _is_as_listed(descriptor, listed):
            return None
        checksums = take_checksums(descriptor, listed.size_bytes, go_on, stays_in_memory=stays_in_memory)
        return checksums if _is_as_listed(descriptor, listed) else None
    finally:
        os.close(descriptor)


def _is_as_listed(descriptor: int, listed: Shard) -> bool:
    stamp = Stamp.of(descriptor)
    return (stamp.size_bytes, stamp.version) == (listed.size_bytes, listed.version)


def unknown(name: str) -> CorruptSample:
    """The error for a shard that may or may not be what was listed."""
    return CorruptSample(
        f"shard {name} has changed since the dataset was opened, or was only touched: its time of change moved, and no "
        "checksums of its bytes had been taken before that could tell; if it is what it was, index the dataset again",
        {"shard": name, "reason": "changed, or touched before it had checksums"},
    )


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()


def _touched(start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    """Which blocks any of the ranges has bytes of, bool [count]."""
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, start // BLOCK_BYTES, 1)
    np.add.at(steps, (stop - 1) // BLOCK_BYTES + 1, -1)
    return np.asarray(steps[:-1].cumsum() > 0)
