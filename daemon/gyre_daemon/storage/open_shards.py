"""Open local shards, and whether they are as they were listed.

They are mapped unless their mount is slow. The operating system limits open and mapped files, so
only the most recently used ones stay open, and none of a dataset that no job reads any more.

[Note: When a local shard is served]

A shard is served while its size and times are those that were listed (see `Stamp`). If only its
change time moved, its bytes decide: a new mode or link, a backup restored with `cp -p`, and an
overwritten file whose modification time was set back all look alike. Where an operator had
checksums taken (`gyre index --checksums`), every read compares the blocks that it touches. Equal
blocks are served; any other block is a `CorruptSample`. Once all blocks have been compared, the
shard is trusted again under its new times. Without checksums the shard is refused, and the error
names that command. The reasons are in `docs/adr/0026`.
"""

import errno
import hashlib
import math
import mmap
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import CorruptSample, GyreError
from gyre_daemon.runtime.events import debug_event
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.beneath import LocalFile, OpenBeneath, file_error
from gyre_daemon.storage.mounts import MOUNTS, Latency, Mount, MountIsSlow
from gyre_daemon.storage.shard import Shard, changed
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers, new_key

Checksums = npt.NDArray[np.uint8]  # [blocks, 16]

# A read from a touched shard hashes every block that it touches. Smaller blocks hash less for a
# small sample, but need more memory (16 bytes each). 1 MiB takes 1 to 2 ms to hash, and a TiB of
# shards needs 16 MiB of checksums. Another block size makes all stored checksums useless.
BLOCK_BYTES = 1 << 20
CHECKSUM_BYTES = 16
# File systems count time in ticks of some milliseconds. A change older than this is in an earlier
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


# Every dataset may have this many shards open, even if there are too many datasets for the
# descriptors: with one, a read of two shards would open and close files all the time.
_MIN_OPEN = 2
# The shards of a dataset that was not read for this long are closed. A job that reads again opens
# those that it needs, some ten microseconds each; with less, a trainer that takes checkpoints does.
_IDLE_S = 30.0


@dataclass(slots=True)
class OpenShard:
    """An open shard, for as long as anything refers to it.

    Attributes:
        key: its name among the files of copy workers.
        listed: its state when the dataset was opened.
        file: where it lay then.
        descriptor: of the file; owned by this object.
        mapping: of the whole file; None where it is not mapped.
        address: of its first byte; 0 where it is not mapped.
        trusted: while the file has this stamp it is as listed; None if its bytes must be
            compared first.
        mount: of the file, which it closes.
        copy_workers: told when the file is closed.
        is_own: its user is the daemon's, so the kernel says which of its pages are in memory.
        is_sound: no read of it has failed yet.
    """

    key: int
    listed: Shard
    file: LocalFile
    descriptor: int
    mapping: mmap.mmap | None
    address: int
    trusted: Stamp | None
    mount: Mount
    copy_workers: CopyWorkers
    is_own: bool
    is_sound: bool = True

    def __del__(self) -> None:
        """Close the file; the mapping goes with its last reference."""
        self.mount.close(self.descriptor)
        self.copy_workers.forget(self.key)

    @property
    def stamp(self) -> Stamp:
        """The file's stamp now.

        Raises:
            NotAllowed, StorageUnavailable: it cannot be looked at.
        """
        try:
            return Stamp.of(self.descriptor)
        except OSError as error:
            raise file_error(self.listed.name, error) from error

    @property
    def is_at_its_path(self) -> bool:
        """Whether the file still lies at its path.

        A deleted or replaced file can still be read here, but the next process could not read it.
        Its owner should learn that from an error now.

        Raises:
            ShardMissing: there is nothing at its path.
            NotAllowed, StorageUnavailable: the path cannot be looked at.
        """
        try:
            with self.file.opened() as found:
                return os.path.samestat(os.fstat(self.descriptor), os.fstat(found))
        except OSError as error:
            raise file_error(self.listed.name, error) from error


