"""The seam: what a dataset needs of any storage."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Shard:
    """One file or object of a dataset, as listed when the dataset was opened.

    Attributes:
        name: relative to the dataset's root, so that a mirror elsewhere has the same names.
        size_bytes: its length.
        version: etag, or modification time in ns; changes when the shard does.
    """

    name: str
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Read:
    """One request: the bytes `[start, start + sum of the targets' lengths)` of a shard, scattered over the targets in order.

    The targets are writable and belong to the caller; the storage fills them and keeps none.
    """

    shard: int
    start: int
    targets: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """Length of the range."""
        return sum(target.nbytes for target in self.targets)


class Storage(Protocol):
    """The shards of one dataset. Used from one event loop.

    Every method raises ShardMissing, NotAllowed or StorageUnavailable after its own retries, and CorruptSample where a shard
    is shorter than the read or has changed since it was listed; each names the shard.
    """

    shards: Sequence[Shard]

    async def read(self, reads: Sequence[Read], arrived: Callable[[Sequence[int]], None]) -> None:
        """Fill all targets, in any order.

        Args:
            reads: what to read; all are in flight at once, within the storage's bounds.
            arrived: called on the event loop with the indices of reads that are complete, each index once.
        """

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """The whole shard from its beginning, in chunks of some MiB."""

    def local_path(self, shard: int) -> Path | None:
        """Where the shard lies on this machine's disk, if it does."""

    async def close(self) -> None:
        """Drop connections and descriptors."""
