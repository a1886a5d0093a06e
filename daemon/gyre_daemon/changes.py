"""What became of a dataset's shards since they were last indexed."""

from typing import Literal

import numpy as np

from gyre_daemon.cache import ChecksumTaker
from gyre_daemon.dataset import Dataset
from gyre_daemon.storage import Checksums, LocalStorage, Shard, Storage, file_error

# indexed: for the first time; kept: what it was; restored: touched or put back, with the bytes that it had; changed: it
# has other bytes, or may have, since no checksums of the earlier ones were taken.
Change = Literal["indexed", "kept", "restored", "changed"]


class ShardChanges:
    """Compares the shards of a dataset that is indexed again with what is known of them. Used from threads that may wait."""

    def __init__(self, location: str, storage: Storage, before: Dataset | None, checksums: ChecksumTaker) -> None:
        """Know what was.

        Args:
            location: of the dataset.
            storage: its shards as they are listed now.
            before: the dataset as it was open until now, if it was.
            checksums: has those of earlier daemons.
        """
        self._location = location
        self._storage = storage
        self._before = before
        self._checksums = checksums
        shards = before.storage.shards if before else ()
        self._numbers = {shard.name: number for number, shard in enumerate(shards)}

    def of(self, shard: int, was_indexed: bool, is_fresh: bool) -> Change:
        """What became of a shard; one on this machine's disk whose times moved is read whole.

        Args:
            shard: its number.
            was_indexed: there is a sidecar of it, of whichever version.
            is_fresh: that sidecar is of the version that was listed, or there is nothing to scan.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        then, listed = self._then(shard), self._storage.shards[shard]
        if not isinstance(self._storage, LocalStorage):
            return "kept" if was_indexed and is_fresh else "changed" if was_indexed else "indexed"
        stored = self._checksums.stored(self._location, self._storage, shard)
        if (then and _is_same(then, listed)) or (was_indexed and is_fresh) or (stored and stored[1]):
            return "kept"
        known = self._known_before(shard)
        known = stored[0] if known is None and stored else known
        if known is None:
            return "changed" if then or was_indexed else "indexed"
        return self._compared(self._storage, shard, known)

    def _then(self, shard: int) -> Shard | None:
        """The shard as the dataset had it that was open."""
        number = self._numbers.get(self._storage.shards[shard].name)
        return self._before.storage.shards[number] if self._before and number is not None else None

    def _known_before(self, shard: int) -> Checksums | None:
        """Its checksums as the dataset had them that was open."""
        number = self._numbers.get(self._storage.shards[shard].name)
        if self._before and number is not None and isinstance(self._before.storage, LocalStorage):
            return self._before.storage.checksums.known.get(number)
        return None

    def _compared(self, storage: LocalStorage, shard: int, known: Checksums) -> Change:
        try:
            now = self._checksums.take(self._location, storage, shard)
        except OSError as error:
            raise file_error(storage.shards[shard].name, error) from error
        return "restored" if now is not None and np.array_equal(now, known) else "changed"


def _is_same(one: Shard, other: Shard) -> bool:
    return (one.size_bytes, one.version) == (other.size_bytes, other.version)
