"""An open dataset: its shards, its index, its fingerprint, the lengths of its samples, its packing.

In a packed dataset, the samples of another one are documents, and a sample is a whole sequence. It
has the documents' storage and index, and other fields. `order.sequences` says which documents share
a sequence; here their lengths come from the index, so nothing is read.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.config import PackConfig
from gyre_daemon.datasets.formats import FieldSpec, SampleIndex, stored_fields
from gyre_daemon.datasets.formats.concat import SOURCE
from gyre_daemon.datasets.formats.sample_table import column_of_all
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance, CostRule, LengthsOf
from gyre_daemon.order.mixture import MixedSource, Mixture
from gyre_daemon.order.permutation import BlockIndex, BlockTable, Int64Array
from gyre_daemon.order.planner import NO_SAMPLES, Order
from gyre_daemon.order.sequences import PACKING_VERSION, PackRule, Sequences, pack_documents
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.shard import Shard

_T = TypeVar("_T")


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
        sources: of a mixture, by name.
        source_names: of the datasets of a mixture, by the numbers of its field `source`.
        source: the samples as they are stored, where these are made of them; None for stored ones.
        made: the fields that transforms made, which come first.
        failed: int64, ids of the samples that could not be transformed and that others replace.
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
    packed: "Packed | None" = None
    transforms: str = ""
    transform_names: tuple[str, ...] = ()
    drawing: tuple[str, ...] = ()
    mixture: Mixture | None = None
    sources: "Mapping[str, Dataset]" = field(default_factory=dict, repr=False)
    source_names: tuple[str, ...] = ()
    source: "Dataset | None" = field(default=None, repr=False)
    made: Sequence[FieldSpec] = ()
    failed: npt.NDArray[np.int64] = field(default_factory=lambda: NO_SAMPLES, repr=False)

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
        keeps_blocks: whether they have the same blocks in the whole dataset. They have others where
            their chunks are decoded only because those of shards behind them must be.
    """

    num_samples: int
    fingerprint: str
    fields: Sequence[FieldSpec]
    keeps_blocks: bool


class BlockRanges(Struct, frozen=True):
    """The range request of each of n blocks: bytes `[start, stop)` of a shard, int64 [n]."""

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]


