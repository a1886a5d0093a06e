"""Which tensor each column of a Parquet file becomes. Only processes that decode import it."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from gyre_daemon.datasets.formats.arrow_columns import Wanted
from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.names import check_names
from gyre_daemon.errors import ConfigError

_TIMES = {"date32": "<i4", "time32": "<i4", "date64": "<i8", "time64": "<i8"}
# Structs of exactly these are how Hugging Face datasets store images, audio and other files.
_FILE_FIELDS = {"bytes", "path"}


@dataclass(frozen=True, slots=True)
class ServedColumn:
    """A served column.

    Attributes:
        spec: its field.
        name: of the column.
        is_file: whether it is a struct of an encoded file and its path; only the file counts.
        is_nullable: whether a row may lack it, by the schema.
        is_nested: whether an array of one shape is in lists of lists.
    """

    spec: FieldSpec
    name: str
    is_file: bool
    is_nullable: bool
    is_nested: bool = False

    @property
    def path(self) -> str:
        """The path of the leaf to read."""
        return f"{self.name}.bytes" if self.is_file else self.name

    def owns(self, leaf: str) -> bool:
        """Whether a column chunk of this path belongs to it."""
        return leaf == self.path or leaf.startswith(self.path + ".")


def served_columns(schema: Any, wanted: Wanted) -> list[ServedColumn]:
    """The served columns.

    Args:
        schema: of pyarrow.
        wanted: which columns.

    Raises:
        ConfigError: there is no such column, or a batch cannot have it.
    """
    names = list(schema.names)
    pairs = list(wanted.pairs) or [(name, name) for name in names]
    check_names([field for field, _ in pairs], "columns")
    columns, features, lengths = [], _features(schema), dict(wanted.lengths)
    if absent := [name for name in lengths if name not in names and not wanted.may_lack]:
        raise ConfigError(
            f"`lengths` has {absent[0]!r:.100}, and the files have {', '.join(names):.1000}"
        )
    for field, name in pairs:
        if wanted.may_lack and _lacks(schema, name):
            continue
        if names.count(name) != 1:
            raise ConfigError(
                f"there {'is no column' if name not in names else 'are several columns'} "
                f"{name!r:.100}; the files have {', '.join(names):.1000}"
            )
        column = schema.field(name)
        array = _array_of(field, column.type, features.get(name))
        if name in lengths:
            array = _of_length(field, name, column.type, lengths[name])
        spec = array or field_of(field, column.type) or _document(field, column.type)
        if spec is None:
            raise ConfigError(
                f"column {name!r:.100} has the type {column.type!s:.200}, which becomes no "
                "tensor. Leave it out: name the others in `columns`, or write it as numbers, "
                "text or bytes."
            )
        feature, is_file = (
            features.get(name),
            types.is_struct(column.type) and _is_file(column.type),
        )
        media_type = _media_type(feature) if is_file or _is_bytes(column.type) else ""
        spec = replace(spec, categories=_categories(feature), media_type=media_type)
        columns.append(ServedColumn(spec, name, is_file, column.nullable, array is not None))
    if wanted.may_lack and not columns:
        raise ConfigError(f"it has none of the columns to serve; it has {', '.join(names):.1000}")
    return columns


def _lacks(schema: Any, name: str) -> bool:
    """Whether a file has no value in a column."""
    return name not in schema.names or (
        schema.names.count(name) == 1 and types.is_null(schema.field(name).type)
    )


def _features(schema: Any) -> dict[str, Any]:
    """The features of the columns in the metadata of Hugging Face datasets."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, dict) else {}


def _media_type(feature: Any) -> str:
    """The type of a column's files, if the metadata of Hugging Face datasets has it."""
    kind = feature.get("_type") if isinstance(feature, dict) else None
    return f"{kind.lower()}/*" if kind in ("Image", "Audio", "Video") else ""


def _categories(feature: Any) -> tuple[str, ...]:
    """The names of the classes, if a column has classes."""
    names = feature.get("names") if isinstance(feature, dict) else None
    is_class = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if names and is_class else ()


