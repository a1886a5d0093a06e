"""Samples as transforms make them: their lengths, and the records that the node's cache keeps.

[Note: How transformed samples are cached] The step `cache` cuts a chain in two. The transforms
before it draw no random numbers, so their output for a sample is the same for every seed, epoch and
job. This output is a record, and all records form one large made shard (`datasets.made_shards`):
reading from it runs the transforms. The node's cache is in front of it. A block of the cache is one
record if all records have one size, else a few consecutive records. The transforms behind the step
read their samples there, as from a dataset; where none follows, batches are read there.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.formats import (
    Extents,
    FieldSpec,
    SampleIndex,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.sample_table import column_of_all, located_bounds
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.permutation import (
    BlockTable,
    Int64Array,
    blocks_of_equal_samples,
    blocks_that_begin_at,
    kept_tables,
)
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.shard import Shard
from gyre_daemon.transforms.recipes import Step

STEP = "cache"
# No order has blocks of this size, so it can stand for the blocks of the cache.
RECORD_BLOCKS = 1
# Records of different sizes that begin within this many bytes are one block. Each block takes whole
# pages and separate entries in the cache, so single documents are too small. With larger
# blocks, first batches wait for records of later ones. Blocks grow with the dataset, because the
# cache keeps some arrays of all of them.
_BLOCK_BYTES, _MAX_BLOCKS = 64 << 10, 1 << 17
Lengths = npt.NDArray[np.int32]


class MeasuredIndex(SampleIndex):
    """A `SampleIndex` of transformed samples: it knows their lengths, and no place in storage.

    Attributes:
        lengths: int32 [N, R], the elements of each ragged output field.
    """

    def __init__(
        self,
        source: SampleIndex,
        source_fields: Sequence[FieldSpec],
        made: Sequence[FieldSpec],
        passed: Sequence[FieldSpec],
        lengths: Lengths,
    ) -> None:
        """Look at no sample yet.

        Args:
            source: the samples as they are stored.
            source_fields: theirs.
            made: the fields that transforms make.
            passed: the fields that stay as they are.
            lengths: of the ragged ones of `made`.
        """
        self._source, self._fields, self.lengths = source, [*made, *passed], lengths
        self._made_ragged = [place for place, spec in enumerate(made) if spec.ragged]
        self._element_bytes = np.array([spec.element_bytes for spec in made], np.int64)
        names = [spec.name for spec in stored_fields(source_fields)]
        self._passed = [names.index(spec.name) for spec in stored_fields(passed)]
        self._passed_bytes = np.array(  # of those that are not ragged; -1 for the others
            [-1 if spec.ragged else spec.element_bytes for spec in stored_fields(passed)], np.int64
        )
        names = [spec.name for spec in indexed_fields(source_fields)]
        self._indexed = [names.index(spec.name) for spec in indexed_fields(passed)]
        self._bounds = located_bounds(self)

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        return self._fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        """The bytes of the fields; where they are stored is known to the other index alone."""
        found = self._source.locate(sample_ids)
        elements = np.ones((len(sample_ids), len(self._element_bytes)), np.int64)
        elements[:, self._made_ragged] = self.lengths[sample_ids]
        passed = found.tensor_bytes[:, self._passed]
        passed = np.where(self._passed_bytes < 0, passed, self._passed_bytes)
        sizes = np.hstack((elements * self._element_bytes, passed))
        indexed = tuple(found.indexed[column] for column in self._indexed)
        return Extents(found.shard, np.zeros_like(sizes), sizes, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the stored samples, so that orders are the same."""
        return self._source.blocks(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`: of the stored samples where nothing was measured."""
        if not self.lengths.shape[1]:
            return self._source.digest()
        digest = hashlib.blake2b(b"measured" + self._source.digest(), digest_size=16)
        digest.update(self.lengths.astype("<i4").data)
        return digest.digest()


class RecordIndex(SampleIndex):
    """A `SampleIndex` of the records of one dataset, back to back in one shard.

    Attributes:
        starts: int64 [N + 1], where each begins, and the end of the last.
    """

    def __init__(
        self,
        sized: SampleIndex,
        fields: Sequence[FieldSpec],
        left_out: Int64Array = NO_SAMPLES,
    ) -> None:
        """Lay out the records.

        Args:
            sized: the samples as they are made, with the sizes of the fields.
            fields: of the records.
            left_out: int64 [L], samples that are never read. Where sizes differ, their records are
                empty, so that they need not be made.
        """
        self._sized, self._fields = sized, fields
        self._differ = any(spec.ragged for spec in fields)
        self._left_out = left_out if self._differ else NO_SAMPLES
        self.starts = self._find_starts()
        self._bounds = located_bounds(self)
        self._records = kept_tables(self._cut)

    @property
    def num_samples(self) -> int:
        return self._sized.num_samples

    @property
    def fields(self) -> Sequence[FieldSpec]:
        return self._fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        found = self._sized.locate(sample_ids)
        size = self._without_left_out(sample_ids, found.size)
        start = self.starts[sample_ids][:, None] + np.cumsum(size, axis=1) - size
        return Extents(np.zeros(len(sample_ids), np.int64), start, size, indexed=found.indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples) if self._differ else 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the stored samples, so that orders are the same."""
        if io_block_bytes == RECORD_BLOCKS:
            return self._records(io_block_bytes)
        return self._sized.blocks(io_block_bytes)

    def digest(self) -> bytes:
        return b"records" + self._sized.digest() + self._left_out.astype("<i8").tobytes()

    def _without_left_out(self, sample_ids: Int64Array, size: Int64Array) -> Int64Array:
        if not len(self._left_out):
            return size
        return np.where(np.isin(sample_ids, self._left_out)[:, None], 0, size)

    def _find_starts(self) -> Int64Array:
        if not self._differ:
            record = sum(spec.element_bytes for spec in stored_fields(self._fields))
            return np.arange(self.num_samples + 1, dtype=np.int64) * record
        ids = np.arange(self.num_samples)
        sizes = column_of_all(self._sized, ids, lambda found: found.size.sum(axis=1))
        sizes[self._left_out] = 0
        return np.concatenate(([0], np.cumsum(sizes)))

    def _cut(self, size: int) -> BlockTable:
        """The blocks of the cache; none is without bytes, unless all records are."""
        if not self._differ:
            return blocks_of_equal_samples(np.array([self.num_samples]), size, size)
        last_byte = max(int(self.starts[-1]) - 1, 0)
        block_bytes = max(_BLOCK_BYTES, last_byte // _MAX_BLOCKS + 1)
        block = np.minimum(self.starts[:-1], last_byte) // block_bytes
        begins = np.diff(block, prepend=-1, append=block[-1:] + 1)
        return blocks_that_begin_at(np.flatnonzero(begins))


def cut(steps: Sequence[Step], random: Sequence[int], drawing: Sequence[str] = ()) -> int:
    """The place of the step `cache`; -1 if there is none.

    Args:
        steps: of a chain.
        random: the places of those that may draw random numbers.
        drawing: the transforms that did so before the chain, of sources of a mixture.

    Raises:
        ConfigError: the transforms before it cannot be cached.
    """
    places = [place for place, step in enumerate(steps) if step.name == STEP]
    if not places:
        return -1
    first = places[0]
    where = f"transforms[{first}] ({STEP})"
    if len(places) > 1:
        raise ConfigError(f"transforms[{places[1]}] is a second `{STEP}`; a chain has one at most")
    if not first:
        raise ConfigError(f"{where} is the first transform, so there is nothing to cache")
    if drawing:
        raise ConfigError(
            f"{where} is behind {drawing[0]} of a source, which draws random numbers: every epoch "
            f"has others, so it would be cached in vain. Put `{STEP}` into the transforms of the "
            "sources, before those that draw."
        )
    before = [place for place in random if place < first]
    if before:
        raise ConfigError(
            f"{where} is behind transforms[{before[0]}] ({steps[before[0]].name}), which draws "
            "random numbers: every epoch has others, so it would be cached in vain. Put "
            f"`{STEP}` before it."
        )
    return first


def as_records(made: Sequence[FieldSpec], passed: Sequence[FieldSpec]) -> list[FieldSpec]:
    """The fields of records: those that transforms make, and those that pass."""
    return [
        *made,
        *(replace(each, codec="bytes", forms=(), default=b"") for each in stored_fields(passed)),
        *indexed_fields(passed),
    ]


def record_shard(index: RecordIndex, source: Dataset, recipe: bytes) -> Shard:
    """The shard of all records, whose version changes with all that they are made of."""
    digest = hashlib.blake2b(recipe, digest_size=16)
    digest.update(source.fingerprint.encode() + index.digest())
    for shard in source.shards:
        digest.update(f"{shard.name} {shard.version}\n".encode())
    is_known = all(shard.version for shard in source.shards)
    num_bytes = int(index.starts[-1])
    return Shard("transformed samples", num_bytes, digest.hexdigest() if is_known else "")


# Takes the samples as the transforms before `cache` make them, the index of their records, and the
# shard of these; returns the storage of that shard, behind the cache.
Keep = Callable[["Dataset", RecordIndex, Shard], Storage]


def records_of(prefix: Dataset, index: RecordIndex, storage: Storage) -> Dataset:
    """The records of transformed samples as a dataset.

    Args:
        prefix: as transforms make them, with the fields of records.
        index: of the records.
        storage: of the records.
    """
    values = {name: getattr(prefix, name) for name in Dataset.__dataclass_fields__}
    assert prefix.source
    values |= {
        "index": index,
        "storage": storage,
        "chosen": prefix.fields,
        "made": prefix.fields[: prefix.num_made],
        "failed": np.setdiff1d(prefix.corrupt, prefix.source.corrupt),
    }
    return Dataset(**values)