def block_ranges(
    index: SampleIndex, table: BlockTable, blocks: npt.NDArray[np.int64]
) -> BlockRanges:
    """The smallest ranges that have every field of every sample of each of n blocks, int64 [n].

    The samples are stored in their shard in the order of their ids.
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
        costs = rule.cost(packed.sequences.lengths.astype(np.int64))
        return Balance(np.add.reduceat(costs, packed.sequences.bounds[:-1]).take)
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


# Fields that a packed dataset adds to the packed one.
POSITION, LOSS_MASK = "position", "loss_mask"
DOCUMENT_ID, CU_SEQLENS = "document_id", "cu_seqlens"
_PACKABLE = ("bytes", "ids", "text", "npy")


@dataclass(frozen=True, eq=False)
class Packed:
    """The packing of a dataset.

    Attributes:
        config: the options asked for.
        stored: the field of the documents that is packed, as it is stored.
        column: its number among the stored fields.
        sequences: which documents are in which sequence.
        mask_column: the number of the documents' own loss mask, which a transform made, among the
            stored fields; None where they have none.
        mixed: facts of a mixture's documents; None for those of one dataset.
    """

    config: PackConfig
    stored: FieldSpec
    column: int
    sequences: Sequences
    mask_column: int | None = None
    mixed: "MixedSequences | None" = None

    @property
    def num_samples(self) -> int:
        """P, the number of sequences."""
        return self.sequences.num_samples

    @cached_property
    def read(self) -> dict[int, FieldSpec]:
        """The fields of documents to read, by their numbers."""
        read = {self.column: self.stored}
        if self.mask_column is not None:
            read[self.mask_column] = replace(self.stored, name=LOSS_MASK, dtype=np.dtype(np.bool_))
        return read

    @cached_property
    def fields(self) -> Sequence[FieldSpec]:
        """The tensors of a sample of L tokens; only the first is read."""
        row = (self.config.length,)
        int32, int64 = np.dtype("<i4"), np.dtype("<i8")
        source = [self.mixed.field] if self.mixed else []
        return [
            replace(self.stored, shape=row, ragged=False, length=0),
            FieldSpec(POSITION, int32, row, ragged=False, codec="indexed"),
            FieldSpec(LOSS_MASK, np.dtype(np.bool_), row, ragged=False, codec="indexed"),
            FieldSpec(DOCUMENT_ID, int64, (), ragged=True, codec="indexed"),
            FieldSpec(CU_SEQLENS, int32, (), ragged=True, codec="indexed"),
            *source,
        ]

    def most_parts(self, num_samples: int) -> int:
        """An upper bound of the parts of documents in a batch of so many samples."""
        if self.mixed:  # a small source may come often
            return num_samples * int(np.diff(self.sequences.bounds).max())
        return self.sequences.most_parts(num_samples)

    @property
    def efficiency(self) -> float:
        """The part of all places in sequences that has a token and no padding."""
        return self.sequences.num_tokens / (self.num_samples * self.config.length)

    def blocks(self, io_block_bytes: int) -> NoReturn:
        """See `BlockIndex.blocks`: the documents of a sequence lie all over the dataset."""
        raise InvalidRequest(
            "a packed dataset has no blocks: the documents of a sequence come from all over it. "
            "Use the order `full` or `sequential`."
        )

    def fingerprint(self, documents: str, transforms: str) -> str:
        """The identity of the packed data, from that of its documents and the rule."""
        parts = [
            documents,
            PACKING_VERSION,
            asdict(self.config),
            *([transforms] if transforms else []),
        ]
        said = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def pack(documents: Dataset, config: PackConfig) -> Dataset:
    """The packed sequences of a dataset; waits a quarter of a second for a million documents.

    Raises:
        InvalidRequest: there is no such field, it cannot be packed, or as `pack_documents`.
    """
    index, fields, num_made = documents.sized, documents.fields, documents.num_made
    spec = _field(fields, config)
    column = [each.name for each in stored_fields(fields)].index(spec.name)
    if num_made and column >= num_made:
        raise InvalidRequest(
            f"`pack` names the field {spec.name!r:.100}, which no transform makes; behind "
            "transforms only what they make can be packed"
        )
    mask_column = _mask_column(fields, num_made)

    def lengths_of(ids: Int64Array) -> Int64Array:
        sizes = column_of_all(index, ids, lambda found: found.tensor_bytes[:, column])
        lengths = sizes // spec.dtype.itemsize
        if mask_column is not None:
            masks = column_of_all(index, ids, lambda its: its.tensor_bytes[:, mask_column])
            _check_masks(ids, lengths, masks)
        return lengths

    rule = PackRule(config.length, config.overlong, config.window, config.seed)
    mixed = None
    if documents.mixture:
        names = next(spec.categories for spec in fields if spec.name == SOURCE)
        sequences, mixed = pack_sources(
            documents.mixture, names, lengths_of, rule, documents.corrupt
        )
    else:
        sequences = pack_documents(index.num_samples, lengths_of, rule, documents.corrupt)
    if sequences.begins is not None and spec.codec == "text":
        spec = replace(spec, codec="bytes")  # a cut may go through a character
    packed = Packed(config, spec, column, sequences, mask_column, mixed)
    return replace(
        documents,
        packed=packed,
        mixture=mixed.mixture if mixed else None,
        fingerprint=packed.fingerprint(documents.fingerprint, documents.transforms),
        corrupt=NO_SAMPLES,
        grows=False,  # sequences of the first shards may have later documents too
    )


def _mask_column(fields: Sequence[FieldSpec], num_made: int) -> int | None:
    """Where the documents' own loss mask is among the fields that transforms make."""
    names = [spec.name for spec in stored_fields(fields)]
    if all(spec.name != LOSS_MASK for spec in fields):
        return None
    if LOSS_MASK in names[:num_made]:
        column = names.index(LOSS_MASK)
        spec = stored_fields(fields)[column]
        if spec.ragged and not spec.shape and spec.dtype == np.bool_:
            return column
    raise InvalidRequest(
        f"the samples have a field {LOSS_MASK!r} that is no mask of a transform such as `chat`, "
        "and packed batches have their own. Leave it out with `columns`, or rename it."
    )


def _check_masks(documents: Int64Array, lengths: Int64Array, masks: Int64Array) -> None:
    """Refuse a document whose loss mask has not one value for each token."""
    wrong = np.flatnonzero(lengths != masks)
    if len(wrong):
        raise InvalidRequest(
            f"sample {documents[wrong[0]]} has {lengths[wrong[0]]} tokens and {masks[wrong[0]]} "
            f"values of {LOSS_MASK!r}; only a mask of the same length can be packed with them"
        )


def _field(fields: Sequence[FieldSpec], config: PackConfig) -> FieldSpec:
    known = [_uniform(spec) for spec in stored_fields(fields)]
    named = [spec for spec in known if spec.name == config.field]
    ragged = [spec.name for spec in known if _is_packable(spec)]
    if not named or not _is_packable(named[0]):
        which = f"there are {', '.join(ragged)}" if ragged else "this dataset has none"
        raise InvalidRequest(
            f"`pack` names the field {config.field!r:.100}; only a field of whole numbers whose "
            f"samples differ in length can be packed, and {which}"
        )
    spec = named[0]
    if spec.name in (POSITION, LOSS_MASK, DOCUMENT_ID, CU_SEQLENS):
        raise InvalidRequest(
            f"a packed dataset has its own field {spec.name!r}; give the packed one "
            "another name with `rename`"
        )
    if config.overlong in ("split", "truncate") and spec.codec == "npy":
        raise InvalidRequest(
            f"documents of the field {spec.name!r:.100} are npy files, which cannot be cut; choose "
            "fail or drop as `overlong`"
        )
    limits = np.iinfo(spec.dtype)  # type: ignore[type-var]  # of an integer: see `_is_packable`
    if not limits.min <= config.padding_id <= limits.max:
        raise InvalidRequest(
            f"padding_id is {config.padding_id}, which does not fit into {spec.dtype}, the type of "
            f"{spec.name!r:.100}"
        )
    return spec


