"""Samples that the node's cache keeps as the first transforms of a chain make them.

[Note: How transformed samples are cached] The step `cache` cuts a chain in two. The transforms
before it draw no random numbers, so their output for a sample is the same for every seed, epoch and
job. This output is a record, and all records form one large virtual shard: reading from it runs the
transforms. The node's cache is in front of it. A block of the cache is one record if all records
have one size, else a few consecutive records. So memory, disk, eviction by next use and counters
are those of any cached shard. The transforms behind the step read their samples there, as from a
dataset; where none follows, batches are read there.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

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
from gyre_daemon.datasets.formats.sample_table import located_bounds
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.block_order import (
    BlockTable,
    BlockTables,
    blocks_of_equal_samples,
    blocks_that_begin_at,
)
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.shard import Shard
from gyre_daemon.transforms.messages import Step

STEP = "cache"
# No order has blocks of this size, so it can stand for the blocks of the cache.
RECORD_BLOCKS = 1
# Records of different sizes that begin within this many bytes are one block. Each block takes whole
# pages and separate entries in the cache, so single documents are too small. With larger
# blocks, first batches wait for records of later ones. Blocks grow with the dataset, because the
# cache keeps some arrays of all of them.
_BLOCK_BYTES, _MAX_BLOCKS = 64 << 10, 1 << 17
_AT_ONCE = 1 << 16  # samples whose sizes are looked up together


class RecordIndex:
    """A `SampleIndex` of the records of one dataset.

    Attributes:
        starts: int64 [N + 1], where each begins, and the end of the last.
    """

    def __init__(
        self,
        source: Dataset,
        fields: Sequence[FieldSpec],
        sized: SampleIndex | None = None,
        left_out: Int64Array = NO_SAMPLES,
    ) -> None:
        """Lay out the records.

        Args:
            source: the samples as they are stored.
            fields: of the records.
            sized: knows their sizes; None where all records have one size.
            left_out: int64 [L], samples that are never read. Where sizes differ, their records are
                empty, so that they need not be made.
        """
        self.fields = fields
        self._source, self._sized, self._left_out = source.index, sized, left_out
        self._sizes = np.array([spec.element_bytes for spec in stored_fields(fields)], np.int64)
        self.starts = self._find_starts()
        self._bounds = located_bounds(self)
        names = [spec.name for spec in indexed_fields(source.fields)]
        self._indexed = [names.index(spec.name) for spec in indexed_fields(fields)]
        self._records = BlockTables(self._cut)

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return self._source.num_samples

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        size = self._sizes_of(sample_ids)
        start = self.starts[sample_ids][:, None] + np.cumsum(size, axis=1) - size
        indexed: tuple[np.ndarray[tuple[int, ...], np.dtype[np.generic]], ...] = ()
        if self._indexed:
            values = self._source.locate(sample_ids).indexed
            indexed = tuple(values[column] for column in self._indexed)
        return Extents(np.zeros(len(sample_ids), np.int64), start, size, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples) if self._sized else 0

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the stored samples, so that orders are the same."""
        if io_block_bytes == RECORD_BLOCKS:
            return self._records.of(io_block_bytes)
        return self._source.blocks(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        left_out = self._left_out.astype("<i8").tobytes() if self._sized else b""
        return b"records" + (self._sized or self._source).digest() + left_out

    def _sizes_of(self, sample_ids: Int64Array) -> Int64Array:
        """Int64 [n, F], the bytes of each field without an index."""
        if self._sized:
            sizes = self._sized.locate(sample_ids).tensor_bytes
            return np.where(np.isin(sample_ids, self._left_out)[:, None], 0, sizes)
        return np.broadcast_to(self._sizes, (len(sample_ids), len(self._sizes)))

    def _find_starts(self) -> Int64Array:
        sizes = [np.zeros(1, np.int64)]
        for begin in range(0, self.num_samples, _AT_ONCE):
            ids = np.arange(begin, min(begin + _AT_ONCE, self.num_samples))
            sizes.append(self._sizes_of(ids).sum(axis=1))
        return np.cumsum(np.concatenate(sizes))

    def _cut(self, size: int) -> BlockTable:
        """The blocks of the cache; none is without bytes, unless all records are."""
        if not self._sized:
            return blocks_of_equal_samples(np.array([self.num_samples]), size, size)
        last_byte = max(int(self.starts[-1]) - 1, 0)
        block_bytes = max(_BLOCK_BYTES, last_byte // _MAX_BLOCKS + 1)
        block = np.minimum(self.starts[:-1], last_byte) // block_bytes
        begins = np.diff(block, prepend=-1, append=block[-1:] + 1)
        return blocks_that_begin_at(np.flatnonzero(begins))


class Held(Protocol):
    """Records that were made before the cache could take them; each is handed out once."""

    def ids(self) -> Int64Array:
        """Int64, the samples whose records are held, ascending."""

    def hand_over(self, sample_ids: Iterable[int]) -> None:
        """Give back the memory of records that the cache is about to take."""

    def take(self, sample_id: int) -> npt.NDArray[np.uint8] | None:
        """A record, which is held no longer; None if it is not there."""

    def release(self) -> None:
        """Hold nothing any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDataset(Dataset):
    """A dataset whose samples are records that the cache keeps.

    Attributes:
        source: the samples as they are stored.
        made: the fields that transforms made, which come first; empty where those behind it, or a
            mixture, do not ask.
        failed: int64 [C], the samples that could not be transformed and that others replace.
    """

    source: Dataset
    made: Sequence[FieldSpec] = ()
    failed: Int64Array = field(default_factory=lambda: NO_SAMPLES, repr=False)

    @property
    def stored(self) -> Dataset:
        """See `Dataset.stored`."""
        return self.source.stored

    @property
    def num_made(self) -> int:
        """See `Dataset.num_made`."""
        return len(self.made)


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


def kept(prefix: Dataset, source: Dataset, recipe: bytes, keep: Keep) -> KeptDataset:
    """The samples that the transforms before `cache` make, as a dataset.

    Args:
        prefix: as these transforms make them, with the fields of records.
        source: the samples as they are stored.
        recipe: of these transforms.
        keep: makes the storage.
    """
    differ = any(spec.ragged for spec in prefix.fields)
    sized = prefix.sized if differ else None
    index = RecordIndex(source, prefix.fields, sized, prefix.corrupt)
    shard = record_shard(index, source, recipe)
    found = kept_as(source, prefix, index, keep(prefix, index, shard))
    return replace(
        found,
        transform_names=(*prefix.transform_names, STEP),
        made=prefix.fields[: prefix.num_made],
        failed=np.setdiff1d(prefix.corrupt, source.corrupt),
    )


def kept_as(source: Dataset, prefix: Dataset, index: RecordIndex, storage: Storage) -> KeptDataset:
    """The same, with the storage of its records."""
    values = {name: getattr(prefix, name) for name in Dataset.__dataclass_fields__}
    values |= {"index": index, "storage": storage, "chosen": prefix.fields}
    return KeptDataset(**values, source=source)
