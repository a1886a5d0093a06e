"""The seam: what a dataset needs of any storage."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt


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
class Reads:
    """n reads as arrays: no object per sample.

    Read i puts the bytes `[start[i], start[i] + size[i])` of shard `shard[i]` at address `target[i]`. The memory there is
    writable. Reads of one sample follow each other in the order of their
    starts, and a storage may bring them with one request.

    Attributes:
        shard: int64 [n].
        start: int64 [n].
        size: int64 [n], in bytes.
        target: uint64 [n], addresses.
        sample: int64 [n], equal for reads of one sample.
        memory: what owns the targets: it must live until the last byte is there, even where nobody waits for it any more.
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    target: npt.NDArray[np.uint64]
    sample: npt.NDArray[np.int64]
    memory: tuple[object, ...]

    def __len__(self) -> int:
        """The number of reads."""
        return len(self.shard)

    def part(self, which: slice) -> "Reads":
        """Some of the reads; a view."""
        return Reads(
            self.shard[which], self.start[which], self.size[which], self.target[which], self.sample[which], self.memory
        )

    @classmethod
    def into(cls, memory: npt.NDArray[np.uint8], shard: int, start: int) -> "Reads":
        """One read that fills `memory` from a shard; the caller keeps the memory."""
        return cls(
            np.array([shard], np.int64),
            np.array([start], np.int64),
            np.array([memory.nbytes], np.int64),
            np.array([memory.ctypes.data], np.uint64),
            np.zeros(1, np.int64),
            (memory,),
        )

    @classmethod
    def concatenate(cls, parts: "Sequence[Reads]") -> "Reads":
        """All reads of several, in their order; samples stay apart."""
        base, samples = 0, []
        for part in parts:
            samples.append(part.sample + base)
            base += int(part.sample[-1]) + 1 if len(part) else 0
        return cls(
            np.concatenate([part.shard for part in parts]),
            np.concatenate([part.start for part in parts]),
            np.concatenate([part.size for part in parts]),
            np.concatenate([part.target for part in parts]),
            np.concatenate(samples),
            tuple(owner for part in parts for owner in part.memory),
        )


class Storage(Protocol):
    """The shards of one dataset. Used from one event loop.

    Every method raises ShardMissing, NotAllowed or StorageUnavailable after its own retries, and CorruptSample where a shard
    is shorter than the read or has changed since it was listed; each names the shard. An error may come as the first member of
    an exception group.
    """

    shards: Sequence[Shard]

    @property
    def reads_in_bulk(self) -> bool:
        """Whether the reads of several batches are better done together: true where each costs next to nothing by itself."""

    async def read(self, reads: Reads) -> None:
        """Do all reads, in any order; all are in flight at once, within the storage's bounds."""

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """The whole shard from its beginning, in chunks of some MiB."""

    def local_path(self, shard: int) -> Path | None:
        """Where the shard lies on this machine's disk, if it does."""
