"""Some samples of an index, and several indexes as one: filters, schemas, mixtures, casts. Pure.

[Note: Indexes of several parts]

A `Concat` joins the indexes of *parts*: it maps each sample to its part, and the fields of the part
to those of the dataset. Stored fields that parts store in several ways are not converted here. A
field says how each schema stores it (`FieldSpec.forms`), and `Extents.schema` which one a sample
has; a column that a part lacks takes no stored bytes.

* With `schema = "union"` the shards of each schema are a part, which the format makes as it makes
  any. The dataset has the fields of all: a column whose numbers have different dtypes gets the
  smallest dtype that holds all of them; a shard without a column serves a default.
* The sources of a mixture are parts, one behind the other. The dataset has the fields that all of
  them have, with one dtype and one shape; lists whose lengths are equal in one source and differ in
  another are ragged. The indexed field `source` is the number of the sample's source; sources of a
  source count by themselves.
* A single part serves an index under other names and dtypes, and adds the columns of the shards'
  folders. Only the lengths of lists change then, so the digest is that of the part.

A `View` has the samples of an index that a filter leaves.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    Extents,
    FieldSpec,
    SampleIndex,
    indexed_fields,
    presence_of,
    stored_fields,
)
from gyre_daemon.datasets.formats.chunk_index import Chunks, chunks_of, num_samples
from gyre_daemon.datasets.formats.sample_table import (
    SchemaOptions,
    are_compressed,
    described,
    located_bounds,
)
from gyre_daemon.datasets.formats.values import lossless_cast
from gyre_daemon.errors import ConfigError, CorruptSample, InvalidRequest
from gyre_daemon.order.permutation import BlockTable, Int64Array, blocks_that_begin_at, kept_tables
from gyre_daemon.storage.shard import Shard

SOURCE = "source"
_NUMBERS = ("bytes", "integer", "number", "cast")
# Of these the stored bytes differ, and the tensors do not.
_TEXTS = ("text", "quoted")


@dataclass(frozen=True)
class Part:
    """One of the joined indexes.

    Attributes:
        index: of its samples.
        fields: its fields, under the names by which the dataset has them.
        shards: their numbers in the dataset; empty if they are numbered alike.
    """

    index: SampleIndex
    fields: Sequence[FieldSpec]
    shards: Sequence[int] = ()

    @cached_property
    def num_schemas(self) -> int:
        """In how many ways its shards store fields."""
        return max((len(spec.forms) for spec in self.fields), default=0) or 1

    def field(self, name: str) -> FieldSpec:
        """The field of this name."""
        return next(spec for spec in self.fields if spec.name == name)


@dataclass(frozen=True, slots=True)
class IndexedField:
    """Where the values of an indexed field come from.

    Attributes:
        spec: the field.
        places: of each part, the place among its indexed fields; None if it lacks the field.
        fills: of each part, the value of all its samples then.
        shifts: of each part, a number to add to its values; empty for none.
        of_shards: the value of each shard of the dataset, instead.
    """

    spec: FieldSpec
    places: Sequence[int | None] = ()
    fills: Sequence[int] = ()
    shifts: Sequence[int] = ()
    of_shards: npt.NDArray[np.generic] | None = None

    def values(self, part: int, extents: Extents) -> npt.NDArray[Any]:
        """Of samples of a part, whose shards are numbered as in the dataset."""
        if self.of_shards is not None:
            return self.of_shards[extents.shard]
        place = self.places[part]
        if place is None:
            return np.full(len(extents.shard), self.fills[part], self.spec.dtype)
        values: npt.NDArray[Any] = extents.indexed[place]
        return values + self.spec.dtype.type(self.shifts[part]) if self.shifts else values


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
    parts: list[Part] = []
    part_of = np.zeros(len(shards), np.int64)
    for its in numbers.values():
        index = assemble([shards[each] for each in its], [inspected[each] for each in its])
        part_of[its] = len(parts)
        parts.append(Part(index, index.fields, its))
    if not parts:
        return assemble(shards, inspected)
    are_compressed(
        [shards[part.shards[0]] for part in parts],
        [chunks_of(part.index) is not None for part in parts],
    )
    order = [name for name, _ in options.pairs]
    stored, indexed = _fields_of(shards, parts, order, options.defaults)
    found = [_in_parts(spec, parts, options.defaults) for spec in indexed]
    counts = np.array([num_samples(scan) for scan in inspected], np.int64)
    return Concat(parts, stored, found, _digest(parts, stored, found), (part_of, counts))


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
    return Concat([Part(index, fields)], stored, indexed, index.digest())


def with_folders(index: SampleIndex, columns: Sequence[IndexedField]) -> SampleIndex:
    """The index with the columns of its shards' folders that it has not itself."""
    names = {spec.name for spec in index.fields}
    more = [
        column for column in columns if column.spec.name.removesuffix(PRESENT_SUFFIX) not in names
    ]
    if not more:
        return index
    own = [IndexedField(spec, [place]) for place, spec in enumerate(indexed_fields(index.fields))]
    parts = [Part(index, index.fields)]
    return Concat(parts, stored_fields(index.fields), [*own, *more], index.digest())