def _uniform(spec: FieldSpec) -> FieldSpec:
    """A field as all schemas of the shards store it, where they store it alike."""
    forms = [replace(form, name=spec.name, media_type="", forms=()) for form in spec.forms]
    is_one = forms and all(form == forms[0] for form in forms)
    return replace(forms[0], media_type=spec.media_type) if is_one else spec


def _is_packable(spec: FieldSpec) -> bool:
    is_flat = spec.ragged and not spec.shape and spec.dtype.kind in "iu"
    return is_flat and spec.codec in _PACKABLE and len(spec.forms) <= 1


class MixedSequences(Struct, frozen=True, eq=False):
    """The facts of packed sequences that come from several sources.

    Attributes:
        mixture: of the sequences.
        names: S, of the datasets with documents of their own.
        bounds: int64 [S + 1], the first sequence of each, and P.
    """

    mixture: Mixture
    names: tuple[str, ...]
    bounds: Int64Array

    @property
    def field(self) -> FieldSpec:
        """Of each sequence, the number of its source."""
        int32 = np.dtype("<i4")
        return FieldSpec(SOURCE, int32, (), ragged=False, codec="indexed", categories=self.names)

    def source_of(self, sequences: Int64Array) -> Int64Array:
        """The numbers of the sources of sequences; both int64 [n]."""
        return np.searchsorted(self.bounds, sequences, side="right") - 1


class _Counted(Struct, frozen=True):
    """So many sequences, for an order to go through."""

    num_samples: int

    def blocks(self, io_block_bytes: int) -> NoReturn:
        """See `BlockIndex.blocks`: an order of blocks is refused for the mixture."""
        raise AssertionError


def pack_sources(
    mixture: Mixture,
    names: tuple[str, ...],
    lengths_of: Callable[[Int64Array], Int64Array],
    rule: PackRule,
    left_out: Int64Array,
) -> tuple[Sequences, MixedSequences]:
    """Pack the documents of each source of a mixture.

    Args:
        mixture: of the documents.
        names: S, of the datasets with documents of their own, in the order of the documents.
        lengths_of: see `pack_documents`.
        rule: how.
        left_out: see `pack_documents`.

    Raises:
        InvalidRequest: the documents of a source cannot be packed; names it.
    """
    packed: list[Sequences] = []
    for name, (first, stop) in zip(names, _ranges(mixture, 0), strict=True):
        some = left_out[slice(*np.searchsorted(left_out, (first, stop)))]

        def own_lengths(documents: Int64Array, first: int = first) -> Int64Array:
            return lengths_of(documents + first)

        try:
            its = pack_documents(stop - first, own_lengths, rule, some - first)
        except InvalidRequest as error:
            raise InvalidRequest(f"the source `{name}`: {error}") from error
        packed.append(replace(its, documents=its.documents + first))
    counts = [its.num_samples for its in packed]
    bounds = np.concatenate(([0], np.cumsum(counts)))
    mixed, _ = _mixed(mixture, iter(counts))
    return _joined(packed), MixedSequences(mixed, names, bounds)


def _ranges(mixture: Mixture, first_id: int) -> Iterator[tuple[int, int]]:
    """The documents `[first, stop)` of each dataset with its own documents."""
    for source in mixture.sources:
        begin = first_id + source.first_id
        if isinstance(source.ordered, Mixture):
            yield from _ranges(source.ordered, begin)
        else:
            yield begin, begin + source.ordered.num_samples


def _mixed(mixture: Mixture, counts: Iterator[int]) -> tuple[Mixture, int]:
    """The same mixture, of so many sequences of each dataset, and their number."""
    sources: list[MixedSource] = []
    first_id = 0
    for each in mixture.sources:
        if isinstance(each.ordered, Mixture):
            nested, count = _mixed(each.ordered, counts)
            its = replace(each, ordered=nested)
        else:
            count = next(counts)
            its = replace(each, ordered=_Counted(count))
        sources.append(replace(its, corrupt=NO_SAMPLES, first_id=first_id))
        first_id += count
    return mixture.of(sources), first_id


def _joined(packed: Sequence[Sequences]) -> Sequences:
    """All sequences, source after source."""
    begins = None
    if any(its.begins is not None for its in packed):
        begins = np.concatenate(
            [np.zeros_like(its.documents) if its.begins is None else its.begins for its in packed]
        )
    parts = np.cumsum([0, *(len(its.documents) for its in packed)])
    bounds = [its.bounds[:-1] + first for its, first in zip(packed, parts, strict=False)]
    return Sequences(
        np.concatenate([its.documents for its in packed]),
        begins,
        np.concatenate([its.lengths for its in packed]),
        np.concatenate([*bounds, parts[-1:]]),
        sum(its.num_empty for its in packed),
        sum(its.num_overlong for its in packed),
    )