class OpenFiles:
    """Divides the open files of a daemon among its datasets."""

    def __init__(self) -> None:
        self._datasets: weakref.WeakSet[OpenShards] = weakref.WeakSet()
        self._max_open = _MIN_OPEN

    @property
    def share(self) -> int:
        """How many shards each dataset may have open."""
        return max(_MIN_OPEN, self._max_open // max(1, len(self._datasets)))

    def add(self, dataset: "OpenShards") -> None:
        """Add a dataset; the others close shards beyond their smaller share."""
        self._max_open = descriptor_shares().shards
        self._datasets.add(dataset)
        for other in list(self._datasets):
            other.trim()

    def expire(self) -> None:
        """Let `close_idle` close all shards not asked for until then."""
        for dataset in list(self._datasets):
            dataset.used_at = -math.inf

    def close_idle(self) -> None:
        """Have threads close the shards of datasets that no job reads any more."""
        now = time.monotonic()
        for dataset in list(self._datasets):
            if now - dataset.used_at >= _IDLE_S:
                dataset.used_at = now  # a mount that hangs gets no further call for a while
                dataset.mount.threads.submit(dataset.close)


class OpenShards:
    """Opens the shards of one dataset when they are needed. Safe for several threads.

    Attributes:
        used_at: when a shard was last asked for, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        files: Sequence[LocalFile],
        shards: Sequence[Shard],
        copy_workers: CopyWorkers = NO_COPY_WORKERS,
        open_files: OpenFiles | None = None,
        *,
        maps: bool = True,
    ) -> None:
        """Open nothing yet.

        Args:
            files: the shards.
            shards: as listed.
            copy_workers: told when a file is closed.
            open_files: shared with other datasets; None for a dataset by itself.
            maps: whether shards are mapped.
        """
        self._files = files
        self._maps = maps
        self._copy_workers = copy_workers
        self._shards = shards
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self.used_at = time.monotonic()
        self._open_files = open_files or OpenFiles()
        self._open_files.add(self)

    @property
    def mount(self) -> Mount:
        """The mount of its first shard."""
        return MOUNTS.at(self._files[0].root.folder)

    @property
    def max_open(self) -> int:
        """How many shards may be open; the least recently used are closed first."""
        return self._open_files.share

    def trim(self) -> None:
        """Close shards beyond `max_open`."""
        with self._lock:
            while len(self._open) > self.max_open:
                self._open.popitem(last=False)

    def close(self) -> None:
        """Close all; those that a thread reads from close when it has read."""
        with self._lock:
            opened, self._open = self._open, OrderedDict()
        num_open = len(opened)
        opened.clear()
        if num_open:
            debug_event("shards closed", {"shards": num_open, "first": self._shards[0].name})

    def get(self, shard: int) -> OpenShard:
        """As `get_all`, for one."""
        return self.get_all([shard])[shard]

    def get_all(self, shards: Sequence[int]) -> dict[int, OpenShard]:
        """Open shards; the caller keeps them while it reads.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: one cannot be opened.
            CorruptSample: one has changed since it was listed.
        """
        self.used_at = time.monotonic()
        with self._lock:
            found = {shard: self._open[shard] for shard in shards if shard in self._open}
            for shard in found:
                self._open.move_to_end(shard)
        if len(found) < len(shards):
            missing = [shard for shard in shards if shard not in found]
            opened = self._opened(missing)
            with self._lock:  # another thread may have been faster
                found |= {shard: self._open.setdefault(shard, opened[shard]) for shard in missing}
            self.trim()
        return found

    def _opened(self, shards: Sequence[int]) -> dict[int, OpenShard]:
        """Open these shards; see `get_all` for errors."""
        opened: dict[int, OpenShard] = {}
        for root, its in groupby(shards, lambda shard: self._files[shard].root):
            numbers = list(its)
            try:
                with root.held() as open_beneath:
                    for shard in numbers:
                        file, listed = self._files[shard], self._shards[shard]
                        opened[shard] = _open(
                            file, listed, self._copy_workers, open_beneath, maps=self._maps
                        )
            except OSError as error:  # of the root itself
                raise file_error(self._shards[numbers[0]].name, error) from error
        return opened

    def drop(self, opened: OpenShard, shard: int) -> None:
        """Open a shard again when it is next asked for."""
        with self._lock:
            if self._open.get(shard) is opened:
                del self._open[shard]

    def get_moved(self, shard: int) -> OpenShard:
        """The file that lies at the shard's path now, which may be another than `get` returned.

        Raises:
            ShardMissing: there is none.
            CorruptSample: its size or its modification time is another than listed.
            NotAllowed, StorageUnavailable: it cannot be opened.
        """
        opened = self.get(shard)
        if not opened.is_at_its_path:
            self.drop(opened, shard)
            opened = self.get(shard)
        _check(opened.listed, opened.stamp)
        return opened


def _open(
    file: LocalFile,
    listed: Shard,
    copy_workers: CopyWorkers,
    open_beneath: OpenBeneath,
    *,
    maps: bool,
) -> OpenShard:
    mapping, address, mount = None, 0, MOUNTS.at(str(file))
    try:
        descriptor = file.open(open_beneath)
    except OSError as error:
        raise file_error(listed.name, error) from error
    try:
        stamp = Stamp.of(descriptor)
        _check(listed, stamp)
        is_own = os.fstat(descriptor).st_uid == os.geteuid()
        if maps:
            mapping = _mapped(descriptor, mount.latency)
            # Otherwise a missing page may bring MiB around it: `readahead` names the wanted ones.
            mapping.madvise(mmap.MADV_RANDOM)
            address = np.frombuffer(mapping, np.uint8).ctypes.data
        else:  # nothing around a sample is wanted: each byte may take long
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError as error:
        os.close(descriptor)
        raise file_error(listed.name, error) from error
    except (GyreError, MountIsSlow):
        os.close(descriptor)
        raise
    trusted = stamp if stamp.version == listed.version else None
    return OpenShard(
        new_key(), listed, file, descriptor, mapping, address, trusted, mount, copy_workers, is_own
    )


def _mapped(descriptor: int, latency: Latency) -> mmap.mmap:
    """The mapping of a whole file.

    Raises:
        MountIsSlow: its file system maps no files; it counts as slow from now on.
        OSError: it cannot be mapped.
    """
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        if error.errno == errno.ENODEV:
            latency.cannot_map()
            raise MountIsSlow from error
        raise


def _check(listed: Shard, stamp: Stamp) -> None:
    """Refuse a file other than the listed one."""
    if stamp.size_bytes != listed.size_bytes or not stamp.is_restored(listed.version):
        raise changed(listed.name)
