"""The index of shards with different schemas; see `schemas`. Pure.

[Note: Shards with different schemas]

The shards of each schema have a separate index, a *part*, which the format makes as it makes
any. A `UnionIndex` joins the parts: it maps each sample to its part, and the fields of the part to
those of the dataset. Fields that one shard stores in another way are not converted here. A
field says how each schema stores it (`FieldSpec.forms`), and `Extents.schema` which one a sample
has; a column that a schema lacks takes no stored bytes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from gyre_daemon.datasets.formats.chunks import Decode, Expected
from gyre_daemon.datasets.formats.indexes.bounds import located_bounds
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkedIndex
from gyre_daemon.datasets.formats.schemas import (
    Schema,
    SchemaOptions,
    default_bytes,
    union_field,
)
from gyre_daemon.errors import ConfigError
from gyre_daemon.order.shuffle.blocks import BlockTable, BlockTables, blocks_that_begin_at
from gyre_daemon.order.shuffle.permutation import Int64Array
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


def assemble_union(
    options: SchemaOptions,
    order: Sequence[str],
    shards: Sequence[Shard],
    inspected: Sequence[Arrays],
    schema_of: Callable[[Arrays], bytes],
    num_samples: Callable[[Arrays], int],
    assemble: Callable[[Sequence[Shard], Sequence[Arrays]], SampleIndex],
) -> SampleIndex:
    """The index of shards that may have different schemas.

    Args:
        options: say whether they may.
        order: names of the wanted fields; empty for all, as the shards have them.
        shards: of the dataset.
        inspected: of each.
        schema_of: takes a shard's inspection and returns its schema.
        num_samples: the same, and how many samples it has.
        assemble: makes the index of shards with one schema.

    Raises:
        CorruptSample, ConfigError: the schemas do not fit together, or the options do not fit them.
    """
    if options.schema == "equal":
        return assemble(shards, inspected)
    numbers: dict[bytes, list[int]] = {}
    for number, scan in enumerate(inspected):
        if num_samples(scan):
            numbers.setdefault(schema_of(scan), []).append(number)
    parts = []
    for its in numbers.values():
        scans = [inspected[number] for number in its]
        index = assemble([shards[number] for number in its], scans)
        parts.append(Part(index, its, np.array([num_samples(scan) for scan in scans], np.int64)))
    if not parts:
        return assemble(shards, inspected)
    are_chunked = [isinstance(part.index, ChunkedIndex) for part in parts]
    if any(are_chunked) != all(are_chunked):
        compressed = parts[are_chunked.index(True)].shards[0]
        raise ConfigError(
            f"some shards are compressed, such as {shards[compressed].name}, and some are not; "
            "serve them as two datasets"
        )
    make = ChunkedUnion if all(are_chunked) else UnionIndex
    return make(shards, parts, order, options.defaults)


class UnionIndex(SampleIndex):
    """A `SampleIndex` of shards with different schemas."""

    def __init__(
        self,
        shards: Sequence[Shard],
        parts: Sequence[Part],
        order: Sequence[str],
        defaults: Mapping[str, Any],
    ) -> None:
        """Join the parts.

        Args:
            shards: of the dataset.
            parts: at least one.
            order: see `assemble_union`.
            defaults: see `SchemaOptions`.
        """
        self._parts = parts
        counts = np.zeros(len(shards), np.int64)
        self._part = np.zeros(len(shards), np.int64)
        self._first_in_part = np.zeros(len(shards), np.int64)
        for number, part in enumerate(parts):
            counts[part.shards] = part.counts
            self._part[part.shards] = number
            self._first_in_part[part.shards] = np.cumsum(part.counts) - part.counts
        self._first = np.concatenate(([0], np.cumsum(counts)))
        self._stored, self._indexed = _fields_of(shards, parts, order, defaults)
        self._places = [_places(self._stored, part.index) for part in parts]
        self._values = [
            [_IndexedField.of(spec, part.index, defaults) for spec in self._indexed]
            for part in parts
        ]
        self._bounds = located_bounds(self)
        self._blocks = BlockTables(self._make_blocks)
        self._digest = self._make_digest()

    @property
    def num_samples(self) -> int:
        """See `SampleIndex.num_samples`."""
        return int(self._first[-1])

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`; a field that a shard lacks has one more, `NAME.present`."""
        return [*self._stored, *self._indexed]

    def locate(self, sample_ids: npt.NDArray[np.int64]) -> Extents:
        """See `SampleIndex.locate`."""
        shape = len(sample_ids), len(self._stored)
        shard = np.searchsorted(self._first, sample_ids, side="right") - 1
        schema = self._part[shard]
        start, size, lengths = (np.zeros(shape, np.int64) for _ in range(3))
        absent = np.zeros(shape, np.bool_)
        indexed = tuple(np.zeros(len(sample_ids), _BOOL) for _ in self._indexed)
        own_ids = sample_ids - self._first[shard] + self._first_in_part[shard]
        for number, part in enumerate(self._parts):
            some = np.flatnonzero(schema == number)
            if not len(some):
                continue
            its = part.index.locate(own_ids[some])
            if its.start.shape[1]:  # an absent field takes no bytes of its range
                start[some] = its.start.min(axis=1)[:, None]
            for column, (spec, place) in enumerate(
                zip(self._stored, self._places[number], strict=True)
            ):
                if place is None:
                    lengths[some, column] = len(spec.form(number).default)
                    continue
                start[some, column] = its.start[:, place]
                size[some, column] = its.size[:, place]
                lengths[some, column] = _widened(spec.form(number), its.tensor_bytes[:, place])
                if its.absent is not None:
                    absent[some, column] = its.absent[:, place]
            for values, found in zip(indexed, self._values[number], strict=True):
                values[some] = found.values(its)
        return Extents(
            shard, start, size, lengths, absent if absent.any() else None, indexed, schema
        )

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: those of the parts, in the order of the shards."""
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

    def _make_digest(self) -> bytes:
        described = [
            [spec.name, spec.dtype.str, spec.shape, spec.ragged, spec.codec, spec.categories]
            + [[form.codec, str(form.cast_from), form.default.hex()] for form in spec.forms]
            for spec in self.fields
        ]
        digest = hashlib.blake2b(b"union " + json.dumps(described).encode(), digest_size=16)
        for number, part in enumerate(self._parts):
            fills = [found.fill for found in self._values[number]]
            digest.update(json.dumps([list(part.shards), fills]).encode())
            digest.update(part.index.digest())
        return digest.digest()


class ChunkedUnion(UnionIndex, ChunkedIndex):
    """The same, of shards of chunks."""

    def __init__(
        self,
        shards: Sequence[Shard],
        parts: Sequence[Part],
        order: Sequence[str],
        defaults: Mapping[str, Any],
    ) -> None:
        """Join the chunks of the parts, too; see `UnionIndex`."""
        super().__init__(shards, parts, order, defaults)
        indexes = [part.index for part in parts if isinstance(part.index, ChunkedIndex)]
        self._indexes, self.noun = indexes, indexes[0].noun
        shard = np.concatenate(
            [np.array(part.shards)[its.shard] for part, its in zip(parts, indexes, strict=True)]
        )
        in_order = np.argsort(shard, kind="stable")
        counts = [its.num_chunks for its in indexes]
        self._owner = np.repeat(np.arange(len(parts)), counts)[in_order]
        self._own_chunk = np.concatenate([np.arange(count) for count in counts])[in_order]
        self.num_chunks = len(shard)
        self.shard = shard[in_order]
        self.base = np.concatenate([its.base for its in indexes])[in_order]
        self.chunk_bytes = np.concatenate([its.chunk_bytes for its in indexes])[in_order]

    def decode(self, chunk: int) -> Decode:
        """See `ChunkedIndex.decode`."""
        index, own = self._of(chunk)
        return index.decode(own)

    def pieces(self, chunk: int) -> list[tuple[int, int]]:
        """See `ChunkedIndex.pieces`."""
        index, own = self._of(chunk)
        return index.pieces(own)

    def number(self, chunk: int) -> int:
        """See `ChunkedIndex.number`."""
        index, own = self._of(chunk)
        return index.number(own)

    def parameters(self, chunk: int) -> tuple[int, ...]:
        """See `ChunkedIndex.parameters`."""
        index, own = self._of(chunk)
        return index.parameters(own)

    def expected(self, chunk: int) -> list[Expected]:
        """See `ChunkedIndex.expected`."""
        index, own = self._of(chunk)
        return index.expected(own)

    def _of(self, chunk: int) -> tuple[ChunkedIndex, int]:
        """The index of a part, and the chunk's number there."""
        return self._indexes[int(self._owner[chunk])], int(self._own_chunk[chunk])


