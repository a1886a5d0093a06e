"""Takes the checksums of local shards while they are known to be good, and keeps those of large datasets.

See [Note: When a local shard is served] in `storage/checksums.py` for what they are good for.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import Overloaded
from gyre_daemon.storage.local.checksums import Checksums, checksums_as_listed
from gyre_daemon.storage.local.local import LocalStorage

CHECKSUMS_SUFFIX = ".gyre-checksums"
_KIND = "checksums/1"
_NAME = "checksums"

# Small datasets get their checksums before they are served: so much is hashed in 35 to 70 ms, which nobody waits for
# again. Twice as much would double the time to the first batch of a dataset that is not in memory.
_AT_ONCE_BYTES, _AT_ONCE_SHARDS = 16 << 20, 64
# All others are read in the background, for one part of the time in this many: at 4 it is a quarter of one core, and
# about 100 to 200 MiB/s where the file is in memory. At 2, a job that needs both cores of a small machine would notice.
_SHARE_OF_TIME = 4
# The first of a dataset are taken without pauses while no job reads: most datasets on a laptop have all of theirs after a
# second or two. Twice as much would be a core for some seconds more, whenever a large dataset is opened.
_EAGER_BYTES = 1 << 30
# Datasets that are read again within a second or two at the next start leave no files in the index folder.
_MIN_KEPT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A dataset whose checksums are to be taken, unless it is gone by then."""

    location: str
    storage: weakref.ref[LocalStorage]


class ChecksumTaker:
    """One thread that takes checksums for all datasets of a daemon."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Idle.

        Args:
            sidecars: of any kind: checksums lie in the same places, but never beside a shard.
        """
        self._sidecars = sidecars.sibling(CHECKSUMS_SUFFIX)
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, location: str, storage: LocalStorage) -> None:
        """Take the checksums of a dataset that was just opened: of a small one now, else in the background."""
        num_bytes = sum(shard.size_bytes for shard in storage.shards)
        if num_bytes <= _AT_ONCE_BYTES and len(storage.shards) <= _AT_ONCE_SHARDS:
            self._take_all(_Waiting(location, weakref.ref(storage)), _no_pause)
            return
        self._waiting.put(_Waiting(location, weakref.ref(storage)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gyre-checksums", daemon=True)
            self._thread.start()

    def take(self, location: str, storage: LocalStorage, shard: int) -> Checksums | None:
        """The checksums of one shard, at once, kept for later daemons; None where it is no longer what was listed.

        Raises:
            OSError: it cannot be read.
        """
        checksums = checksums_as_listed(storage.path(shard), storage.shards[shard], lambda _: not self._closing.is_set())
        if checksums is not None:
            storage.checksums.add(shard, checksums)
            self._save(location, storage, shard, checksums)
        return checksums

    def keep(self, location: str, storage: LocalStorage, shard: int) -> None:
        """Keep the checksums of one shard for later daemons; where there are none, take them.

        Raises:
            OSError: it cannot be read.
        """
        known = storage.checksums.known.get(shard)
        if known is None:
            self.take(location, storage, shard)
        else:
            self._save(location, storage, shard, known)

    def stored(self, location: str, storage: LocalStorage, shard: int) -> tuple[Checksums, bool] | None:
        """What was kept of a shard, and whether it was as listed then; None for nothing."""
        key = _key(location, storage, shard)
        arrays = self._sidecars.load_outdated(key, None)
        if arrays is None or _NAME not in arrays:
            return None
        return arrays[_NAME], self._sidecars.load_now(key, None) is not None

    def close(self) -> None:
        """Take no more."""
        self._closing.set()
        self._waiting.put(None)
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) and not self._closing.is_set():
            self._take_all(waiting, _Pace(waiting.storage, self._closing).go_on)

    def _take_all(self, waiting: _Waiting, go_on: Callable[[int], bool]) -> None:
        """Of all shards that have none; a shard that cannot be read has none."""
        for shard in range(_num_shards(waiting)):
            storage = waiting.storage()
            if storage is None or self._closing.is_set():
                return
            if shard not in storage.checksums.known and not self._load(waiting.location, storage, shard):
                self._take_quietly(waiting.location, storage, shard, go_on)

    def _load(self, location: str, storage: LocalStorage, shard: int) -> bool:
        arrays = self._sidecars.load_now(_key(location, storage, shard), None)
        if arrays is not None:
            storage.checksums.add(shard, arrays[_NAME])
        return shard in storage.checksums.known

    def _take_quietly(self, location: str, storage: LocalStorage, shard: int, go_on: Callable[[int], bool]) -> None:
        try:
            listed, stays = storage.shards[shard], storage.fits_into_memory
            checksums = checksums_as_listed(storage.path(shard), listed, go_on, stays_in_memory=stays)
        except OSError:
            return
        if checksums is not None:
            storage.checksums.add(shard, checksums)
            if sum(each.size_bytes for each in storage.shards) >= _MIN_KEPT_BYTES:
                self._save(location, storage, shard, checksums)

    def _save(self, location: str, storage: LocalStorage, shard: int, checksums: Checksums) -> None:
        """Keep them; where there is no room, the next daemon takes them again."""
        try:
            self._sidecars.save_now(_key(location, storage, shard), None, {_NAME: checksums})
        except Overloaded:
            return


class _Pace:
    """Lets the others work most of the time."""

    def __init__(self, storage: weakref.ref[LocalStorage], closing: threading.Event) -> None:
        self._storage = storage
        self._closing = closing
        self._num_bytes = 0
        self._resumed = time.monotonic()

    def go_on(self, num_bytes: int) -> bool:
        """So much more was read: wait as it is due, and say whether anybody still wants the rest."""
        self._num_bytes += num_bytes
        if not (self._num_bytes <= _EAGER_BYTES and self._is_idle):
            self._closing.wait((time.monotonic() - self._resumed) * (_SHARE_OF_TIME - 1))
        self._resumed = time.monotonic()
        return not self._closing.is_set()

    @property
    def _is_idle(self) -> bool:
        storage = self._storage()
        return storage is not None and storage.is_idle


def _no_pause(_: int) -> bool:
    return True


def _num_shards(waiting: _Waiting) -> int:
    storage = waiting.storage()
    return len(storage.shards) if storage else 0


def _key(location: str, storage: LocalStorage, shard: int) -> SidecarKey:
    listed = storage.shards[shard]
    return SidecarKey(location, listed.name, listed.size_bytes, listed.version, _KIND)
