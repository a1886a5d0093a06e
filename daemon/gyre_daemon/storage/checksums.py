"""By what a local shard is recognised: its size and times, and checksums block by block.

They distinguish a shard that was only touched from one that was overwritten.

[Note: When a local shard is served]

A shard is served while its size and times are those that were listed (see `Stamp`). If only its
change time moved, its bytes decide: a new mode or link, a backup restored with `cp -p`, and an
overwritten file whose modification time was set back all look alike. Where an operator had
checksums taken (`gyre index --checksums`), every read compares the blocks that it touches. Equal
blocks are served; any other block is a `CorruptSample`. Once all blocks have been compared, the
shard is trusted again under its new times. Without checksums the shard is refused, and the error
names that command. The reasons are in `docs/adr/0026`.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.shard import Shard, changed

Checksums = npt.NDArray[np.uint8]  # [blocks, 16]

# A read from a touched shard hashes every block that it touches. Smaller blocks hash less for a
# small sample, but need more memory (16 bytes each). 1 MiB takes 1 to 2 ms to hash, and a TiB of
# shards needs 16 MiB of checksums. Another block size makes all stored checksums useless.
BLOCK_BYTES = 1 << 20
CHECKSUM_BYTES = 16
# File systems count time in ticks of some milliseconds. A change older than this lies in an earlier
# tick than now; with less, a write in the same tick would go unnoticed, and more only waits longer.
_SETTLED_S = 0.05


class Stamp(NamedTuple):
    """A file's size and times.

    A write changes both times. The modification time can be set back afterwards, the change time
    cannot. A new mode, owner, link or name changes the change time alone.

    Attributes:
        size_bytes: the length of the file.
        modified_ns: when its bytes were last written, as far as its owner says.
        changed_ns: when anything about it last changed.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> "Stamp":
        """The present stamp of a path or a descriptor.

        Raises:
            OSError: it cannot be looked at.
        """
        # `Path.stat` takes no descriptor.
        stat = os.stat(file)  # noqa: PTH116
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def version(self) -> str:
        """The stamp as a `Shard.version`."""
        return f"{self.modified_ns}.{self.changed_ns}"

    def is_restored(self, version: str) -> bool:
        """Whether the modification time is that of a version."""
        return str(self.modified_ns) == version.partition(".")[0]

    def settle(self) -> None:
        """Wait until any later change would get another time."""
        age_s = (time.time_ns() - self.changed_ns) / 1e9
        if age_s < _SETTLED_S:
            time.sleep(min(_SETTLED_S, max(_SETTLED_S - age_s, 0)))


class ShardChecksums:
    """The checksums of one dataset's local shards, and which blocks were compared since.

    Safe for several threads.

    Attributes:
        listed: the shards as listed.
        known: the checksums by shard number, of those shards that have some; `add` adds some.
        load: finds those of a shard that an earlier daemon stored; called in threads that read.
    """

    def __init__(self, shards: Sequence[Shard], files: Sequence[LocalFile]) -> None:
        """Know no checksum yet.

        Args:
            shards: as listed.
            files: where they lie.
        """
        self.listed = shards
        self._files = files
        self.known: dict[int, Checksums] = {}
        self.load: Callable[[int], Checksums | None] = lambda _: None
        self._compared: dict[int, tuple[Stamp, int, npt.NDArray[np.bool_]]] = {}

    def folder(self, shard: int) -> Path:
        """The root of a shard."""
        return self._files[shard].root.folder

    def add(self, shard: int, checksums: Checksums) -> None:
        """Keep checksums that were taken while the shard was as listed.

        Those of another number of blocks are ignored.
        """
        if checksums.shape == (num_blocks(self.listed[shard].size_bytes), CHECKSUM_BYTES):
            self.known[shard] = checksums

    def take(self, shard: int, stopped: threading.Event) -> Checksums | None:
        """Read a shard and keep its checksums.

        Args:
            shard: its number.
            stopped: looked at after every block.

        Returns:
            None if the shard is not as listed, or if `stopped` was set.

        Raises:
            OSError: it cannot be read.
        """
        listed = self.listed[shard]
        with self._files[shard].opened() as descriptor:
            if not _is_as_listed(descriptor, listed):
                return None
            checksums = _hash_blocks(descriptor, listed.size_bytes, stopped)
            if checksums is None or not _is_as_listed(descriptor, listed):
                return None
        self.add(shard, checksums)
        return checksums

    def compare(
        self,
        shard: int,
        descriptor: int,
        stamp: Stamp,
        start: npt.NDArray[np.int64],
        stop: npt.NDArray[np.int64],
    ) -> bool:
        """Compare the blocks of some ranges with their checksums.

        Each block is read once for as long as the stamp stays.

        Args:
            shard: its number.
            descriptor: of the file.
            stamp: of the file now.
            start: int64 [n], the first byte of each range.
            stop: int64 [n], the byte after its last; no range is empty.

        Returns:
            Whether all blocks of the shard have been compared by now.

        Raises:
            CorruptSample: a block differs, or the shard has no checksums.
            OSError: it cannot be read.
        """
        listed = self.listed[shard]
        if shard not in self.known and (stored := self.load(shard)) is not None:
            self.add(shard, stored)
        if (known := self.known.get(shard)) is None:
            raise unknown(listed.name, "gyre index --checksums")
        same = self._same(shard, descriptor, stamp, len(known))
        for block in np.flatnonzero(_touched(start, stop, len(known)) & ~same).tolist():
            data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
            if _checksum(data) != known[block].tobytes():
                raise changed(listed.name)
            same[block] = True
        return bool(same.all())

    def _same(self, shard: int, descriptor: int, stamp: Stamp, count: int) -> npt.NDArray[np.bool_]:
        """Bool [count]: the blocks already found equal in this file under this stamp."""
        inode = os.fstat(descriptor).st_ino
        found = self._compared.get(shard)
        if found is None or found[:2] != (stamp, inode):
            found = self._compared[shard] = (stamp, inode, np.zeros(count, np.bool_))
        return found[2]


def num_blocks(size_bytes: int) -> int:
    """The number of blocks of a shard."""
    return -(-size_bytes // BLOCK_BYTES)


def _hash_blocks(descriptor: int, size_bytes: int, stopped: threading.Event) -> Checksums | None:
    """The checksums of a whole file; blocks beyond its end get that of no bytes."""
    checksums = np.empty((num_blocks(size_bytes), CHECKSUM_BYTES), np.uint8)
    for block in range(len(checksums)):
        if stopped.is_set():
            return None
        data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
        checksums[block] = np.frombuffer(_checksum(data), np.uint8)
    return checksums


def _is_as_listed(descriptor: int, listed: Shard) -> bool:
    stamp = Stamp.of(descriptor)
    return (stamp.size_bytes, stamp.version) == (listed.size_bytes, listed.version)


def unknown(name: str, command: str) -> CorruptSample:
    """The error for a shard that may have changed since it was listed; `command` lists it again."""
    return CorruptSample(
        f"shard {name} has changed since the dataset was opened, or was only touched: its change "
        "time moved, and there are no checksums of its bytes. If they are the same, index the "
        f"dataset again (`{command}`).",
        {"shard": name, "reason": "changed, or touched before it had checksums"},
    )


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _touched(
    start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.bool_]:
    """Bool [count]: the blocks that contain bytes of any range."""
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, start // BLOCK_BYTES, 1)
    np.add.at(steps, (stop - 1) // BLOCK_BYTES + 1, -1)
    return np.asarray(steps[:-1].cumsum() > 0)
