"""An index of samples of any size: one row of numbers for each sample.

Formats whose samples are at regular distances compute their index instead (see `tokens`).
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    Extents,
    FieldSpec,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.indexes.bounds import RaggedBounds
from gyre_daemon.order.shuffle.blocks import BlockTable, BlockTables, blocks_of_unequal_samples
from gyre_daemon.order.shuffle.permutation import Int64Array


class SampleTable:
    """A `SampleIndex` that takes 16 bytes for each sample and stored field."""

    def __init__(
        self,
        fields: Sequence[FieldSpec],
        samples_per_shard: Sequence[int],
        start: Int64Array,
        size: Int64Array,
        *,
        identity: bytes,
        lengths: Mapping[int, Int64Array] | None = None,
        absent: npt.NDArray[np.bool_] | None = None,
        indexed: Sequence[npt.NDArray[np.generic]] = (),
    ) -> None:
        """Keep the tables, without a copy.

        Args:
            fields: F stored ones, then the indexed ones.
            samples_per_shard: how many of the N samples each shard has.
            start: int64 [N, F], first byte of each field in its shard.
            size: int64 [N, F], stored bytes of each field.
            identity: of the meaning of the bytes; the digest covers it and the tables.
            lengths: by field, int64 [N], the bytes that it takes in its ragged tensor if they are
                not `size`.
            absent: bool [N, F], which samples lack which fields; None if none may.
            indexed: for each indexed field its values, [N, *shape].
        """
        assert len(indexed) == len(indexed_fields(fields))
        self.fields = fields
        self.num_samples = len(start)
        self._first = np.concatenate(([0], np.cumsum(samples_per_shard))).astype(np.int64)
        self._start, self._size = start, size
        self._lengths, self._absent, self._indexed = lengths or {}, absent, indexed
        self._blocks = BlockTables(self._make_blocks)
        is_ragged = [spec.ragged for spec in stored_fields(fields)]
        self._bounds = RaggedBounds(lambda: size[:, is_ragged].sum(axis=1))
        digest = hashlib.blake2b(identity, digest_size=16)
        for table in (start, size, *self._lengths.values(), *indexed):
            digest.update(table.tobytes())
        self._digest = digest.digest()

    @classmethod
    def of_ranges(
        cls, field: FieldSpec, inspected: Sequence[Arrays], identity: bytes
    ) -> "SampleTable":
        """The index of samples of one field, from the arrays `start` and `size` of each shard."""
        nothing = np.empty(0, np.int64)
        start, size = (
            np.concatenate([nothing, *(scan[name] for scan in inspected)])[:, None]
            for name in ("start", "size")
        )
        counts = [len(scan["size"]) for scan in inspected]
        return cls([field], counts, start, size, identity=identity)

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        shard = np.searchsorted(self._first, sample_ids, side="right") - 1
        size = self._size[sample_ids]
        lengths = size.copy() if self._lengths else None
        for field, its in self._lengths.items():
            lengths[:, field] = its[sample_ids]  # type: ignore[index]  # there are some
        absent = None if self._absent is None else self._absent[sample_ids]
        indexed = tuple(values[sample_ids] for values in self._indexed)
        return Extents(shard, self._start[sample_ids], size, lengths, absent, indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: 16 bytes per block, made in one pass over all samples."""
        return self._blocks.of(io_block_bytes)

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        shard = np.repeat(np.arange(len(self._first) - 1), np.diff(self._first))
        start, stop = self._start.min(axis=1), (self._start + self._size).max(axis=1)
        return blocks_of_unequal_samples(shard, start, stop, io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._digest
