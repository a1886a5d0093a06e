"""The seam: what a dataset needs of any storage."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gyre_daemon.runtime.fair import NO_JOB, Flow
from gyre_daemon.storage.delays import Delays
from gyre_daemon.storage.shard import Shard, truncated

MAX_GAP_BYTES = 4096  # between two fields of a sample: reading over it is cheaper than another request

NextUse = Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.int64]]


class ArenaClosed(Exception):
    """Nobody waits any more for what would be written there."""


class Region(Protocol):
    """An arena, as far as those who write there must know it.

    Attributes:
        key: its name.
        address: of its first byte.
    """

    @property
    def key(self) -> int:
        """See above."""

    @property
    def address(self) -> int:
        """See above."""

    def lease(self) -> AbstractContextManager[None]:
        """Inside, its memory is there; raises ArenaClosed where it is not."""


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
        arena: that targets lie in. The caller of `read` holds a lease of it while it waits. A thread that writes
            there holds one of its own, since it goes on where the caller is cancelled.
        memory: what owns the targets elsewhere: it must live until the last byte is there, even where nobody waits for it.
        flow: for which job.
        urgency: among the job's reads the lowest goes first.
        block_bytes: the job soon reads what lies around these: a cache fetches blocks of about this size, whole; 0 where it
            does not, and the cache does what is cheapest.
        next_use: given the `block_bytes` of a cache and int64 [m] blocks of that size, in how many samples from now the job
            reads each, int64 [m]; a bound method; None where nobody knows.
        delays: told what the requests took, where there are any.
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    target: npt.NDArray[np.uint64]
    sample: npt.NDArray[np.int64]
    memory: tuple[object, ...]
    flow: Flow = NO_JOB
    urgency: int = 0
    block_bytes: int = 0
    next_use: NextUse | None = None
    delays: Delays | None = None
    arena: Region | None = None

    def __len__(self) -> int:
        """The number of reads."""
        return len(self.shard)

    def part(self, which: slice | npt.NDArray[np.int64]) -> "Reads":
        """Some of the reads; a view where they follow each other."""
        return self._selected(which)

    def lease(self) -> AbstractContextManager[None]:
        """Inside, the memory of all targets is there; raises ArenaClosed where it is not."""
        return self.arena.lease() if self.arena else nullcontext()

    @property
    def are_in_arena(self) -> bool:
        """All targets lie in the arena, and none elsewhere."""
        return self.arena is not None and not self.memory

    def nonempty(self) -> "Reads":
        """Those that bring any byte."""
        some = self.size > 0
        return self if some.all() else self._selected(some)

    def of_shards(self, shards: npt.NDArray[np.int64]) -> "Reads":
        """Those from some shards."""
        return self._selected(np.isin(self.shard, shards))

    def _selected(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice) -> "Reads":
        return replace(
            self,
            shard=self.shard[which],
            start=self.start[which],
            size=self.size[which],
            target=self.target[which],
            sample=self.sample[which],
        )

    @classmethod
    def into(cls, memories: Sequence[npt.NDArray[np.uint8]], shards: Sequence[int], starts: Sequence[int]) -> "Reads":
        """Reads that fill each of several memories from one place each."""
        return cls(
            np.array(shards, np.int64),
            np.array(starts, np.int64),
            np.array([memory.nbytes for memory in memories], np.int64),
            np.array([memory.ctypes.data for memory in memories], np.uint64),
            np.arange(len(memories)),
            tuple(memories),
        )


class Storage(Protocol):
    """The shards of one dataset. Used from one event loop.

    Every method raises ShardMissing, NotAllowed or StorageUnavailable after its own retries, and CorruptSample where a shard
    is shorter than the read, or has changed since it was listed and its storage can tell; each names the shard. An error may
    come as the first member of an exception group.
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


class Bounds:
    """Where the shards of a storage end: an address beyond a mapped file is another's memory."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._sizes = np.array([shard.size_bytes for shard in shards], np.int64)

    def check(self, reads: Reads) -> None:
        """Refuse reads that leave their shards.

        Raises:
            CorruptSample: names the first shard that is too short.
        """
        sizes = self._sizes if len(self._sizes) == 1 else self._sizes[reads.shard]
        outside = ((reads.start | reads.size) < 0) | (reads.start > sizes - reads.size)
        if outside.any():
            sizes = self._sizes[reads.shard]
            first = int(np.argmax(outside))
            start, size = int(reads.start[first]), int(reads.size[first])
            raise truncated(self._shards[int(reads.shard[first])].name, start, start + size, max(0, int(sizes[first]) - start))
