"""Blocks: runs of successive samples of one shard that one range request reads.

A table of blocks is a list of *runs*. All blocks of a run have the same number of samples, except
its last, which has the rest. So a shard of samples of one size is one run, however many blocks it
has; where samples differ in size, each block is a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.shuffle.permutation import Int64Array

# Sessions and caches ask for a few block sizes again and again. A table takes up to 16 bytes per
# block, so keeping many costs memory; with fewer, a busy node would make the same tables again.
_MAX_TABLES = 8


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Which samples each block of a dataset has. No block is empty, and no sample is in two.

    Attributes:
        regular_size: samples of each block but the last of its run.
        first_block: int64 [R + 1], the first block of each run, and the number of all blocks.
        first: int64 [R + 1], the first sample of each run, and the number of all samples.
    """

    regular_size: int
    first_block: Int64Array
    first: Int64Array

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the dataset."""
        return int(self.first_block[-1])

    @property
    def num_samples(self) -> int:
        """N."""
        return int(self.first[-1])

    def block_of(self, sample_ids: Int64Array) -> Int64Array:
        """The block of each sample; both int64 [n]."""
        run = np.searchsorted(self.first, sample_ids, side="right") - 1
        block = self.first_block[run] + (sample_ids - self.first[run]) // self.regular_size
        blocks: Int64Array = np.minimum(block, self.first_block[run + 1] - 1)
        return blocks

    def first_sample(self, blocks: Int64Array) -> Int64Array:
        """The first sample of each block; for the number `num_blocks`, N."""
        run = np.searchsorted(self.first_block, blocks, side="right") - 1
        return self.first[run] + (blocks - self.first_block[run]) * self.regular_size

    def sizes(self, blocks: Int64Array) -> Int64Array:
        """The number of samples of each block."""
        return self.first_sample(blocks + 1) - self.first_sample(blocks)

    def irregular(self) -> Int64Array:
        """The blocks whose size is not the regular one, ascending: at most one of each run."""
        last = self.first_block[1:] - 1
        irregular: Int64Array = last[self.sizes(last) != self.regular_size]
        return irregular

    def of_first(self, num_samples: int) -> "BlockTable":
        """The blocks of the first samples, with the same numbers.

        Raises:
            InvalidRequest: no shard ends there.
        """
        if num_samples == self.num_samples:
            return self
        run = int(np.searchsorted(self.first, num_samples))
        if self.first[run] != num_samples:
            raise InvalidRequest(
                f"no shard of the dataset ends with its first {num_samples} samples"
            )
        return BlockTable(self.regular_size, self.first_block[: run + 1], self.first[: run + 1])


class BlockIndex(Protocol):
    """The facts about a dataset that an order needs."""

    @property
    def num_samples(self) -> int:
        """N."""

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """The samples cut into blocks of about `io_block_bytes`, each within one shard."""


class BlockTables:
    """The tables of a dataset by block size; the last few are kept."""

    def __init__(self, make: Callable[[int], BlockTable]) -> None:
        self._make = make
        self._kept: dict[int, BlockTable] = {}

    def of(self, io_block_bytes: int) -> BlockTable:
        """The table of blocks of about this size; the same object while it is kept."""
        table = self._kept.get(io_block_bytes)
        if table is None:
            if len(self._kept) >= _MAX_TABLES:
                del self._kept[next(iter(self._kept))]
            table = self._kept[io_block_bytes] = self._make(io_block_bytes)
        return table


def blocks_of_equal_samples(
    num_samples: Int64Array, stride_bytes: int, io_block_bytes: int
) -> BlockTable:
    """Blocks of shards whose samples begin every `stride_bytes`.

    A shard's last block has half to one and a half times the size of the others.

    Args:
        num_samples: int64 [S], of each shard.
        stride_bytes: from one sample to the next.
        io_block_bytes: the size that blocks should have.
    """
    size = max(1, io_block_bytes // stride_bytes)
    counts = num_samples[num_samples > 0]
    num_blocks = np.maximum(1, (counts + size // 2) // size)
    return BlockTable(size, _cumulated(num_blocks), _cumulated(counts))


def blocks_of_unequal_samples(
    shard: Int64Array, start: Int64Array, stop: Int64Array, io_block_bytes: int
) -> BlockTable:
    """Blocks of consecutive samples in each shard.

    The blocks of one shard have about the same number of bytes.

    Args:
        shard: int64 [N], ascending.
        start: int64 [N], first byte of each sample, ascending within a shard.
        stop: int64 [N], the byte after its last.
        io_block_bytes: the size that blocks should have.
    """
    shard_first = np.flatnonzero(np.diff(shard, prepend=-1))  # first sample of each shard
    counts = np.diff(shard_first, append=len(shard))
    begin, end = start[shard_first], np.maximum.reduceat(stop, shard_first)
    num_bytes = np.maximum(end - begin, 1)
    num_pieces = np.maximum(1, (num_bytes + io_block_bytes // 2) // io_block_bytes)
    piece_bytes = -(-num_bytes // num_pieces)
    last_piece = (num_bytes - 1) // piece_bytes
    piece = (start - np.repeat(begin, counts)) // np.repeat(piece_bytes, counts)
    # an empty sample at the end of a shard makes no piece
    piece = np.minimum(piece, np.repeat(last_piece, counts))
    is_first = np.diff(piece, prepend=-1) != 0
    is_first[shard_first] = True
    first = np.append(np.flatnonzero(is_first), len(shard)).astype(np.int64)
    return BlockTable(max(1, len(shard) // (len(first) - 1)), np.arange(len(first)), first)


def blocks_that_begin_at(first: Int64Array) -> BlockTable:
    """Blocks of any size.

    Args:
        first: int64 [B + 1], the first sample of each, and the number of all samples.
    """
    sizes, counts = np.unique(np.diff(first), return_counts=True)
    regular = int(sizes[counts.argmax()]) if len(sizes) else 1
    return BlockTable(regular, np.arange(len(first)), first)


def _cumulated(counts: Int64Array) -> Int64Array:
    return np.concatenate(([0], np.cumsum(counts)))
