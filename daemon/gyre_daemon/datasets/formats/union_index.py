"""The index of a dataset's fields: joined from schemas, cast, and with columns of folders. Pure.

[Note: Shards with different schemas]

The shards of each schema have a separate index, a *part*, which the format makes as it makes
any. A `UnionIndex` joins the parts: it maps each sample to its part, and the fields of the part to
those of the dataset. Fields that one shard stores in another way are not converted here. A
field says how each schema stores it (`FieldSpec.forms`), and `Extents.schema` which one a sample
has; a column that a schema lacks takes no stored bytes.

The same with one part serves an index under other names and dtypes, and adds the columns of the
shards' folders. Only the lengths of lists change then, so the digest is that of the part.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    Extents,
    FieldSpec,
    SampleIndex,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.chunk_index import Chunks, chunks_of, num_samples
from gyre_daemon.datasets.formats.sample_table import RaggedBounds, located_bounds
from gyre_daemon.datasets.formats.schemas import (
    Schema,
    SchemaOptions,
    are_compressed,
    default_bytes,
    union_field,
)
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.block_order import BlockTable, BlockTables, blocks_that_begin_at
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

_BOOL = np.dtype(np.bool_)


@dataclass(frozen=True, slots=True)
class Part:
    """The shards of one schema.

    Attributes:
        index: of their samples.
        shards: their numbers in the dataset, ascending; each has samples.
        counts: int64, how many samples each has.
    """

    index: SampleIndex
    shards: Sequence[int]
    counts: Int64Array


@dataclass(frozen=True, slots=True)
class IndexedField:
    """Where the values of an indexed field come from.

    Attributes:
        spec: the field.
        places: of each part, the place among its indexed fields; None if it lacks the field.
        fills: of each part, the value of all its samples then.
        of_shards: the value of each shard of the dataset, instead.
    """

    spec: FieldSpec
    places: Sequence[int | None] = ()
    fills: Sequence[bool] = ()
    of_shards: npt.NDArray[np.generic] | None = None

    def of_some(self, shards: Sequence[int]) -> "IndexedField":
        """The same of some shards, which are numbered anew."""
        assert self.of_shards is not None
        return replace(self, of_shards=self.of_shards[list(shards)])

    def values(self, part: int, extents: Extents) -> npt.NDArray[np.generic]:
        """Of samples of a part, whose shards are numbered as in the dataset."""
        if self.of_shards is not None:
            return self.of_shards[extents.shard]
        place = self.places[part]
        if place is None:
            return np.full(len(extents.shard), self.fills[part], self.spec.dtype)
        return extents.indexed[place]


def assemble_union(
    options: SchemaOptions,
    shards: Sequence[Shard],
    inspected: Sequence[Arrays],
    schema: str,
    assemble: Callable[[Sequence[Shard], Sequence[Arrays]], SampleIndex],
) -> SampleIndex:
    """The index of shards that may have different schemas.

    Args:
        options: say whether they may, and which columns are wanted.
        shards: of the dataset.
        inspected: of each.
        schema: the name of the array with a shard's schema.
        assemble: makes the index of shards with one schema.

    Raises:
        CorruptSample, ConfigError: the schemas do not fit together, or the options do not fit them.
    """
    if options.schema == "equal":
        return assemble(shards, inspected)
    numbers: dict[bytes, list[int]] = {}
    for number, scan in enumerate(inspected):
        if num_samples(scan):
            numbers.setdefault(scan[schema].tobytes(), []).append(number)
    parts = []
    for its in numbers.values():
        scans = [inspected[number] for number in its]
        index = assemble([shards[number] for number in its], scans)
        parts.append(Part(index, its, np.array([num_samples(scan) for scan in scans], np.int64)))
    if not parts:
        return assemble(shards, inspected)
    are_compressed(
        [shards[part.shards[0]] for part in parts],
        [chunks_of(part.index) is not None for part in parts],
    )
    order = [name for name, _ in options.pairs]
    stored, indexed = _fields_of(shards, parts, order, options.defaults)
    found = [_in_parts(spec, parts, options.defaults) for spec in indexed]
    return UnionIndex(parts, stored, found, _digest(parts, stored, found), len(shards))


def with_fields(index: SampleIndex, fields: Sequence[FieldSpec]) -> SampleIndex:
    """The index, where lists have the dtypes of these fields; itself if no list is cast.

    Args:
        index: of the samples as they are stored.
        fields: the same ones, renamed and cast.
    """
    stored = stored_fields(fields)
    pairs = zip(stored_fields(index.fields), stored, strict=True)
    if not any(old.ragged and new.ragged and old.dtype != new.dtype for old, new in pairs):
        return index
    indexed = [IndexedField(spec, [place]) for place, spec in enumerate(indexed_fields(fields))]
    return UnionIndex([Part(index, (), _NO_COUNTS)], stored, indexed, index.digest())


def with_folders(index: SampleIndex, columns: Sequence[IndexedField]) -> SampleIndex:
    """The index with the columns of its shards' folders that it has not itself."""
    names = {spec.name for spec in index.fields}
    more = [
        column for column in columns if column.spec.name.removesuffix(PRESENT_SUFFIX) not in names
    ]
    if not more:
        return index
    own = [IndexedField(spec, [place]) for place, spec in enumerate(indexed_fields(index.fields))]
    parts = [Part(index, (), _NO_COUNTS)]
    return UnionIndex(parts, stored_fields(index.fields), [*own, *more], index.digest())


