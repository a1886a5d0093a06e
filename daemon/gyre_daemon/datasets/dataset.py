"""An open dataset: its shards, its index, its fingerprint, and the lengths of its samples."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.sample_table import column_of_all
from gyre_daemon.datasets.packing import Packed
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance, CostRule, Float64Array, LengthsOf
from gyre_daemon.order.mixture import Mixture
from gyre_daemon.order.permutation import BlockIndex, BlockTable, Int64Array
from gyre_daemon.order.planner import NO_SAMPLES, Order
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.shard import Shard

_T = TypeVar("_T")


async def _unknown(fingerprint: str) -> str:
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """An open dataset, from which sessions read.

    Attributes:
        name: the operator's name for it.
        format: the name of its format.
        uri: where it is, without credentials.
        storage: its shards.
        shards: as they are stored, or unpacked; `storage` may have them decoded.
        index: its samples.
        fingerprint: hexadecimal; equal for equal data, wherever it is.
        corrupt: int64 [C], ids of the samples that others replace, in rising order.
        chosen: the fields, where they may differ from those of the index: the operator renames or
            casts some, or all samples have one length; None for those of the index.
        num_left_out: samples that the operator's filter leaves out; nothing else counts them.
        grows: whether shards may be added at its end while jobs go through it (`append`).
        packed: of a packed dataset, whose samples are sequences of documents: the index
            is that of the documents.
        transforms: tells its transforms from any others; empty for nothing.
        transform_names: of its transforms.
        drawing: the names of transforms that made what its storage reads and may draw random
            numbers, where it is a mixture or a source of one: then reads need `Draws`.
        mixture: of a mixture, whose index has the samples of all sources.
        source_names: of the datasets of a mixture, by the numbers of its field `source`.
        source: the samples as they are stored, where these are made of them; None for stored ones.
        made: the fields that transforms made, which come first.
        failed: int64, ids of the samples that could not be transformed and that others replace.
        what_changed: takes an earlier fingerprint, and says how the shards differ from those that
            had it; empty if that is not known.
    """

    name: str
    format: str
    uri: str
    storage: Storage
    shards: Sequence[Shard]
    index: SampleIndex
    fingerprint: str
    corrupt: npt.NDArray[np.int64] = field(default_factory=lambda: NO_SAMPLES, repr=False)
    chosen: Sequence[FieldSpec] | None = None
    num_left_out: int = 0
    grows: bool = False
    packed: Packed | None = None
    transforms: str = ""
    transform_names: tuple[str, ...] = ()
    drawing: tuple[str, ...] = ()
    mixture: Mixture | None = None
    source_names: tuple[str, ...] = ()
    source: "Dataset | None" = field(default=None, repr=False)
    made: Sequence[FieldSpec] = ()
    failed: npt.NDArray[np.int64] = field(default_factory=lambda: NO_SAMPLES, repr=False)
    what_changed: Callable[[str], Awaitable[str]] = field(default=_unknown, repr=False)

    @property
    def num_samples(self) -> int:
        """N, the number of samples of an epoch."""
        return self.ordered.num_samples

    @property
    def ordered(self) -> BlockIndex:
        """The items of an order: the samples of the index, packed sequences, or a mixture."""
        return self.mixture or self.packed or self.index

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """The tensors of a sample."""
        if self.packed:
            return self.packed.fields
        return self.index.fields if self.chosen is None else self.chosen

    @property
    def served(self) -> Sequence[FieldSpec]:
        """The tensors of a sample, as batches have them; see `FieldSpec.served`."""
        return [spec.served for spec in self.fields]

    @property
    def sized(self) -> SampleIndex:
        """The index that knows the length of every ragged field of a sample."""
        return self.index

    @property
    def num_made(self) -> int:
        """How many of the fields transforms make; these come first."""
        return len(self.made)

    @property
    def stored(self) -> "Dataset":
        """Its samples as they are stored; itself where nothing is done to them."""
        return self.source.stored if self.source else self

    @property
    def has_equal_samples(self) -> bool:
        """Whether no field is ragged, so that all batches of one size have one layout."""
        return not any(spec.ragged for spec in self.served)

    @property
    def is_read_in_groups(self) -> bool:
        """Whether several small batches are best read together."""
        return self.storage.is_node_local

    @property
    def num_bytes(self) -> int:
        """The size of all shards together."""
        return sum(shard.size_bytes for shard in self.shards)


class Memo(Generic[_T]):
    """The last few results by key, each with its origin."""

    def __init__(self, most: int) -> None:
        """Keep nothing yet, and at most this many."""
        self._most = most
        self._kept: dict[Hashable, tuple[tuple[object, ...], _T]] = {}

    def get(self, key: Hashable, *origin: object) -> _T | None:
        """The result for a key that came from this; None if there is none."""
        found = self._kept.get(key)
        if found is None or found[0] != origin:
            return None
        self._kept[key] = self._kept.pop(key)
        return found[1]

    def latest(self, key: Hashable) -> _T | None:
        """The last result for a key, whatever it came from."""
        return self._kept[key][1] if key in self._kept else None

    def keep(self, result: _T, key: Hashable, *origin: object) -> _T:
        """Keep a result, in place of an earlier one for its key; returns it."""
        self._kept.pop(key, None)
        self._kept[key] = origin, result
        if len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return result

    def __iter__(self) -> Iterator[_T]:
        """All results that are kept."""
        return (result for _, result in self._kept.values())

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()


class Prefix(Struct, frozen=True):
    """The first shards of a dataset, as a dataset of their own.

    Attributes:
        num_samples: of these shards.
        fingerprint: of these shards.
        fields: of their samples.
    """

    num_samples: int
    fingerprint: str
    fields: Sequence[FieldSpec]


class BlockRanges(Struct, frozen=True):
    """The range request of each of n blocks: bytes `[start, stop)` of a shard, int64 [n]."""

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]


def block_ranges(
    index: SampleIndex, table: BlockTable, blocks: npt.NDArray[np.int64]
) -> BlockRanges:
    """The smallest ranges that have every field of every sample of each block.

    Args:
        index: of the samples, stored in their shard in the order of their ids.
        table: from `index.blocks`.
        blocks: int64 [n].
    """
    first = index.locate(table.first_sample(blocks))
    last = index.locate(table.first_sample(blocks + 1) - 1)
    return BlockRanges(first.shard, first.start.min(axis=1), (last.start + last.size).max(axis=1))


def shard_bounds(index: SampleIndex, num_shards: int) -> npt.NDArray[np.int64]:
    """Int64 [S + 1]: the first sample id of each shard, and N; ids follow the order of shards."""
    low = np.zeros(num_shards + 1, np.int64)
    high = np.full(num_shards + 1, index.num_samples)
    wanted = np.arange(num_shards + 1)
    while (low < high).any():
        middle = (low + high) // 2
        inside = np.minimum(middle, index.num_samples - 1)
        is_before = (index.locate(inside).shard < wanted) & (low < high)
        low, high = np.where(is_before, middle + 1, low), np.where(is_before, high, middle)
    return low


def fingerprint(
    shards: Sequence[Shard],
    index: SampleIndex,
    contents: Sequence[bytes],
    corrupt: npt.NDArray[np.int64] = NO_SAMPLES,
    fields: Sequence[FieldSpec] = (),
) -> str:
    """The identity of a dataset's data.

    It covers the shards' relative names and sizes, the place of each sample in them, and some of
    their contents, or all of these where the storage knows digests. Times and etags are left out,
    so that a copy of the data elsewhere has the same fingerprint. It covers which samples are
    replaced, because that changes jobs' data.

    Args:
        shards: in the dataset's order.
        index: of all samples.
        contents: the bytes of `fingerprint_ranges`.
        corrupt: int64 [C], ids of the samples that others replace.
        fields: as the operator wants them, where some are renamed or cast.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([(shard.name, shard.size_bytes) for shard in shards]).encode())
    digest.update(index.digest())
    if any(shard.digest for shard in shards):
        digest.update(json.dumps([shard.digest for shard in shards]).encode())
    for content in contents:
        digest.update(hashlib.blake2b(content, digest_size=16).digest())
    if len(corrupt):
        digest.update(b"replaced" + corrupt.astype("<i8").tobytes())
    if fields:
        named = [(spec.name, spec.dtype.str, spec.codec) for spec in fields]
        digest.update(json.dumps(named).encode())
    return digest.hexdigest()


