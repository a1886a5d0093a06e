"""The local shards that are open and mapped. The operating system bounds both, so those that were used last are kept."""

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre_daemon.copiers import NO_COPIERS, Copiers, new_key
from gyre_daemon.errors import GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.limits import descriptor_shares
from gyre_daemon.storage.base import Shard, changed

_MIN_OPEN = 2  # of one dataset, however many there are


@dataclass(slots=True)
class OpenShard:
    """A shard that is open and mapped, for as long as anybody refers to it.

    Attributes:
        key: its name among the files that copiers have.
        listed: what it was when the dataset was opened.
        path: where it lay then.
        descriptor: of the file, which this object owns.
        mapping: of the whole file.
        address: of its first byte.
        unmoved: links and time of change of the file when it was seen at its path: a rename or a deletion changes them.
        copiers: told when nobody needs it any more.
        is_sound: no read of it has failed yet.
    """

    key: int
    listed: Shard
    path: Path
    descriptor: int
    mapping: mmap.mmap
    address: int
    unmoved: tuple[int, int]
    copiers: Copiers
    is_sound: bool = True

    def __del__(self) -> None:
        """Close the file; the mapping goes with its last reference."""
        os.close(self.descriptor)
        self.copiers.forget(self.key)

    def check_unchanged(self) -> None:
        """Whether the file is still what was listed, and lies where it lay.

        One that was deleted or replaced can still be read here. But in the next process it could not, and of a dataset that is
        no longer there its owner should hear.

        Raises:
            ShardMissing: it was deleted.
            CorruptSample: it was written to, truncated or replaced.
            NotAllowed, StorageUnavailable: nobody can tell.
        """
        found = _checked(self.listed, self.descriptor)
        if _links(found) != self.unmoved:
            at_path = _checked(self.listed, self.path)
            if not os.path.samestat(found, at_path):
                raise changed(self.listed.name)
            self.unmoved = _links(found)


class OpenFiles:
    """The datasets of a daemon, which divide among them how many shards may be open."""

    def __init__(self) -> None:
        self._datasets: weakref.WeakSet[OpenShards] = weakref.WeakSet()
        self._max_open = _MIN_OPEN

    @property
    def share(self) -> int:
        """So many shards each dataset may have open."""
        return max(_MIN_OPEN, self._max_open // max(1, len(self._datasets)))

    def add(self, dataset: "OpenShards") -> None:
        """One more dataset: the others close what they have beyond their share."""
        self._max_open = descriptor_shares().shards
        self._datasets.add(dataset)
        for other in list(self._datasets):
            other.trim()


class OpenShards:
    """Opens shards when they are needed; safe for several threads."""

    def __init__(
        self,
        paths: Sequence[Path],
        shards: Sequence[Shard],
        copiers: Copiers = NO_COPIERS,
        together: OpenFiles | None = None,
    ) -> None:
        """None is open.

        Args:
            paths: of the shards.
            shards: as listed.
            copiers: told of files that are closed.
            together: what these shards share with other datasets; None to have all to themselves.
        """
        self._paths = paths
        self._copiers = copiers
        self._shards = shards
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._lock = threading.Lock()
        self._together = together or OpenFiles()
        self._together.add(self)

    @property
    def max_open(self) -> int:
        """So many may be open; beyond that those close that were not used for longest."""
        return self._together.share

    def trim(self) -> None:
        """Close what is beyond that."""
        with self._lock:
            self._trim()

    def get(self, shard: int) -> OpenShard:
        """An open shard; the caller keeps it while it reads.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be opened.
            CorruptSample: it is not what was listed.
        """
        with self._lock:
            found = self._open.get(shard)
            if found:
                self._open.move_to_end(shard)
                return found
        opened = _open(self._paths[shard], self._shards[shard], self._copiers)
        with self._lock:
            opened = self._open.setdefault(shard, opened)  # another thread may have been faster
            self._trim()
        return opened

    def _trim(self) -> None:
        while len(self._open) > self.max_open:
            self._open.popitem(last=False)


def file_error(name: str, error: OSError) -> GyreError:
    """What an operating system's error about a shard means."""
    facts = {"shard": name}
    if isinstance(error, FileNotFoundError):
        return ShardMissing(f"shard {name} does not exist; restore it or correct the dataset's URI", facts)
    if isinstance(error, PermissionError):
        return NotAllowed(f"the daemon may not read shard {name}; grant its user read access", facts)
    return StorageUnavailable(f"shard {name} cannot be read: {error.strerror or error}", facts)


def _open(path: Path, listed: Shard, copiers: Copiers) -> OpenShard:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    except OSError as error:
        raise file_error(listed.name, error) from error
    try:
        unmoved = _links(_checked(listed, descriptor))
        mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        mapping.madvise(mmap.MADV_RANDOM)  # a missed page may bring MiB around it otherwise: `readahead` says what is wanted
    except OSError as error:
        os.close(descriptor)
        raise file_error(listed.name, error) from error
    except GyreError:
        os.close(descriptor)
        raise
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    return OpenShard(new_key(), listed, path, descriptor, mapping, address, unmoved, copiers)


def _checked(listed: Shard, file: Path | int) -> os.stat_result:
    """What the system says of a file that has the size and the version that were listed."""
    try:
        stat = os.stat(file)  # noqa: PTH116  (of a descriptor too)
    except OSError as error:
        raise file_error(listed.name, error) from error
    if (stat.st_size, str(stat.st_mtime_ns)) != (listed.size_bytes, listed.version):
        raise changed(listed.name)
    return stat


def _links(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_nlink, stat.st_ctime_ns
