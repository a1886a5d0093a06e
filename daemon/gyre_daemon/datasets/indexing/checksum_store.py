"""Takes the checksums of local shards while they are known to be good, and stores them.

[Note: When a local shard is served] in `storage/checksums.py` says what they are good for.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.sidecars.file import Arrays
from gyre_daemon.datasets.sidecars.store import Check, SidecarKey, SidecarStore
from gyre_daemon.errors import Overloaded
from gyre_daemon.storage.checksums import CHECKSUM_BYTES, Checksums, ShardChecksums, num_blocks
from gyre_daemon.storage.local.listing import file_error

CHECKSUMS_SUFFIX = ".gyre-checksums"
_KIND = "checksums/1"
_NAME = "checksums"

# A dataset of at most this size gets its checksums before it is served, which takes 35 to 70 ms.
# Twice as much would double the time to the first batch of a dataset that is not in memory.
_AT_ONCE_BYTES, _AT_ONCE_SHARDS = 16 << 20, 64
# Larger datasets are read in the background, during one part of the time in this many: at 4 that is
# a quarter of one core, and 100 to 200 MiB/s if the file is in memory. At 2, a job that needs both
# cores of a small machine would notice.
_SHARE_OF_TIME = 4
# The first bytes of a dataset are read without pauses while no job reads, so that most datasets on
# a laptop have all checksums after a second or two. Twice as much would take a core for some
# seconds more whenever a large dataset is opened.
_EAGER_BYTES = 1 << 30
# Smaller datasets are read again at the next start, within a second or two, instead of leaving
# files in the index folder.
_MIN_STORED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _QueuedDataset:
    """A dataset that needs checksums, unless it has been closed by then."""

    location: str
    shards: weakref.ref[ShardChecksums]


class ChecksumTaker:
    """One thread that takes checksums for all datasets of a daemon."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Start nothing yet.

        Args:
            sidecars: any kind; checksums are stored in the same folders, never beside a shard.
        """
        self._sidecars = sidecars.sibling(CHECKSUMS_SUFFIX)
        self._queue: queue.SimpleQueue[_QueuedDataset | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, location: str, shards: ShardChecksums) -> None:
        """Take the checksums of a new dataset: of a small one now, else in the background."""
        num_bytes = sum(shard.size_bytes for shard in shards.listed)
        queued = _QueuedDataset(location, weakref.ref(shards))
        if num_bytes <= _AT_ONCE_BYTES and len(shards.listed) <= _AT_ONCE_SHARDS:
            self._take_all(queued, lambda _: True)
            return
        self._queue.put(queued)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gyre-checksums", daemon=True)
            self._thread.start()

    def take(
        self, location: str, shards: ShardChecksums, shard: int, stopped: threading.Event
    ) -> Checksums | None:
        """Take and store the checksums of one shard now.

        None if it is no longer what was listed, or `stopped` was set meanwhile.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """

        def go_on(_: int) -> bool:
            return not (self._closing.is_set() or stopped.is_set())

        try:
            checksums = shards.take(shard, go_on)
        except OSError as error:
            raise file_error(shards.listed[shard].name, error) from error
        if checksums is not None:
            self._save(location, shards, shard, checksums)
        return checksums

    def keep(
        self, location: str, shards: ShardChecksums, shard: int, stopped: threading.Event
    ) -> None:
        """Store the checksums of one shard for later daemons; take them if there are none.

        Nothing is stored if `stopped` is set before all are taken.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """
        known = shards.known.get(shard)
        if known is None:
            self.take(location, shards, shard, stopped)
        else:
            self._save(location, shards, shard, known)

    def stored(
        self, location: str, shards: ShardChecksums, shard: int
    ) -> tuple[Checksums, bool] | None:
        """The checksums last stored for a shard, and whether it was then as it is listed now.

        None if there are none.
        """
        found = self._sidecars.load_latest(
            _key(location, shards, shard), None, _check(shards, shard)
        )
        if found is None or _NAME not in found[0]:
            return None
        return found[0][_NAME], found[1]

    def close(self) -> None:
        """Stop, and wait for the thread."""
        self._closing.set()
        self._queue.put(None)
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (queued := self._queue.get()) and not self._closing.is_set():
            self._take_all(queued, _Throttle(queued.shards, self._closing).pause)

    def _take_all(self, queued: _QueuedDataset, go_on: Callable[[int], bool]) -> None:
        """Take the checksums that are missing; a shard that cannot be read gets none."""
        opened = queued.shards()
        num_shards = len(opened.listed) if opened else 0
        del opened  # a dataset that is closed meanwhile must not be kept alive
        for shard in range(num_shards):
            shards = queued.shards()
            if shards is None or self._closing.is_set():
                return
            location = queued.location
            if shard not in shards.known and not self._load(location, shards, shard):
                self._try_to_take(location, shards, shard, go_on)

    def _load(self, location: str, shards: ShardChecksums, shard: int) -> bool:
        key = _key(location, shards, shard)
        arrays = self._sidecars.load(key, None, _check(shards, shard))
        if arrays is not None:
            shards.add(shard, arrays[_NAME])
        return shard in shards.known

    def _try_to_take(
        self, location: str, shards: ShardChecksums, shard: int, go_on: Callable[[int], bool]
    ) -> None:
        try:
            checksums = shards.take(shard, go_on, stays_in_memory=shards.fits_into_memory)
        except OSError:
            return
        is_large = sum(each.size_bytes for each in shards.listed) >= _MIN_STORED_BYTES
        if checksums is not None and is_large:
            self._save(location, shards, shard, checksums)

    def _save(
        self, location: str, shards: ShardChecksums, shard: int, checksums: Checksums
    ) -> None:
        """Store checksums; without room for them, the next daemon takes them again."""
        try:
            self._sidecars.save(_key(location, shards, shard), None, {_NAME: checksums})
        except Overloaded:
            return


class _Throttle:
    """Pauses the thread, so that it works only its share of the time."""

    def __init__(self, shards: weakref.ref[ShardChecksums], closing: threading.Event) -> None:
        self._shards = shards
        self._closing = closing
        self._num_bytes = 0
        self._resumed = time.monotonic()

    def pause(self, num_bytes: int) -> bool:
        """Wait as long as is due after reading `num_bytes` more; False if the daemon is closing."""
        self._num_bytes += num_bytes
        if not (self._num_bytes <= _EAGER_BYTES and self._is_idle):
            self._closing.wait((time.monotonic() - self._resumed) * (_SHARE_OF_TIME - 1))
        self._resumed = time.monotonic()
        return not self._closing.is_set()

    @property
    def _is_idle(self) -> bool:
        shards = self._shards()
        return shards is not None and shards.is_idle()


def _check(shards: ShardChecksums, shard: int) -> Check:
    """Refuses what are no checksums of a shard of this size."""

    def check(arrays: Arrays) -> None:
        checksums = arrays.get(_NAME)
        expected = num_blocks(shards.listed[shard].size_bytes), CHECKSUM_BYTES
        if checksums is None or checksums.dtype != np.uint8 or checksums.shape != expected:
            raise ValueError("it has no checksums of this shard")

    return check


def _key(location: str, shards: ShardChecksums, shard: int) -> SidecarKey:
    listed = shards.listed[shard]
    return SidecarKey(location, listed.name, listed.size_bytes, listed.version, _KIND)
