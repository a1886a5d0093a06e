"""Columns: which are served, and shards with different ones as one dataset. Pure.

With `schema = "union"` a dataset has the columns of all its shards. A column whose numbers have
different dtypes gets the smallest dtype that holds all of them; a shard without a column serves a
default. See `concat` for the index of such a dataset.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from gyre_daemon.datasets.formats.base import (
    FieldSpec,
    check_names,
    ragged_fields,
    renamed,
)
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_T = TypeVar("_T")
_NUMBERS = ("bytes", "integer", "number", "cast")
# Of these the stored bytes differ, and the tensors do not.
_TEXTS = ("text", "quoted")


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which columns are served.

    Attributes:
        pairs: names of the fields, and of their columns; empty for all columns.
        may_lack: whether a file may lack some; columns of the type null are lacking, too.
        lengths: of lists that all have one, by the names of their columns.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    may_lack: bool = False
    lengths: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ColumnOptions(SchemaOptions):
    """The keys of an `arrow` or `parquet` dataset.

    Attributes:
        lengths: of columns of lists whose rows all have this many elements, which then are arrays
            of one shape, also where shards are appended; 0 where they stay ragged.
    """

    lengths: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse negative lengths."""
        SchemaOptions.__post_init__(self)
        for name, length in self.lengths.items():
            if length < 0:
                raise ConfigError(f"`lengths` of {name!r:.100} must be at least 0 (got {length})")

    @property
    def wanted(self) -> Wanted:
        """The chosen columns."""
        lengths = {name: length for name, length in self.lengths.items() if length}
        return Wanted(self.pairs, self.schema == "union", tuple(sorted(lengths.items())))

    @property
    def ragged(self) -> tuple[str, ...]:
        """See `Scan.ragged`."""
        return ragged_fields(self.lengths, self.pairs)


def scan_version(version: str, wanted: Wanted) -> str:
    """A version of scans that changes with their code and with the chosen columns."""
    union = ["union"] * wanted.may_lack
    pairs = [f"{field}={column}" for field, column in wanted.pairs]
    return " ".join([version, *union, *pairs, *(f"{name}:{size}" for name, size in wanted.lengths)])


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


@dataclass(frozen=True, slots=True)
class Schema:
    """The fields of some shards, all of one schema.

    Attributes:
        shard: the name of the first.
        fields: by name.
    """

    shard: str
    fields: Mapping[str, FieldSpec]


def union_field(name: str, schemas: Sequence[Schema], defaults: Mapping[str, Any]) -> FieldSpec:
    """The field of this name of all schemas; at least one has it.

    Raises:
        CorruptSample: two schemas have incompatible fields; names a shard of each.
        ConfigError: the default does not fit such a field.
    """
    owners = [schema for schema in schemas if name in schema.fields]
    common, first = owners[0].fields[name], owners[0]
    for owner in owners[1:]:
        wider = wider_field(common, owner.fields[name])
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
        lacking = replace(common, codec="default", default=default_bytes(common, defaults))
    forms = tuple(
        _form(schema.fields[name], common) if name in schema.fields else lacking
        for schema in schemas
    )
    return replace(common, forms=forms)


def default_bytes(spec: FieldSpec, defaults: Mapping[str, Any]) -> bytes:
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
    kind = f"{spec.dtype}{list(spec.shape) or ''}"
    try:
        found = np.array(value)
        if not found.size and spec.ragged:
            return b""
        wanted = (*found.shape[:1], *spec.shape) if spec.ragged else spec.shape
        values = np.broadcast_to(found, wanted)
        with np.errstate(all="ignore"):
            cast = values.astype(spec.dtype)
    except (TypeError, ValueError, OverflowError):
        raise _no_default(spec, value, kind) from None
    is_alike = found.dtype.kind in "biuf" and (found.dtype.kind == "b") == (spec.dtype.kind == "b")
    is_list = found.ndim > 0 or not spec.ragged
    if spec.dtype.kind == "f":
        is_lost = np.isinf(cast) & np.isfinite(values) if is_alike else np.array(True)
    else:
        is_lost = (cast != values) | ((cast < 0) != (values < 0))
    if not (is_alike and is_list) or is_lost.any():
        raise _no_default(spec, value, kind)
    return cast.tobytes()


def _no_default(spec: FieldSpec, value: Any, kind: str) -> ConfigError:
    a_list = "a list of " if spec.ragged and kind != "text" else ""
    return ConfigError(
        f"`defaults` of {spec.name!r:.100} is {value!r:.100}, and the field is {a_list}{kind}"
    )


def wider_field(one: FieldSpec, other: FieldSpec) -> FieldSpec | None:
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
    dtype = wider_dtype(one.dtype, other.dtype)
    return None if dtype is None else replace(one, dtype=dtype, codec="bytes")


def _is_opaque(spec: FieldSpec) -> bool:
    """Whether its bytes may be other than numbers."""
    return spec.ragged and spec.dtype == np.uint8 and not spec.shape


def wider_dtype(
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


def _unlike(name: str, schema: Schema, first: Schema) -> CorruptSample:
    reason = (
        f"its column {name!r:.100} is {described(schema.fields[name])}, and that of shard "
        f"{first.shard} is {described(first.fields[name])}"
    )
    return CorruptSample(
        f"shard {schema.shard} does not fit: {reason}; a union widens numbers only if no value "
        "changes; serve them as two datasets, or name the other columns in `columns`",
        {"shard": schema.shard, "reason": reason},
    )


def described(spec: FieldSpec) -> str:
    """A field in words, for messages."""
    kind = spec.codec if spec.codec in ("text", "json") else spec.dtype.name
    shape = "".join(f"[{size}]" for size in spec.shape)
    classes = f", of the classes {', '.join(spec.categories):.300}" if spec.categories else ""
    return f"{kind}{shape}{', ragged' * spec.ragged}{classes}"


def described_all(fields: Sequence[FieldSpec]) -> str:
    """The fields of a shard in words, for messages."""
    return "the columns " + ", ".join(f"{spec.name} ({described(spec)})" for spec in fields)
