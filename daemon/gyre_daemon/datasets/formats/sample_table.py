"""Indexes of samples as ranges of shards, and which columns of shards are served. Pure.

Ranges have any size, or are at regular distances. Also checks of arrays that were stored and may be
forged: could an inspection have found them?
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    Extents,
    FieldSpec,
    SampleIndex,
    array_of,
    check_names,
    indexed_fields,
    ragged_fields,
    renamed,
    stored_fields,
)
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.order.permutation import (
    BlockTable,
    Int64Array,
    blocks_of_equal_samples,
    blocks_of_unequal_samples,
    kept_tables,
)
from gyre_daemon.storage.shard import Shard

_T = TypeVar("_T")

# Batch sizes whose bounds are kept: a bound takes a pass over all samples, and an open session asks
# for its own again and again.
_MAX_KEPT_BOUNDS = 256
# Samples located at once, to bound the memory that takes.
_AT_ONCE = 1 << 16


def ragged_bounds(sample_bytes: Callable[[], Int64Array]) -> Callable[[int], int]:
    """Bounds of bytes by the number of samples; see `SampleIndex.max_ragged_bytes`.

    A sample occurs at most once in each epoch that the positions touch, so a bound takes the
    largest samples once for each of these epochs.

    Args:
        sample_bytes: returns int64 [N], the bytes of all ragged fields of each sample.
    """

    @functools.lru_cache(_MAX_KEPT_BOUNDS)
    def largest(num_samples: int) -> int:
        each = sample_bytes()
        total = len(each)
        num_epochs = num_samples // max(total, 1) + 2
        num_smaller = total - min(-(-num_samples // num_epochs), total)
        return num_epochs * int(np.partition(each, num_smaller)[num_smaller:].sum())

    return largest


def column_of_all(
    index: SampleIndex, sample_ids: Int64Array, of: Callable[[Extents], Int64Array]
) -> Int64Array:
    """A column of samples, int64 [n], from their extents; few are located at a time."""
    parts = [
        of(index.locate(sample_ids[begin : begin + _AT_ONCE]))
        for begin in range(0, len(sample_ids), _AT_ONCE)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def located_bounds(index: SampleIndex) -> Callable[[int], int]:
    """The bounds of an index, found by locating its samples."""

    def ragged_bytes() -> Int64Array:
        ragged = [spec.ragged for spec in stored_fields(index.fields)]
        ids = np.arange(index.num_samples)
        return column_of_all(index, ids, lambda found: found.tensor_bytes[:, ragged].sum(axis=1))

    return ragged_bounds(ragged_bytes)


def check_extents(arrays: Arrays, file_bytes: int) -> None:
    """Check that `start` and `size` are n ranges of a file, in its order.

    Raises:
        ValueError: they are not.
    """
    check_ranges(
        array_of(arrays, "start", np.int64), array_of(arrays, "size", np.int64), file_bytes
    )


def check_columns(arrays: Arrays, file_bytes: int, num_columns: int) -> None:
    """Check that `start` and `size` are n rows of ranges of a file, a column each, in its order.

    Raises:
        ValueError: they are not.
    """
    start, size = (array_of(arrays, name, np.int64, 2) for name in ("start", "size"))
    if start.shape != size.shape or (len(start) and start.shape[1] != num_columns):
        raise ValueError("its ranges are not those of its columns")
    check_ranges(start.ravel(), size.ravel(), file_bytes)


def check_ranges(
    start: npt.NDArray[np.int64], size: npt.NDArray[np.int64], file_bytes: int
) -> None:
    """Check that ranges are within a file, one after the other.

    Raises:
        ValueError: they do not.
    """
    if start.shape != size.shape:
        raise ValueError("it has other numbers of starts and sizes")
    if not len(start):
        return
    is_inside = start.min() >= 0 and size.min() >= 0 and max(start.max(), size.max()) <= file_bytes
    if (
        not is_inside
        or start[-1] + size[-1] > file_bytes
        or (start[:-1] + size[:-1] > start[1:]).any()
    ):
        raise ValueError("its ranges are not in sequence")


def joined_columns(
    inspected: Sequence[Arrays], name: str, places: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Int64 [N, F], an array of all shards with samples, by the places of F columns there."""
    nothing = np.empty((0, len(places)), np.int64)
    return np.concatenate(
        [nothing, *(scan[name][:, places] for scan in inspected if len(scan[name]))]
    )


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
        self._blocks = kept_tables(self._make_blocks)
        is_ragged = [spec.ragged for spec in stored_fields(fields)]
        self._bounds = ragged_bounds(lambda: size[:, is_ragged].sum(axis=1))
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
        shard = np.searchsorted(self._first, sample_ids, side="right") - 1
        size = self._size[sample_ids]
        lengths = size.copy() if self._lengths else None
        for place, its in self._lengths.items():
            lengths[:, place] = its[sample_ids]  # type: ignore[index]  # there are some
        absent = None if self._absent is None else self._absent[sample_ids]
        indexed = tuple(values[sample_ids] for values in self._indexed)
        return Extents(shard, self._start[sample_ids], size, lengths, absent, indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        return self._bounds(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: 16 bytes per block, made in one pass over all samples."""
        return self._blocks(io_block_bytes)

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        shard = np.repeat(np.arange(len(self._first) - 1), np.diff(self._first))
        start, stop = self._start.min(axis=1), (self._start + self._size).max(axis=1)
        return blocks_of_unequal_samples(shard, start, stop, io_block_bytes)

    def digest(self) -> bytes:
        return self._digest


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
        self._blocks = kept_tables(
            lambda block_bytes: blocks_of_equal_samples(counts, stride_bytes, block_bytes)
        )

    def locate(self, sample_ids: Int64Array) -> Extents:
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
        return self._blocks(io_block_bytes)

    def digest(self) -> bytes:
        starts = b" " + self._start.astype("<i8").tobytes() if self._start.any() else b""
        return self._identity + starts


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """The keys of a dataset whose shards have columns.

    Attributes:
        schema: how to treat shards with different columns: `equal` refuses them; `union` serves
            the columns of all.
        columns: names of the columns to serve, such as `text`, or `label=class` to serve the column
            `class` under the name `label`; empty for all.
        defaults: with `union`, the values for samples of a shard without a column, by the name of
            the field; otherwise zeros, no bytes, or `null` of JSON.
    """

    schema: Literal["equal", "union"] = "equal"
    columns: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse fields that no batch can have, and defaults that nothing would use."""
        if self.defaults and self.schema == "equal":
            raise ConfigError('`defaults` needs `schema = "union"`')
        renamed(self.columns, "columns")

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names of the wanted fields, and of their columns; empty for all columns."""
        return tuple(renamed(self.columns, "columns"))

    @property
    def may_lack(self) -> bool:
        """Whether a shard may lack some of the columns."""
        return self.schema == "union"


@dataclass(frozen=True, slots=True)
class ColumnOptions(SchemaOptions):
    """The keys of an `arrow` or `parquet` dataset.

    Attributes:
        lengths: of columns of lists whose rows all have this many elements, which then are arrays
            of one shape, also where shards are appended; 0 where they stay ragged.
    """

    lengths: Mapping[str, Annotated[int, msgspec.Meta(ge=0)]] = field(default_factory=dict)

    @property
    def declared(self) -> Mapping[str, int]:
        """The lengths other than 0, by the names of the columns in their order."""
        return {name: length for name, length in sorted(self.lengths.items()) if length}

    @property
    def ragged(self) -> tuple[str, ...]:
        """See `Scan.ragged`."""
        return ragged_fields(self.lengths, self.pairs)


def chosen_columns(
    options: SchemaOptions, names: Sequence[str], shard: str
) -> list[tuple[str, int]]:
    """The names of the served fields, and the place of the column of each.

    Args:
        options: say which are wanted, and whether shards may lack some.
        names: of the columns of the shards.
        shard: the name of one of them.

    Raises:
        ConfigError: they lack one, or all, or no batch can have such a field.
    """
    wanted = options.pairs or tuple((name, name) for name in names)
    check_names([name for name, _ in wanted], "columns")
    known = [pair for pair in wanted if pair[1] in names]
    lacking = [name for _, name in wanted if name not in names]
    if not known or (lacking and options.schema == "equal"):
        raise ConfigError(
            f"there is no column {lacking[0]!r:.100}; the files have {', '.join(names):.1000}"
            if options.schema == "equal"
            else f"shard {shard} has none of the served columns; it has {', '.join(names):.1000}"
        )
    return [(field, names.index(name)) for field, name in known]


def common_schema(
    shards: Sequence[Shard],
    schemas: Sequence[_T | None],
    described: Callable[[_T], str],
    advice: str = "serve them as two datasets",
) -> _T | None:
    """The schema of all shards that have one.

    Raises:
        CorruptSample: a shard has another than the first one.
    """
    first, owner = None, ""
    for shard, schema in zip(shards, schemas, strict=True):
        if schema is None or schema == first:
            continue
        if first is not None:
            reason = f"it has {described(schema)}, and shard {owner} has {described(first)}"
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}; {advice}",
                {"shard": shard.name, "reason": reason},
            )
        first, owner = schema, shard.name
    return first


def are_compressed(shards: Sequence[Shard], flags: Sequence[bool]) -> bool:
    """Whether the shards are compressed.

    Raises:
        ConfigError: only some are.
    """
    some = [shard.name for shard, flag in zip(shards, flags, strict=True) if flag]
    if some and len(some) < len(shards):
        raise ConfigError(
            f"some shards are compressed, such as {some[0]}, and some are not. Compress all of "
            "them or none, or serve them as two datasets"
        )
    return bool(some)


def described(spec: FieldSpec) -> str:
    """A field in words, for messages."""
    kind = spec.codec if spec.codec in ("text", "json") else spec.dtype.name
    shape = "".join(f"[{size}]" for size in spec.shape)
    classes = f", of the classes {', '.join(spec.categories):.300}" if spec.categories else ""
    return f"{kind}{shape}{', ragged' * spec.ragged}{classes}"


def described_all(fields: Sequence[FieldSpec]) -> str:
    """The fields of a shard in words, for messages."""
    return "the columns " + ", ".join(f"{spec.name} ({described(spec)})" for spec in fields)