def fingerprint_ranges(
    shards: Sequence[Shard], max_shards: int = 32, num_bytes: int = 4096
) -> tuple[list[int], list[int], list[int]]:
    """Which contents the fingerprint covers: the middle of evenly chosen shards.

    This tells a regenerated dataset from its predecessor. It does not notice every flipped bit.

    Returns:
        The ranges' shards, first bytes and ends; none is empty.
    """
    step = max(1, -(-len(shards) // max_shards))
    chosen = [shard for shard in range(0, len(shards), step) if shards[shard].size_bytes]
    sizes = [shards[shard].size_bytes for shard in chosen]
    starts = [max(0, (size - num_bytes) // 2) for size in sizes]
    stops = [min(start + num_bytes, size) for start, size in zip(starts, sizes, strict=True)]
    return chosen, starts, stops


def sample_ranges(
    index: SampleIndex, max_samples: int = 32, num_bytes: int = 4096
) -> tuple[list[int], list[int], list[int]]:
    """As `fingerprint_ranges`, for single files: the middle of evenly chosen samples."""
    step = max(1, -(-index.num_samples // max_samples))
    extents = index.locate(np.arange(0, index.num_samples, step))
    start, stop = extents.start.min(axis=1), (extents.start + extents.size).max(axis=1)
    begin = np.maximum(start, (start + stop - num_bytes) // 2)
    end = np.minimum(begin + num_bytes, stop)
    some = end > begin
    shards, begins, ends = (each[some].tolist() for each in (extents.shard, begin, end))
    return shards, begins, ends


_DIFFER = {"balance": "cost differently", "bucket": "can be sorted"}


def balance_of(dataset: Dataset, rule: CostRule) -> Balance:
    """Shares out the global batches of a dataset by the cost of its samples.

    Raises:
        InvalidRequest: the rule names no ragged field of the dataset.
    """
    if packed := dataset.packed:
        if rule.field not in ("", packed.stored.name):
            raise InvalidRequest(
                f"`balance` names the field {rule.field!r:.100}, but the sequences are packed from "
                f"{packed.stored.name!r:.100}; leave the field out"
            )
        return Balance(_sample_costs(packed, rule))
    lengths_of = _ragged_lengths(dataset, rule.field, "balance")
    return Balance(lambda sample_ids: rule.cost(lengths_of(sample_ids)))


def bucket_lengths(dataset: Dataset, order: Order) -> LengthsOf | None:
    """The lengths by which an order makes its batches; None if it has no buckets.

    Raises:
        InvalidRequest: the samples of the dataset have one length, or no such field.
    """
    if order.bucket is None or dataset.mixture:  # which the planner refuses
        return None
    if dataset.packed:
        raise InvalidRequest(
            "`bucket` does not go with `pack`, because all sequences have one length. Leave one of "
            "the two out."
        )
    return _ragged_lengths(dataset, order.bucket.field, "bucket")


def _sample_costs(packed: Packed, rule: CostRule) -> Callable[[Int64Array], Float64Array]:
    sequences = packed.sequences
    costs = rule.cost(sequences.lengths.astype(np.int64))
    return np.add.reduceat(costs, sequences.bounds[:-1]).take


def _ragged_lengths(dataset: Dataset, field: str, argument: str) -> LengthsOf:
    """Looks the lengths of samples up, in elements of a field."""
    index = dataset.sized
    stored = stored_fields(index.fields if dataset.transforms else dataset.fields)
    ragged = [spec.name for spec in stored if spec.ragged]
    if field not in ragged:
        there = f"there are {', '.join(ragged)}" if ragged else "this dataset has none"
        raise InvalidRequest(
            f"`{argument}` names the field {field!r:.100}; only fields whose samples differ in "
            f"length {_DIFFER[argument]}, and {there}"
        )
    column = [spec.name for spec in stored].index(field)
    num_bytes = max(stored[column].element_bytes, 1)

    def lengths_of(sample_ids: Int64Array) -> Int64Array:
        return column_of_all(
            index, sample_ids, lambda found: found.tensor_bytes[:, column] // num_bytes
        )

    return lengths_of