@dataclass(frozen=True, slots=True)
class _IndexedField:
    """Where the values of an indexed field come from in one part.

    Attributes:
        place: among the indexed fields of the part; None if it lacks the field.
        fill: the value of all its samples then.
    """

    place: int | None
    fill: bool

    @classmethod
    def of(
        cls, spec: FieldSpec, index: SampleIndex, defaults: Mapping[str, Any]
    ) -> "_IndexedField":
        names = [each.name for each in indexed_fields(index.fields)]
        place = names.index(spec.name) if spec.name in names else None
        owner = spec.name.removesuffix(PRESENT_SUFFIX)
        if owner != spec.name:
            return cls(place, owner in [each.name for each in index.fields])
        return cls(place, any(default_bytes(spec, defaults)))

    def values(self, extents: Extents) -> npt.NDArray[np.generic] | bool:
        return self.fill if self.place is None else extents.indexed[self.place]


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


def _places(fields: Sequence[FieldSpec], index: SampleIndex) -> list[int | None]:
    """Where each stored field is among those of a part; None where that lacks it."""
    names = [spec.name for spec in stored_fields(index.fields)]
    return [names.index(spec.name) if spec.name in names else None for spec in fields]


def _widened(form: FieldSpec, num_bytes: Int64Array) -> Int64Array:
    """The bytes of a ragged field once its elements have the dtype of the dataset."""
    if not form.ragged or not form.cast_from:
        return num_bytes
    return num_bytes // form.cast_from[1].itemsize * form.dtype.itemsize
