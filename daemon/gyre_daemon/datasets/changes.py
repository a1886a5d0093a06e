"""What became of a dataset's shards since they were last indexed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gyre_daemon.datasets.checksum_taker import ChecksumTaker
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.local.checksums import Checksums
from gyre_daemon.storage.local.local import LocalStorage
from gyre_daemon.storage.local.openfiles import file_error
from gyre_daemon.storage.shard import Shard

# indexed: for the first time; kept: what it was; restored: touched or put back, with the bytes that it had; changed: it
# has other bytes, or may have, since no checksums of the earlier ones were taken.
Change = Literal["indexed", "kept", "restored", "changed"]


_SUFFIX = ".gyre-dataset"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a dataset from before it is indexed again.

    Attributes:
        shards: as they were listed, by name.
        checksums: of some of them, by name.
        fingerprint: of the dataset; empty where nobody knows.
    """

    shards: Mapping[str, Shard]
    checksums: Mapping[str, Checksums]
    fingerprint: str


class DatasetRecords:
    """What the last index of each dataset found, for the next, whichever daemon makes it. Waits for the disk."""

    def __init__(self, sidecars: SidecarStore) -> None:
        self._sidecars = sidecars.sibling(_SUFFIX)

    def load(self, name: str, location: str, before: Dataset | None) -> Known:
        """What is known of a dataset: as it was open until now, or else as it was last indexed."""
        if before:
            storage = before.storage
            taken = storage.checksums.known if isinstance(storage, LocalStorage) else {}
            named = {storage.shards[number].name: checksums for number, checksums in taken.items()}
            return Known({shard.name: shard for shard in storage.shards}, named, before.fingerprint)
        arrays = self._sidecars.load_now(_key(name, location), None)
        if arrays is None:
            return Known({}, {}, "")
        shards = [Shard(*each) for each in json.loads(arrays["shards"].tobytes())]
        return Known({shard.name: shard for shard in shards}, {}, arrays["fingerprint"].tobytes().decode())

    def save(self, name: str, location: str, shards: Sequence[Shard], fingerprint: str) -> None:
        """Keep what was found.

        Raises:
            Overloaded: there is no room.
        """
        listed = json.dumps([(shard.name, shard.size_bytes, shard.version) for shard in shards]).encode()
        arrays = {"shards": np.frombuffer(listed, np.uint8), "fingerprint": np.frombuffer(fingerprint.encode(), np.uint8)}
        self._sidecars.save_now(_key(name, location), None, arrays)


def _key(name: str, location: str) -> SidecarKey:
    return SidecarKey(location, name, 0, "", "dataset/1")


class ShardChanges:
    """Compares the shards of a dataset that is indexed again with what is known of them. Used from threads that may wait."""

    def __init__(self, location: str, storage: Storage, known: Known, checksums: ChecksumTaker) -> None:
        """Know what was.

        Args:
            location: of the dataset.
            storage: its shards as they are listed now.
            known: of the dataset from before.
            checksums: has those of earlier daemons.
        """
        self._location = location
        self._storage = storage
        self._known = known
        self._checksums = checksums

    def of(self, shard: int, was_indexed: bool, is_fresh: bool) -> Change:
        """What became of a shard; one on this machine's disk whose times moved is read whole.

        Args:
            shard: its number.
            was_indexed: there is a sidecar of it, of whichever version.
            is_fresh: that sidecar is of the version that was listed, or there is nothing to scan.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        listed = self._storage.shards[shard]
        then = self._known.shards.get(listed.name)
        if not isinstance(self._storage, LocalStorage):
            return "kept" if was_indexed and is_fresh else "changed" if was_indexed else "indexed"
        stored = self._checksums.stored(self._location, self._storage, shard)
        if then == listed or (was_indexed and is_fresh) or (stored and stored[1]):
            return "kept"
        known = self._known.checksums.get(listed.name)
        known = stored[0] if known is None and stored else known
        if known is None:
            return "changed" if then or was_indexed else "indexed"
        return self._compared(self._storage, shard, known)

    def _compared(self, storage: LocalStorage, shard: int, known: Checksums) -> Change:
        try:
            now = self._checksums.take(self._location, storage, shard)
        except OSError as error:
            raise file_error(storage.shards[shard].name, error) from error
        return "restored" if now is not None and np.array_equal(now, known) else "changed"
