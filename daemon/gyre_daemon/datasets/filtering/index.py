"""The index of the samples that a filter leaves."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from gyre_protos.text import counted

from gyre_daemon.datasets.filtering.expression import Filter
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex
from gyre_daemon.datasets.formats.field_spec import Extents
from gyre_daemon.datasets.formats.indexes.chunk_index import chunks_of
from gyre_daemon.datasets.formats.indexes.table import located_bounds
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.shuffle.blocks import BlockTable, BlockTables, blocks_that_begin_at
from gyre_daemon.order.shuffle.permutation import Int64Array

_AT_ONCE = 1 << 16  # samples looked at together


def apply_filter(
    index: SampleIndex, fields: Sequence[FieldSpec], text: str
) -> tuple[SampleIndex, Int64Array]:
    """The index of the samples that a filter leaves, and their ids without it, in rising order.

    It looks at all samples. The index is itself where all are left.

    Args:
        index: of all samples.
        fields: its fields, under the names that the filter uses.
        text: the filter.

    Raises:
        ConfigError: the filter does not fit the index, or leaves none.
    """
    passes = Filter(text, index.fields, [spec.name for spec in fields])
    parts = []
    for begin in range(0, index.num_samples, _AT_ONCE):
        ids = np.arange(begin, min(begin + _AT_ONCE, index.num_samples))
        parts.append(ids[passes(index.locate(ids))])
    kept = np.concatenate(parts)
    if not len(kept):
        raise ConfigError(
            f"the filter {text!r:.200} leaves none of {counted(index.num_samples, 'sample')}"
        )
    if len(kept) == index.num_samples:
        return index, kept
    return Filtered(index, kept, drops_chunks=True), kept


def numbered(sample_ids: Int64Array, kept: Int64Array) -> Int64Array:
    """The ids that samples have among those that are left; both in rising order."""
    at = np.minimum(np.searchsorted(kept, sample_ids), len(kept) - 1)
    ids: Int64Array = at[kept[at] == sample_ids]
    return ids


class Filtered(SampleIndex):
    """A `SampleIndex` of M samples of another one."""

    def __init__(self, index: SampleIndex, kept: Int64Array, *, drops_chunks: bool) -> None:
        """Keep which samples they are.

        Args:
            index: of all samples.
            kept: int64 [M], ids in rising order; at least one.
            drops_chunks: whether decoded shards lack the chunks without any of them.
        """
        self._index, self._kept, self.chunks = index, kept, None
        chunks = chunks_of(index) if drops_chunks else None
        if chunks:
            chosen = np.unique(index.blocks(0).block_of(kept))
            self.chunks = chunks.some(chosen)
            self._moved = self.chunks.base - chunks.base[chosen]
        self._bounds = located_bounds(self)
        self._blocks = BlockTables(self._make_blocks)

    @property
    def unfiltered(self) -> SampleIndex:
        """The index of all samples."""
        return self._index

    def stored_ids(self, sample_ids: Int64Array) -> Int64Array:
        """The ids that samples have there."""
        return self._kept[sample_ids]

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return len(self._kept)

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`."""
        return self._index.fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        extents = self._index.locate(self._kept[sample_ids])
        if not self.chunks:
            return extents
        moved = self._moved[self.blocks(0).block_of(sample_ids)]
        return replace(extents, start=extents.start + moved[:, None])

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the other index that have any sample left."""
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        digest = hashlib.blake2b(b"filtered" + self._index.digest(), digest_size=16)
        digest.update(self._kept.astype("<i8").data)
        return digest.digest()

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        table = self._index.blocks(io_block_bytes)
        first = table.first_sample(np.arange(table.num_blocks + 1))
        return blocks_that_begin_at(np.unique(np.searchsorted(self._kept, first)))
