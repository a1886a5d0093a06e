"""The index of samples with lists whose numbers are cast. Pure.

A list of other numbers takes other bytes in a batch than in its shard. Nothing else changes.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gyre_daemon.datasets.formats.base import Extents, FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.indexes.bounds import located_bounds
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkedIndex, SomeChunks
from gyre_daemon.order.shuffle.blocks import BlockTable
from gyre_daemon.order.shuffle.permutation import Int64Array


def with_casts(index: SampleIndex, fields: Sequence[FieldSpec]) -> SampleIndex:
    """The index, where lists have the dtypes of these fields; itself if no list is cast."""
    pairs = zip(stored_fields(index.fields), stored_fields(fields), strict=True)
    if not any(old.ragged and new.ragged and old.dtype != new.dtype for old, new in pairs):
        return index
    if isinstance(index, ChunkedIndex):
        return CastChunks(index, fields)
    return CastLists(index, fields)


class CastLists(SampleIndex):
    """A `SampleIndex` of the same samples as another one."""

    def __init__(self, index: SampleIndex, fields: Sequence[FieldSpec]) -> None:
        """Note the sizes of numbers.

        Args:
            index: of the samples as they are stored.
            fields: the same ones, renamed and cast.
        """
        self._index, self._fields = index, fields
        pairs = list(zip(stored_fields(index.fields), stored_fields(fields), strict=True))
        is_list = [old.ragged and new.ragged for old, new in pairs]
        before, after = (
            np.array([spec.dtype.itemsize for spec in its], np.int64)
            for its in zip(*pairs, strict=True)
        )
        self._before, self._after = np.where(is_list, before, 1), np.where(is_list, after, 1)
        self._bounds = located_bounds(self)

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return self._index.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`: renamed and cast."""
        return self._fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        extents = self._index.locate(sample_ids)
        return replace(extents, lengths=extents.tensor_bytes // self._before * self._after)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the other index."""
        return self._index.blocks(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`: the fingerprint also covers the fields."""
        return self._index.digest()


class CastChunks(CastLists, SomeChunks):
    """The same, of rows of chunks."""

    def __init__(self, index: ChunkedIndex, fields: Sequence[FieldSpec]) -> None:
        """Take all chunks; see `CastLists`."""
        CastLists.__init__(self, index, fields)
        SomeChunks.__init__(self, index, np.arange(index.num_chunks))
