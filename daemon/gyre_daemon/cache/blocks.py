"""Where the blocks of a dataset lie, so that a read finds its own. Pure arithmetic on arrays."""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage import Reads

Integers = npt.NDArray[np.int64]

_PAGE_BYTES = 4096
_BEYOND = 1 << 62


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The M blocks of a dataset: ranges of shards, in their order. What begins in a block before the next begins lies in it.

    Attributes:
        shard: int64 [M], ascending.
        start: int64 [M], ascending within a shard.
        stop: int64 [M].
    """

    shard: Integers
    start: Integers
    stop: Integers

    @classmethod
    def of(cls, shard: Integers, start: Integers, stop: Integers) -> "BlockMap":
        """Blocks some of which may have no byte, and then lie anywhere."""
        start, stop = start.copy(), stop.copy()
        for block in reversed(np.flatnonzero(start >= stop).tolist()):  # where the next one begins, or beyond all
            is_last = block + 1 == len(shard) or shard[block + 1] != shard[block]
            start[block] = stop[block] = _BEYOND if is_last else start[block + 1]
        return cls(shard, start, stop)

    @property
    def num_blocks(self) -> int:
        """M."""
        return len(self.shard)

    def sizes(self) -> Integers:
        """int64 [M], in bytes."""
        return self.stop - self.start

    def offsets(self) -> Integers:
        """int64 [M + 1], where each block lies in a file that has all of them, each from a page's beginning, and its end."""
        pages = -(-self.sizes() // _PAGE_BYTES)
        return np.concatenate(([0], np.cumsum(pages))) * _PAGE_BYTES

    def blocks_of(self, reads: Reads) -> Integers:
        """int64 [n], the block of each read, -1 where none has all of it."""
        blocks = np.full(len(reads), -1, np.int64)
        order = np.argsort(reads.shard, kind="stable")
        touched, begins = np.unique(reads.shard[order], return_index=True)
        for shard, its in zip(touched, np.split(order, begins[1:]), strict=True):
            low, high = np.searchsorted(self.shard, (shard, shard + 1))
            blocks[its] = low - 1 + np.searchsorted(self.start[low:high], reads.start[its], side="right")
            blocks[its[blocks[its] < low]] = -1
        found = blocks >= 0
        beyond = reads.start[found] + reads.size[found] > self.stop[blocks[found]]
        blocks[np.flatnonzero(found)[beyond]] = -1
        return blocks

    def digest(self) -> bytes:
        """Changes whenever a block would have another place."""
        return hashlib.blake2b(np.stack((self.shard, self.start, self.stop)).tobytes(), digest_size=16).digest()
