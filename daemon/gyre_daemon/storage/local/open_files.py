"""The local shards that are open, and mapped unless their mount is slow.

The operating system limits both, so only the most recently used ones stay open, and none of a
dataset that no job reads any more.
"""

import errno
import math
import mmap
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.errors import GyreError
from gyre_daemon.runtime.events import debug_event
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.checksums import Stamp
from gyre_daemon.storage.latency import Latency, MountIsSlow
from gyre_daemon.storage.local.listing import file_error
from gyre_daemon.storage.mounts import MOUNTS, Mount
from gyre_daemon.storage.shard import Shard, changed
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers, new_key

# Every dataset may have this many shards open, even if there are too many datasets for the
# descriptors: with one, a read of two shards would open and close files all the time.
_MIN_OPEN = 2
# The shards of a dataset that was not read for this long are closed. A job that reads again opens
# those that it needs, some ten microseconds each; with less, a trainer that takes checkpoints does.
_IDLE_S = 30.0


@dataclass(slots=True)
class OpenShard:
    """A shard that is open, for as long as anything refers to it.

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
        """An open shard; the caller keeps it while it reads.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be opened.
            CorruptSample: it has changed since it was listed.
        """
        self.used_at = time.monotonic()
        with self._lock:
            found = self._open.get(shard)
            if found:
                self._open.move_to_end(shard)
                return found
        file, listed = self._files[shard], self._shards[shard]
        opened = _open(file, listed, self._copy_workers, maps=self._maps)
        with self._lock:
            opened = self._open.setdefault(shard, opened)  # another thread may have been faster
        self.trim()
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


def _open(file: LocalFile, listed: Shard, copy_workers: CopyWorkers, *, maps: bool) -> OpenShard:
    mapping, address, mount = None, 0, MOUNTS.at(file.path)
    try:
        descriptor = file.open()
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
            latency.maps = False
            raise MountIsSlow from error
        raise


def _check(listed: Shard, stamp: Stamp) -> None:
    """Refuse a file that has changed since it was listed."""
    if stamp.size_bytes != listed.size_bytes or not stamp.is_restored(listed.version):
        raise changed(listed.name)
