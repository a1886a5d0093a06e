"""The lengths that a chain of transforms gives to the samples of a dataset. Pure."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats import Extents, FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.sample_table import located_bounds
from gyre_daemon.order.block_order import BlockTable
from gyre_daemon.order.permutation import Int64Array

Lengths = npt.NDArray[np.int32]


class MeasuredIndex(SampleIndex):
    """A `SampleIndex` of transformed samples: it knows their lengths, and no place in storage.

    Attributes:
        lengths: int32 [N, R], the elements of each ragged output field.
    """

    def __init__(
        self,
        source: SampleIndex,
        stored: Sequence[FieldSpec],
        made: Sequence[FieldSpec],
        passed: Sequence[FieldSpec],
        lengths: Lengths,
    ) -> None:
        """Look at no sample yet.

        Args:
            source: the samples as they are stored.
            stored: the fields read from these.
            made: the fields that transforms make.
            passed: the fields that stay as they are.
            lengths: of the ragged ones of `made`.
        """
        self._source, self._fields, self.lengths = source, [*made, *passed], lengths
        self._made_ragged = [place for place, spec in enumerate(made) if spec.ragged]
        self._element_bytes = np.array([spec.element_bytes for spec in made], np.int64)
        names = [spec.name for spec in stored]
        self._passed = [names.index(spec.name) for spec in stored_fields(passed)]
        self._bounds = located_bounds(self)

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return self._source.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`."""
        return self._fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        """The bytes of the fields; where they are stored is known to the other index alone."""
        found = self._source.locate(sample_ids)
        elements = np.ones((len(sample_ids), len(self._element_bytes)), np.int64)
        elements[:, self._made_ragged] = self.lengths[sample_ids]
        sizes = np.hstack((elements * self._element_bytes, found.tensor_bytes[:, self._passed]))
        return Extents(found.shard, np.zeros_like(sizes), sizes, indexed=found.indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the stored samples."""
        return self._source.blocks(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        digest = hashlib.blake2b(b"measured" + self._source.digest(), digest_size=16)
        digest.update(self.lengths.astype("<i4").data)
        return digest.digest()
