"""An index of samples of one size at regular distances: a few bytes for each shard."""

from collections.abc import Sequence

import numpy as np

from gyre_daemon.datasets.formats.base import Extents, FieldSpec
from gyre_daemon.order.shuffle.blocks import BlockTable, BlockTables, blocks_of_equal_samples
from gyre_daemon.order.shuffle.permutation import Int64Array


class StridedIndex:
    """A `SampleIndex` that computes the place of a sample."""

    def __init__(
        self,
        field: FieldSpec,
        start: Sequence[int],
        counts: Int64Array,
        *,
        stride_bytes: int,
        identity: bytes,
    ) -> None:
        """Describe all shards.

        Args:
            field: the one field; it is not ragged.
            start: of each shard, the first byte of its first sample.
            counts: int64, how many samples each shard has.
            stride_bytes: from one sample to the next.
            identity: of the meaning of the bytes; the digest covers it and `start`.
        """
        self.fields = (field,)
        self._sample_bytes = field.element_bytes
        self._stride_bytes = stride_bytes
        self._start = np.array(start, np.int64)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self.num_samples = int(self._first[-1])
        self._identity = identity
        self._blocks = BlockTables(
            lambda block_bytes: blocks_of_equal_samples(counts, stride_bytes, block_bytes)
        )

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        if len(self._first) > 2:
            shard = np.searchsorted(self._first, sample_ids, side="right") - 1
            start = (sample_ids - self._first[shard]) * self._stride_bytes + self._start[shard]
        else:  # a single shard needs no search, which would be most of the time here
            shard = np.broadcast_to(np.int64(0), len(sample_ids))
            start = sample_ids * self._stride_bytes + self._start[0]
        size = np.broadcast_to(np.int64(self._sample_bytes), (len(sample_ids), 1))
        return Extents(shard, start[:, None], size)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`; no field is ragged."""
        return 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`; the table takes a few bytes per shard."""
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        starts = b" " + self._start.astype("<i8").tobytes() if self._start.any() else b""
        return self._identity + starts
