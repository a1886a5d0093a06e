"""Where the blocks of a dataset lie, so that a read finds its own. Pure arithmetic on arrays."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.base import Reads

Integers = npt.NDArray[np.int64]

_PAGE_BYTES = 4096
_BEYOND = 1 << 62  # no shard is this long


@dataclass(frozen=True)
class BlockMap:
    """The M blocks of a dataset: ranges of shards, in their order.

    A read that begins in a block, before the next one begins, belongs to it.

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
        """Blocks of which some may be empty, with any start."""
        start, stop = start.copy(), stop.copy()
        for block in reversed(np.flatnonzero(start >= stop).tolist()):
            # An empty block is where the next one begins, or beyond all of its shard.
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
        """int64 [M + 1]: where each block begins in a file with all of them, and the file's end.

        Every block begins on a page.
        """
        pages = -(-self.sizes() // _PAGE_BYTES)
        return np.concatenate(([0], np.cumsum(pages))) * _PAGE_BYTES

    def blocks_of(self, reads: Reads) -> Integers:
        """int64 [n], the block that contains each read; -1 where none contains all of it."""
        if not self.num_blocks:
            return np.full(len(reads), -1, np.int64)
        begins, length = self._line
        where = reads.shard * length + np.minimum(reads.start, length - 2)
        blocks = np.searchsorted(begins, where, side="right") - 1
        is_inside = reads.start + reads.size <= self.stop[blocks]
        return np.where((self.shard[blocks] == reads.shard) & is_inside & (blocks >= 0), blocks, -1)

    @cached_property
    def _line(self) -> tuple[Integers, int]:
        """Where blocks begin if all shards lie in one line, and the length of each shard there."""
        length = int(self.stop[self.stop < _BEYOND].max(initial=0)) + 2
        return self.shard * length + np.minimum(self.start, length - 1), length

    def digest(self) -> bytes:
        """Changes whenever a block moves."""
        ranges = np.stack((self.shard, self.start, self.stop))
        return hashlib.blake2b(ranges.tobytes(), digest_size=16).digest()
