"""Blocks: runs of successive samples of one shard that one range request brings. Pure arithmetic on arrays.

A table is a list of *runs*. All blocks of a run have the same number of samples, but for its last, which has what is left. So a
shard of samples of one size is one run, however many blocks it has; where samples differ in size, each block is a run.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MAX_TABLES = 8

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Which samples each block of a dataset has. No block is empty, and no sample is in two.

    Attributes:
        regular_size: samples of a block that is not its run's last.
        first_block: int64 [R + 1], the first block of each run, and the number of all blocks.
        first: int64 [R + 1], the first sample of each run, and the number of all samples.
    """

    regular_size: int
    first_block: _Integers
    first: _Integers

    @property
    def num_blocks(self) -> int:
        """Of the dataset."""
        return int(self.first_block[-1])

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.first[-1])

    def block_of(self, sample_ids: _Integers) -> _Integers:
        """The block of each sample."""
        run = np.searchsorted(self.first, sample_ids, side="right") - 1
        last = self.first_block[run + 1] - 1
        blocks: _Integers = np.minimum(self.first_block[run] + (sample_ids - self.first[run]) // self.regular_size, last)
        return blocks

    def first_sample(self, blocks: _Integers) -> _Integers:
        """The first sample of each block; the block `num_blocks`, which there is not, begins at N."""
        run = np.searchsorted(self.first_block, blocks, side="right") - 1
        return self.first[run] + (blocks - self.first_block[run]) * self.regular_size

    def sizes(self, blocks: _Integers) -> _Integers:
        """How many samples each block has."""
        return self.first_sample(blocks + 1) - self.first_sample(blocks)

    def irregular(self) -> _Integers:
        """The blocks whose size is not the regular one, ascending: at most one of each run."""
        last = self.first_block[1:] - 1
        irregular: _Integers = last[self.sizes(last) != self.regular_size]
        return irregular


class BlockTables:
    """The tables of a dataset by the size of their blocks; the last few are kept, and each is one object."""

    def __init__(self, make: Callable[[int], BlockTable]) -> None:
        self._make = make
        self._kept: dict[int, BlockTable] = {}

    def of(self, io_block_bytes: int) -> BlockTable:
        """The table whose blocks are about so long."""
        table = self._kept.get(io_block_bytes)
        if table is None:
            if len(self._kept) >= _MAX_TABLES:
                del self._kept[next(iter(self._kept))]
            table = self._kept[io_block_bytes] = self._make(io_block_bytes)
        return table


def blocks_of_equal_samples(num_samples: _Integers, stride_bytes: int, io_block_bytes: int) -> BlockTable:
    """Blocks of shards whose samples begin every `stride_bytes`; a shard's last block is half to one and a half of the others.

    Args:
        num_samples: int64 [S], of each shard.
        stride_bytes: from one sample to the next.
        io_block_bytes: the size that blocks should have.
    """
    size = max(1, io_block_bytes // stride_bytes)
    counts = num_samples[num_samples > 0]
    num_blocks = np.maximum(1, (counts + size // 2) // size)
    return BlockTable(size, _cumulated(num_blocks), _cumulated(counts))


def blocks_of_unequal_samples(shard: _Integers, start: _Integers, stop: _Integers, io_block_bytes: int) -> BlockTable:
    """Blocks of samples that lie one after the other in each shard; those of a shard are about equally long.

    Args:
        shard: int64 [N], ascending.
        start: int64 [N], first byte of each sample, ascending within a shard.
        stop: int64 [N], the byte after its last.
        io_block_bytes: the size that blocks should have.
    """
    of_shard = np.flatnonzero(np.diff(shard, prepend=-1))  # first sample of each shard
    counts = np.diff(of_shard, append=len(shard))
    begin, end = start[of_shard], np.maximum.reduceat(stop, of_shard)
    num_bytes = np.maximum(end - begin, 1)
    piece_bytes = -(-num_bytes // np.maximum(1, (num_bytes + io_block_bytes // 2) // io_block_bytes))
    last_piece = (num_bytes - 1) // piece_bytes  # an empty sample at the shard's end makes no piece of its own
    piece = np.minimum((start - np.repeat(begin, counts)) // np.repeat(piece_bytes, counts), np.repeat(last_piece, counts))
    new = np.diff(piece, prepend=-1) != 0
    new[of_shard] = True
    first = np.append(np.flatnonzero(new), len(shard)).astype(np.int64)
    return BlockTable(max(1, len(shard) // (len(first) - 1)), np.arange(len(first)), first)


def _cumulated(counts: _Integers) -> _Integers:
    return np.concatenate(([0], np.cumsum(counts)))