def _array_of(name: str, kind: Any, feature: Any) -> FieldSpec | None:
    """The field of an `Array2D` to `Array5D` of Hugging Face, which is in lists of lists.

    Returns:
        None if it is no such column, or its first dim differs from row to row.
    """
    if not isinstance(feature, dict) or not str(feature.get("_type")).startswith("Array"):
        return None
    shape, kind = feature.get("shape"), _storage(kind)
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        return None
    for _ in shape:
        if not types.is_list(kind) and not types.is_large_list(kind):
            return None
        kind = _storage(kind.value_type)
    inner = field_of(name, kind)
    is_number = inner is not None and not inner.ragged and not inner.shape
    return replace(inner, shape=tuple(shape)) if inner and is_number else None


def _of_length(field: str, name: str, kind: Any, length: int) -> FieldSpec:
    """The field of lists that all have one length, by the operator's word.

    Raises:
        ConfigError: the column has no lists of numbers.
    """
    spec, kind = field_of(field, kind), _storage(kind)
    if spec is None or not (types.is_list(kind) or types.is_large_list(kind)):
        raise ConfigError(
            f"`lengths` has {name!r:.100}, whose type {kind!s:.200} is no list of numbers"
        )
    return replace(spec, shape=(length, *spec.shape), ragged=False)


def _storage(kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def field_of(name: str, kind: Any) -> FieldSpec | None:
    """The field for a type of pyarrow; None if there is none."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor(name, kind)
    if isinstance(kind, pa.BaseExtensionType):
        return field_of(name, kind.storage_type)
    if types.is_dictionary(kind):
        return field_of(name, kind.value_type)
    if _is_text(kind):
        return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec="text")
    if _is_bytes(kind) or (types.is_struct(kind) and _is_file(kind)):
        return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec="bytes")
    if types.is_fixed_size_binary(kind):
        shape = (kind.byte_width,)
        is_one = kind.byte_width > 0
        spec = FieldSpec(name, np.dtype(np.uint8), shape, ragged=False, codec="bytes")
        return spec if is_one else None
    if types.is_fixed_size_list(kind):
        inner = field_of(name, kind.value_type)
        if inner is None or inner.ragged or kind.list_size < 1:
            return None
        return replace(inner, shape=(kind.list_size, *inner.shape))
    if types.is_list(kind) or types.is_large_list(kind):
        inner = field_of(name, kind.value_type)
        return None if inner is None or inner.ragged else replace(inner, ragged=True)
    dtype = _number(kind)
    return None if dtype is None else FieldSpec(name, dtype, (), ragged=False, codec="bytes")


def _tensor(name: str, kind: Any) -> FieldSpec | None:
    """The field of a tensor of one shape; None if its dims are permuted, or it has no values."""
    inner = field_of(name, kind.value_type)
    is_permuted = kind.permutation not in (None, list(range(len(kind.shape))))
    if inner is None or inner.ragged or is_permuted or min(kind.shape, default=0) < 1:
        return None
    return replace(inner, shape=(*kind.shape, *inner.shape))


def _document(name: str, kind: Any) -> FieldSpec | None:
    """The field of JSON for a nested type that no tensor has; None if JSON has none of it."""
    if not types.is_nested(kind) or not _is_json(kind):
        return None
    return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec="json")


def _number(kind: Any) -> np.dtype[np.generic] | None:
    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind):
        found: np.dtype[np.generic] = np.dtype(kind.to_pandas_dtype())
        return found
    if types.is_timestamp(kind) or types.is_duration(kind):
        return np.dtype("<i8")
    name = str(kind).partition("[")[0]
    return np.dtype(_TIMES[name]) if name in _TIMES else None


def _is_text(kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_json(kind: Any) -> bool:
    """Whether JSON has all values of a type: objects, lists, texts, numbers and booleans."""
    if types.is_struct(kind):
        names = [kind.field(place).name for place in range(kind.num_fields)]
        if len(set(names)) < len(names):  # an object of JSON has each key once
            return False
        return all(_is_json(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(is_number or types.is_null(kind) or _is_text(kind))


def _is_file(kind: Any) -> bool:
    names = {kind.field(place).name for place in range(kind.num_fields)}
    return names == _FILE_FIELDS and _is_bytes(kind.field("bytes").type)