class UnionIndex:
    """A `SampleIndex` of the samples of one or more others.

    Attributes:
        fields: the stored ones before the indexed ones.
        chunks: see `chunks_of`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        stored: Sequence[FieldSpec],
        indexed: Sequence[IndexedField],
        digest: bytes,
        num_shards: int = 0,
    ) -> None:
        """Join the parts.

        Args:
            parts: at least one. The only one may leave out `shards` and `counts`.
            stored: the stored fields. A part has them under the same names, unless it is the only
                one, which has all of them in this order.
            indexed: the indexed fields.
            digest: see `SampleIndex.digest`.
            num_shards: of the dataset, where there are several parts.
        """
        self.fields = [*stored, *(each.spec for each in indexed)]
        self._parts, self._indexed, self._digest = parts, indexed, digest
        self._maps = [_PartMap.of(part, number, stored) for number, part in enumerate(parts)]
        self.num_samples = sum(part.index.num_samples for part in parts)
        if parts[0].shards:
            counts = np.zeros(num_shards, np.int64)
            self._part = np.zeros(num_shards, np.int64)
            self._first_in_part = np.zeros(num_shards, np.int64)
            for number, part in enumerate(parts):
                counts[part.shards] = part.counts
                self._part[part.shards] = number
                self._first_in_part[part.shards] = np.cumsum(part.counts) - part.counts
            self._first = np.concatenate(([0], np.cumsum(counts)))
        self._blocks = BlockTables(self._make_blocks)

    @cached_property
    def chunks(self) -> Chunks | None:
        """See `chunks_of`: those of all parts."""
        found = [its for part in self._parts if (its := chunks_of(part.index))]
        if not found or not self._parts[0].shards:
            return found[0] if found else None
        return Chunks.joined(found, [part.shards for part in self._parts])

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """See `SampleIndex.locate`."""
        if len(self._parts) == 1:
            its = self._parts[0].index.locate(sample_ids)
            return self._served(0, its)
        count, num_stored = len(sample_ids), len(self.fields) - len(self._indexed)
        shard = np.searchsorted(self._first, sample_ids, side="right") - 1
        schema = self._part[shard]
        start, size, lengths = (np.zeros((count, num_stored), np.int64) for _ in range(3))
        absent = np.zeros((count, num_stored), np.bool_)
        indexed = tuple(np.zeros(count, each.spec.dtype) for each in self._indexed)
        own_ids = sample_ids - self._first[shard] + self._first_in_part[shard]
        for number, part in enumerate(self._parts):
            some = np.flatnonzero(schema == number)
            if not len(some):
                continue
            its = self._served(number, part.index.locate(own_ids[some]))
            start[some], size[some], lengths[some] = its.start, its.size, its.tensor_bytes
            if its.absent is not None:
                absent[some] = its.absent
            for values, found in zip(indexed, its.indexed, strict=True):
                values[some] = found
        return Extents(
            shard, start, size, lengths, absent if absent.any() else None, indexed, schema
        )

    def _served(self, number: int, its: Extents) -> Extents:
        """The extents of samples of a part, as those of the dataset's fields and shards."""
        fields, part = self._maps[number], self._parts[number]
        if part.shards:
            its = replace(its, shard=np.array(part.shards)[its.shard])
        indexed = tuple(each.values(number, its) for each in self._indexed)
        if fields.keeps_all:
            return replace(its, indexed=indexed)
        tables = its.start, its.size, its.tensor_bytes
        if not its.start.shape[1]:
            tables = (np.zeros((len(its.shard), 1), np.int64),) * 3
        start, size, lengths = (table[:, fields.places] for table in tables)
        lengths = lengths // fields.before * fields.after
        absent = None if its.absent is None else its.absent[:, fields.places]
        if len(fields.lacking):  # these take no bytes of the sample's range
            start[:, fields.lacking] = tables[0].min(axis=1, keepdims=True)
            size[:, fields.lacking] = 0
            lengths[:, fields.lacking] = fields.default_bytes
            if absent is not None:
                absent[:, fields.lacking] = False
        return replace(its, start=start, size=size, lengths=lengths, absent=absent, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    @cached_property
    def _bounds(self) -> RaggedBounds:
        return located_bounds(self)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the parts, in the order of the shards."""
        if len(self._parts) == 1:
            return self._parts[0].index.blocks(io_block_bytes)
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._digest

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        firsts = [self._first[-1:]]
        for part in self._parts:
            table = part.index.blocks(io_block_bytes)
            first = table.first_sample(np.arange(table.num_blocks))
            own = self._first_in_part[part.shards]
            shard = np.searchsorted(own, first, side="right") - 1
            firsts.append(self._first[np.array(part.shards)[shard]] + first - own[shard])
        return blocks_that_begin_at(np.sort(np.concatenate(firsts)))


_NO_COUNTS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _PartMap:
    """Where the F stored fields of a dataset are among those of a part.

    Attributes:
        places: int64 [F]; 0 for lacking ones.
        before, after: int64 [F], the bytes of an element of a list there and in the dataset; 1 for
            other fields.
        lacking: int64 [L], the fields that the part lacks.
        default_bytes: int64 [L], the bytes of each in a tensor.
        keeps_all: whether nothing differs.
    """

    places: Int64Array
    before: Int64Array
    after: Int64Array
    lacking: Int64Array
    default_bytes: Int64Array
    keeps_all: bool

    @classmethod
    def of(cls, part: Part, number: int, stored: Sequence[FieldSpec]) -> "_PartMap":
        own = list(stored_fields(part.index.fields))
        names = [spec.name for spec in (own if part.shards else stored)]
        places, before, after, lacking, defaults = [], [], [], [], []
        for place, spec in enumerate(stored):
            is_there = spec.name in names
            its = names.index(spec.name) if is_there else 0
            is_list = is_there and spec.ragged and own[its].ragged
            places.append(its)
            before.append(own[its].dtype.itemsize if is_list else 1)
            after.append(spec.dtype.itemsize if is_list else 1)
            if not is_there:
                lacking.append(place)
                defaults.append(len(spec.form(number).default))
        keeps_all = not lacking and before == after and places == list(range(len(own)))
        found = [np.array(each, np.int64) for each in (places, before, after, lacking, defaults)]
        return cls(found[0], found[1], found[2], found[3], found[4], keeps_all)


def _digest(
    parts: Sequence[Part], stored: Sequence[FieldSpec], indexed: Sequence[IndexedField]
) -> bytes:
    described = [
        [spec.name, spec.dtype.str, spec.shape, spec.ragged, spec.codec, spec.categories]
        + [[form.codec, str(form.cast_from), form.default.hex()] for form in spec.forms]
        for spec in (*stored, *(each.spec for each in indexed))
    ]
    digest = hashlib.blake2b(b"union " + json.dumps(described).encode(), digest_size=16)
    for number, part in enumerate(parts):
        fills = [each.fills[number] for each in indexed]
        digest.update(json.dumps([list(part.shards), fills]).encode())
        digest.update(part.index.digest())
    return digest.digest()


def _in_parts(spec: FieldSpec, parts: Sequence[Part], defaults: Mapping[str, Any]) -> IndexedField:
    """Where the values of an indexed field come from in each part."""
    places: list[int | None] = []
    fills = []
    owner = spec.name.removesuffix(PRESENT_SUFFIX)
    for part in parts:
        names = [each.name for each in indexed_fields(part.index.fields)]
        places.append(names.index(spec.name) if spec.name in names else None)
        if owner != spec.name:
            fills.append(owner in [each.name for each in part.index.fields])
        else:
            fills.append(any(default_bytes(spec, defaults)))
    return IndexedField(spec, places, fills)


def _fields_of(
    shards: Sequence[Shard],
    parts: Sequence[Part],
    order: Sequence[str],
    defaults: Mapping[str, Any],
) -> tuple[list[FieldSpec], list[FieldSpec]]:
    """The stored and the indexed fields of the dataset.

    Raises:
        CorruptSample, ConfigError: see `assemble_union`.
    """
    schemas = [
        Schema(
            shards[part.shards[0]].name,
            {
                spec.name: spec
                for spec in part.index.fields
                if not spec.name.endswith(PRESENT_SUFFIX)
            },
        )
        for part in parts
    ]
    names = list(dict.fromkeys(name for schema in schemas for name in schema.fields))
    for key, wanted in (("columns", order), ("defaults", defaults)):
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"`{key}` has {name!r:.100}, and no shard has such a column; there are "
                    f"{', '.join(names):.1000}"
                )
    found = [union_field(name, schemas, defaults) for name in order or names]
    lacking = [
        spec.name
        for spec in found
        if any(
            spec.name not in schema.fields
            or spec.name + PRESENT_SUFFIX in [each.name for each in part.index.fields]
            for schema, part in zip(schemas, parts, strict=True)
        )
    ]
    present = [
        FieldSpec(name + PRESENT_SUFFIX, _BOOL, (), ragged=False, codec="indexed")
        for name in lacking
    ]
    return list(stored_fields(found)), [*indexed_fields(found), *present]