class View(SampleIndex):
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
        self._blocks = kept_tables(self._make_blocks)

    @property
    def unfiltered(self) -> SampleIndex:
        """The index of all samples."""
        return self._index

    def stored_ids(self, sample_ids: Int64Array) -> Int64Array:
        """The ids that samples have there."""
        return self._kept[sample_ids]

    @property
    def num_samples(self) -> int:
        return len(self._kept)

    @property
    def fields(self) -> Sequence[FieldSpec]:
        return self._index.fields

    def locate(self, sample_ids: Int64Array) -> Extents:
        extents = self._index.locate(self._kept[sample_ids])
        if not self.chunks:
            return extents
        moved = self._moved[self.blocks(0).block_of(sample_ids)]
        return replace(extents, start=extents.start + moved[:, None])

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the other index that have any sample left."""
        return self._blocks(io_block_bytes)

    def digest(self) -> bytes:
        digest = hashlib.blake2b(b"filtered" + self._index.digest(), digest_size=16)
        digest.update(self._kept.astype("<i8").data)
        return digest.digest()

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        table = self._index.blocks(io_block_bytes)
        first = table.first_sample(np.arange(table.num_blocks + 1))
        return blocks_that_begin_at(np.unique(np.searchsorted(self._kept, first)))


class Concat:
    """A `SampleIndex` of the samples of one or more others.

    Attributes:
        fields: the stored ones before the indexed ones.
        num_samples: of all parts.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        stored: Sequence[FieldSpec],
        indexed: Sequence[IndexedField],
        digest: bytes,
        runs: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        """Join the parts.

        Args:
            parts: at least one.
            stored: the stored fields.
            indexed: the indexed fields.
            digest: see `SampleIndex.digest`.
            runs: of successive samples of one part each: int64 [R], the number of the part, and how
                many they are. None where the parts follow each other.
        """
        self.fields = [*stored, *(each.spec for each in indexed)]
        self.parts, self._indexed, self._digest = parts, indexed, digest
        self._first_schema = np.cumsum([0, *(part.num_schemas for part in parts)])
        schemas = zip(parts, self._first_schema.tolist(), strict=False)
        self._maps = [_PartMap.of(part, schema, stored) for part, schema in schemas]
        self._shards = [np.array(part.shards, np.int64) for part in parts]
        sizes = np.array([part.index.num_samples for part in parts], np.int64)
        self._run_part, counts = runs or (np.arange(len(parts)), sizes)
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self.num_samples = int(self._first[-1])
        self._first_in_part = np.zeros(len(counts), np.int64)
        for number in range(len(parts)):
            own = counts[its := self._run_part == number]
            self._first_in_part[its] = np.cumsum(own) - own
        self._blocks, self._bounds = kept_tables(self._make_blocks), located_bounds(self)

    @cached_property
    def chunks(self) -> Chunks | None:
        """See `chunks_of`: those of all parts."""
        found = [its for part in self.parts if (its := chunks_of(part.index))]
        if not found or not self.parts[0].shards:
            return found[0] if found else None
        return Chunks.joined(found, [part.shards for part in self.parts])

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        if len(self.parts) == 1:
            return self._served(0, self.parts[0].index.locate(sample_ids))
        count, num_stored = len(sample_ids), len(self.fields) - len(self._indexed)
        run = np.searchsorted(self._first, sample_ids, side="right") - 1
        part_of = self._run_part[run]
        own_ids = sample_ids - self._first[run] + self._first_in_part[run]
        shard, schema = np.zeros(count, np.int64), np.zeros(count, np.int64)
        start, size, lengths = (np.zeros((count, num_stored), np.int64) for _ in range(3))
        absent = np.zeros((count, num_stored), np.bool_)
        indexed = tuple(
            np.zeros((count, *each.spec.shape), each.spec.dtype) for each in self._indexed
        )
        for number in np.unique(part_of).tolist():
            some = np.flatnonzero(part_of == number)
            its = self._served(number, self.parts[number].index.locate(own_ids[some]))
            shard[some] = its.shard
            schema[some] = self._first_schema[number] + (0 if its.schema is None else its.schema)
            start[some], size[some], lengths[some] = its.start, its.size, its.tensor_bytes
            if its.absent is not None:
                absent[some] = its.absent
            for values, found in zip(indexed, its.indexed, strict=True):
                values[some] = found
        return Extents(
            shard,
            start,
            size,
            lengths,
            absent if absent.any() else None,
            indexed,
            schema if self._first_schema[-1] > 1 else None,
        )

    def _served(self, number: int, its: Extents) -> Extents:
        """The extents of samples of a part, as those of the dataset's fields and shards."""
        fields, shards = self._maps[number], self._shards[number]
        if len(shards):
            its = replace(its, shard=shards[its.shard])
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
        return self._bounds(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the parts, in the order of the shards."""
        if len(self.parts) == 1:
            return self.parts[0].index.blocks(io_block_bytes)
        return self._blocks(io_block_bytes)

    def digest(self) -> bytes:
        return self._digest

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        firsts = [self._first[-1:]]
        for number, part in enumerate(self.parts):
            table = part.index.blocks(io_block_bytes)
            first = table.first_sample(np.arange(table.num_blocks))
            runs = np.flatnonzero((self._run_part == number) & (np.diff(self._first) > 0))
            own = self._first_in_part[runs]
            run = np.searchsorted(own, first, side="right") - 1
            firsts.append(self._first[runs[run]] + first - own[run])
        return blocks_that_begin_at(np.sort(np.concatenate(firsts)))


class MixedIndex(Concat):
    """The samples of a mixture; a small source may come again and again in one batch."""

    def __init__(self, sources: "Sequence[Source]") -> None:
        """Find the fields that all sources have.

        Raises:
            ConfigError: fields of one name differ, or no field is in all sources.
        """
        counts = np.cumsum([0, *(each.num_shards for each in sources)]).tolist()
        parts = [
            Part(each.index, each.fields, range(first, first + each.num_shards))
            for each, first in zip(sources, counts, strict=False)
        ]
        stored = _shared([stored_fields(each.fields) for each in sources], sources)
        indexed = _shared([indexed_fields(_without_source(each)) for each in sources], sources)
        if not stored and not indexed:
            all_fields = "; ".join(
                f"`{each.name}` has {', '.join(spec.name for spec in each.fields)}"
                for each in sources
            )
            raise ConfigError(f"the sources of a mixture have no field in common: {all_fields}")
        own = [[spec.name for spec in indexed_fields(each.fields)] for each in sources]
        found = [
            IndexedField(parts[0].field(name), [names.index(name) for names in own])
            for name in indexed
        ]
        digest = hashlib.blake2b(b"mixture", digest_size=16)
        for part in parts:
            digest.update(part.index.digest())
        super().__init__(
            parts,
            [_in_all(name, parts) for name in stored],
            [*found, _numbered(sources, own)],
            digest.digest(),
        )
        self.first_ids: list[int] = self._first.tolist()

    @property
    def chunks(self) -> None:
        """See `chunks_of`: each source decodes its own."""

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`: all could be of the source with the largest."""
        together = sum(part.index.max_ragged_bytes(num_samples) for part in self.parts)
        largest = max(part.index.max_ragged_bytes(1) for part in self.parts)
        return min(together, num_samples * largest)

    def blocks(self, io_block_bytes: int) -> NoReturn:
        raise InvalidRequest("a mixture has no blocks; use the order `full` or `sequential`")


@dataclass(frozen=True, slots=True)
class _PartMap:
    """Where the F stored fields of a dataset are among those of a part."""

    places: Int64Array  # [F]; 0 for lacking ones
    before: Int64Array  # [F], the bytes of an element of a list in the part; 1 for other fields
    after: Int64Array  # [F], those in the dataset
    lacking: Int64Array  # [L], the fields that the part lacks
    default_bytes: Int64Array  # [L], the bytes of each in a tensor
    keeps_all: bool  # whether nothing differs

    @classmethod
    def of(cls, part: Part, schema: int, stored: Sequence[FieldSpec]) -> "_PartMap":
        own = list(stored_fields(part.index.fields))
        names = [spec.name for spec in stored_fields(part.fields)]
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
                defaults.append(len(spec.form(schema).default))
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
            fills.append(any(_default_bytes(spec, defaults)))
    return IndexedField(spec, places, fills)


def _fields_of(
    shards: Sequence[Shard],
    parts: Sequence[Part],
    order: Sequence[str],
    defaults: Mapping[str, Any],
) -> tuple[list[FieldSpec], list[FieldSpec]]:
    """The stored and the indexed fields of the dataset."""
    schemas = []
    for part in parts:
        fields = [spec for spec in part.index.fields if not spec.name.endswith(PRESENT_SUFFIX)]
        name = shards[part.shards[0]].name
        schemas.append(_Schema(name, {spec.name: spec for spec in fields}))
    names = list(dict.fromkeys(name for schema in schemas for name in schema.fields))
    for key, wanted in (("columns", order), ("defaults", defaults)):
        for name in wanted:
            if name not in names:
                raise ConfigError(
                    f"`{key}` has {name!r:.100}, and no shard has such a column; there are "
                    f"{', '.join(names):.1000}"
                )
    found = [_union_field(name, schemas, defaults) for name in order or names]
    lacking = [
        spec.name
        for spec in found
        if any(
            spec.name not in schema.fields
            or spec.name + PRESENT_SUFFIX in [each.name for each in part.index.fields]
            for schema, part in zip(schemas, parts, strict=True)
        )
    ]
    return list(stored_fields(found)), [*indexed_fields(found), *map(presence_of, lacking)]


class _Schema(NamedTuple):
    """The fields of some shards, all of one schema, by name."""

    shard: str  # the name of the first
    fields: Mapping[str, FieldSpec]


def _union_field(name: str, schemas: Sequence[_Schema], defaults: Mapping[str, Any]) -> FieldSpec:
    """The field of this name of all schemas; at least one has it.

    Raises:
        CorruptSample: two schemas have incompatible fields; names a shard of each.
        ConfigError: the default does not fit such a field.
    """
    owners = [schema for schema in schemas if name in schema.fields]
    common, first = owners[0].fields[name], owners[0]
    for owner in owners[1:]:
        wider = _wider_field(common, owner.fields[name])
        if wider is None:
            raise _unlike(name, owner, first)
        common = wider
    if common.codec == "indexed":
        return common  # defaults for shards without it are in the index, too
    has_all = len(owners) == len(schemas)
    if has_all and all(owner.fields[name] == common for owner in owners):
        return common
    lacking = common
    if not has_all:
        lacking = replace(common, codec="default", default=_default_bytes(common, defaults))
    forms = tuple(
        _form(schema.fields[name], common) if name in schema.fields else lacking
        for schema in schemas
    )
    return replace(common, forms=forms)


def _default_bytes(spec: FieldSpec, defaults: Mapping[str, Any]) -> bytes:
    """The bytes in the tensor for a sample without this field.

    Raises:
        ConfigError: the operator's default does not fit such a field.
    """
    if spec.name not in defaults:
        if spec.codec == "json":
            return b"null"
        return b"" if spec.ragged else bytes(spec.element_bytes)
    value = defaults[spec.name]
    if spec.codec == "json":
        return json.dumps(value, ensure_ascii=False).encode()
    if spec.codec in _TEXTS or (_is_opaque(spec) and isinstance(value, str)):
        if isinstance(value, str):
            return value.encode()
        raise _no_default(spec, value, "text")
    return _default_numbers(spec, value)


def _default_numbers(spec: FieldSpec, value: Any) -> bytes:
    """Numbers as the tensor has them; one number stands for all of an array of one shape."""
    try:
        found = np.array(value)
        if not found.size and spec.ragged:
            return b""
        is_alike = found.dtype.kind in "biuf" and (found.dtype.kind == "b") == (
            spec.dtype.kind == "b"
        )
        if is_alike and (found.ndim > 0 or not spec.ragged):
            wanted = (*found.shape[:1], *spec.shape) if spec.ragged else spec.shape
            return lossless_cast(np.broadcast_to(found, wanted), spec.dtype).tobytes()
    except (TypeError, ValueError, OverflowError):
        pass
    raise _no_default(spec, value, f"{spec.dtype}{list(spec.shape) or ''}")


def _no_default(spec: FieldSpec, value: Any, kind: str) -> ConfigError:
    a_list = "a list of " if spec.ragged and kind != "text" else ""
    return ConfigError(
        f"`defaults` of {spec.name!r:.100} is {value!r:.100}, and the field is {a_list}{kind}"
    )


def _wider_field(one: FieldSpec, other: FieldSpec) -> FieldSpec | None:
    """A field that holds the values of both; None if there is none."""
    if one == other:
        return one
    if (one.shape, one.ragged, one.categories) != (other.shape, other.ragged, other.categories):
        return None
    if one.codec in _TEXTS and other.codec in _TEXTS:
        return replace(one, codec="text")
    if one.codec not in _NUMBERS or other.codec not in _NUMBERS:
        return None
    if _is_opaque(one) != _is_opaque(other):
        return None
    dtype = _wider_dtype(one.dtype, other.dtype)
    return None if dtype is None else replace(one, dtype=dtype, codec="bytes")


def _is_opaque(spec: FieldSpec) -> bool:
    """Whether its bytes may be other than numbers."""
    return spec.ragged and spec.dtype == np.uint8 and not spec.shape


def _wider_dtype(
    one: np.dtype[np.generic], other: np.dtype[np.generic]
) -> np.dtype[np.generic] | None:
    """The smallest dtype that holds all values of two dtypes exactly; None if there is none."""
    if one == other:
        return one
    if "b" in (one.kind, other.kind):
        return None
    wider = np.promote_types(one, other)
    is_mixed = wider.kind == "f" and "f" not in (one.kind, other.kind)  # int64 and uint64
    has_long = any(each.kind in "iu" and each.itemsize == 8 for each in (one, other))
    return None if is_mixed or (wider.kind == "f" and has_long) else wider


def _form(stored: FieldSpec, common: FieldSpec) -> FieldSpec:
    """How a schema stores a field of the union."""
    if stored.dtype == common.dtype:
        return stored
    if stored.codec == "cast":
        return replace(stored, dtype=common.dtype)
    cast_from = (stored.codec, stored.dtype)
    return replace(stored, dtype=common.dtype, codec="cast", cast_from=cast_from)


def _unlike(name: str, schema: _Schema, first: _Schema) -> CorruptSample:
    reason = (
        f"its column {name!r:.100} is {described(schema.fields[name])}, and that of shard "
        f"{first.shard} is {described(first.fields[name])}"
    )
    return CorruptSample(
        f"shard {schema.shard} does not fit: {reason}; a union widens numbers only if no value "
        "changes; serve them as two datasets, or name the other columns in `columns`",
        {"shard": schema.shard, "reason": reason},
    )


@dataclass(frozen=True, slots=True)
class Source:
    """One source of a mixture.

    Attributes:
        name: of its dataset.
        index: its samples.
        fields: its tensors, under the names by which they are served.
        num_shards: of its storage.
        leaves: the names of a mixture's own sources; empty for a plain dataset.
    """

    name: str
    index: SampleIndex
    fields: Sequence[FieldSpec]
    num_shards: int
    leaves: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names that the field `source` counts: its own name, or those of its sources."""
        return [f"{self.name}/{leaf}" for leaf in self.leaves] or [self.name]


def _numbered(sources: Sequence[Source], indexed: Sequence[Sequence[str]]) -> IndexedField:
    """The field `source`; `indexed` are the names of the indexed fields of each source."""
    names = [name for each in sources for name in each.names]
    first = np.cumsum([0, *(len(each.names) for each in sources)]).tolist()[:-1]
    places = [
        its.index(SOURCE) if each.leaves else None
        for each, its in zip(sources, indexed, strict=True)
    ]
    spec = FieldSpec(
        SOURCE, np.dtype("<i4"), (), ragged=False, codec="indexed", categories=tuple(names)
    )
    return IndexedField(spec, places, first, first)


def _without_source(part: Source) -> Sequence[FieldSpec]:
    if part.leaves:
        if all(spec.name != SOURCE for spec in indexed_fields(part.fields)):
            raise ConfigError(
                f"the transforms of the mixture `{part.name}` make or drop the field `{SOURCE}`, "
                "which mixtures of it need; leave it as it is"
            )
        return [spec for spec in part.fields if spec.name != SOURCE]
    if any(spec.name == SOURCE for spec in part.fields):
        raise ConfigError(
            f"`{part.name}` has a field `{SOURCE}`, and a mixture adds one; give the former "
            "another name with `rename`"
        )
    return part.fields


def _shared(fields: Sequence[Sequence[FieldSpec]], parts: Sequence[Source]) -> list[str]:
    """The names of the fields that all sources have, in the order of the first."""
    first, *others = ({spec.name: spec for spec in each} for each in fields)
    names = [name for name in first if all(name in other for other in others)]
    for name in names:
        for part, other in zip(parts[1:], others, strict=True):
            if _kind(first[name]) != _kind(other[name]):
                raise ConfigError(
                    f"the field `{name}` is {_shown(first[name])} in `{parts[0].name}` and "
                    f"{_shown(other[name])} in `{part.name}`. Make them equal with `cast`, or give "
                    "one another name with `rename`."
                )
    return names


def _kind(spec: FieldSpec) -> tuple[object, ...]:
    known = spec.dtype, spec.shape, spec.ragged, spec.token_ids, spec.vocabulary, spec.categories
    return *known, "ids" in (spec.codec, *(form.codec for form in spec.forms))


def _shown(spec: FieldSpec) -> str:
    shape = ["n", *map(str, spec.shape)] if spec.ragged else list(map(str, spec.shape))
    of = f" below {spec.vocabulary}" if spec.vocabulary else ""
    classes = f" with {len(spec.categories)} classes" if spec.categories else ""
    return f"{spec.dtype}[{', '.join(shape)}]{of}{classes}"


def _in_all(name: str, parts: Sequence[Part]) -> FieldSpec:
    """A stored field, with the way in which each schema of each source stores it."""
    forms = tuple(
        part.field(name).form(number) for part in parts for number in range(part.num_schemas)
    )
    first = forms[0]
    media = {form.media_type for form in forms}
    lengths = {part.field(name).length for part in parts}
    return replace(
        first,
        forms=forms if len(forms) > 1 else (),
        media_type=first.media_type if len(media) == 1 else "",
        length=lengths.pop() if len(lengths) == 1 else 0,
    )
