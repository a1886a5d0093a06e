"""Rows of Arrow: which tensor a type becomes, its values as bytes, and where files have them.

Only compute workers import it; `columnar` has the formats. A column is read as its
*plain* type: without extensions, dictionaries and views, with decimals and times as numbers. So few
kinds of arrays are left. A missing value becomes zeros, no bytes where the field is ragged, or
`null` of JSON.
"""

import io
import json
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from gyre_daemon.datasets.formats.base import Arrays, CodecName, FieldSpec, check_names, corrupt
from gyre_daemon.datasets.formats.chunk_index import (
    MAX_CHUNK_BYTES,
    Column,
    ScannedChunk,
    StoredChunk,
    chunk_arrays,
    text_column,
)
from gyre_daemon.datasets.formats.sample_table import ColumnOptions
from gyre_daemon.errors import ConfigError

# Structs of exactly these are how Hugging Face datasets store images, audio and other files.
_FILE_FIELDS = {"bytes", "path"}
# Float64 tells decimals of up to this many digits from each other; longer ones are text.
_MAX_FLOAT_DIGITS = 15

_MAGIC, _MAGIC_BYTES = b"ARROW1", 8  # padded
_READ_BYTES = 1 << 20
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_NO_DATA = np.empty(0, np.uint8)

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ServedColumn:
    """A served column.

    Attributes:
        spec: its field.
        name: of the column.
        is_file: whether it is a struct of an encoded file and its path; only the file counts.
        is_nullable: whether a row may lack it, by the schema.
        is_nested: whether an array of one shape is in lists of lists.
        is_stored: whether an undecoded array has the tensors' bytes back to back.
        units: see `units_of`.
    """

    spec: FieldSpec
    name: str
    is_file: bool
    is_nullable: bool
    is_nested: bool
    is_stored: bool
    units: Mapping[str, str]

    @property
    def path(self) -> str:
        """The path of the leaf to read."""
        return f"{self.name}.bytes" if self.is_file else self.name

    def owns(self, leaf: str) -> bool:
        """Whether a column chunk of this path belongs to it."""
        return leaf == self.path or leaf.startswith(self.path + ".")


def served_columns(schema: Any, options: ColumnOptions) -> list[ServedColumn]:
    """The served columns.

    Args:
        schema: of pyarrow.
        options: say which columns.

    Raises:
        ConfigError: there is no such column, or a batch cannot have it.
    """
    names = list(schema.names)
    pairs = list(options.pairs) or [(name, name) for name in names]
    check_names([field for field, _ in pairs], "columns")
    columns, features, lengths = [], _features(schema), options.declared
    if absent := [name for name in lengths if name not in names and not options.may_lack]:
        raise ConfigError(
            f"`lengths` has {absent[0]!r:.100}, and the files have {', '.join(names):.1000}"
        )
    for field, name in pairs:
        if options.may_lack and _lacks(schema, name):
            continue
        if names.count(name) != 1:
            raise ConfigError(
                f"there {'is no column' if name not in names else 'are several columns'} "
                f"{name!r:.100}; the files have {', '.join(names):.1000}"
            )
        column, feature = schema.field(name), features.get(name)
        kind = plain_type(column.type)
        array = _array_of(field, kind, feature)
        if name in lengths:
            array = _of_length(field, name, column.type, lengths[name])
        spec = array or _field_of(field, column.type) or _document(field, column.type)
        if spec is None:
            raise ConfigError(
                f"column {name!r:.100} has the type {column.type!s:.200}, which becomes no "
                "tensor. Leave it out: name the others in `columns`, or write it as numbers, "
                "text or bytes."
            )
        is_file = types.is_struct(kind) and _is_file(kind)
        media_type = _media_type(feature) if is_file or _is_bytes(kind) else ""
        spec = replace(spec, categories=_categories(feature), media_type=media_type)
        is_whole = spec.codec != "json" and (array is None or name in lengths)
        columns.append(
            ServedColumn(
                spec,
                name,
                is_file,
                column.nullable,
                array is not None,
                is_whole and _is_stored(column.type),
                dict(units_of(column.type)),
            )
        )
    if options.may_lack and not columns:
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


def plain_type(kind: Any) -> Any:
    """The type as which the values of another one are read; itself where nothing changes."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return pa.large_string() if types.is_string_view(kind) else pa.large_binary()
    if types.is_decimal(kind):
        return pa.float64() if kind.precision <= _MAX_FLOAT_DIGITS else pa.string()
    if _is_time(kind):
        return pa.int32() if kind.bit_width == 32 or types.is_date(kind) else pa.int64()
    kind = with_children(kind, plain_type)
    if types.is_list_view(kind):
        return pa.list_(kind.value_field)
    return pa.large_list(kind.value_field) if types.is_large_list_view(kind) else kind


def _is_time(kind: Any) -> bool:
    return bool(types.is_temporal(kind) and not types.is_interval(kind))


def units_of(kind: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The numbers and times in a type: the path to each, such as `[].t`, and its type.

    Times have units, such as `timestamp[ms]`. Their time zones are left out: values are in UTC.
    """
    if isinstance(kind, pa.BaseExtensionType):
        yield from units_of(kind.storage_type, path)
    elif types.is_dictionary(kind):
        yield from units_of(kind.value_type, path)
    elif types.is_date(kind):  # all are served as days
        yield path, "date[day]"
    elif _is_time(kind):
        yield path, f"{str(kind).partition('[')[0]}[{kind.unit}]"
    elif types.is_nested(kind):
        for field in (kind.field(place) for place in range(kind.num_fields)):
            step = f".{field.name}" if types.is_struct(kind) else "[]"
            yield from units_of(field.type, path + step)
    elif types.is_integer(plain := plain_type(kind)) or types.is_floating(plain):
        yield path, str(kind)


def with_children(kind: Any, change: Callable[[Any], Any]) -> Any:
    """A type whose children have other types; itself if it has none, or none changes."""
    fields = [kind.field(place) for place in range(kind.num_fields)]
    inner = [field.with_type(change(field.type)) for field in fields]
    if inner == fields or types.is_union(kind) or types.is_run_end_encoded(kind):
        return kind
    if types.is_struct(kind):
        return pa.struct(inner)
    if types.is_fixed_size_list(kind):
        return pa.list_(inner[0], kind.list_size)
    if types.is_map(kind):
        return pa.map_(*inner[0].type)
    make = {"list": pa.list_, "large_list": pa.large_list, "list_view": pa.list_view}
    return make.get(str(kind).partition("<")[0], pa.large_list_view)(inner[0])


def _array_of(name: str, kind: Any, feature: Any) -> FieldSpec | None:
    """The field of an `Array2D` to `Array5D` of Hugging Face, which is in lists of lists.

    None if it is no such column, or its first dim differs from row to row.
    """
    if not isinstance(feature, dict) or not str(feature.get("_type")).startswith("Array"):
        return None
    shape = feature.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        return None
    for _ in shape:
        if not _is_list(kind):
            return None
        kind = kind.value_type
    inner = _field_of(name, kind)
    is_number = inner is not None and not inner.ragged and not inner.shape
    return replace(inner, shape=tuple(shape)) if inner and is_number else None


def _of_length(field: str, name: str, kind: Any, length: int) -> FieldSpec:
    """The field of lists that all have one length, by the operator's word."""
    spec = _field_of(field, kind)
    if spec is None or not _is_list(plain_type(kind)):
        raise ConfigError(
            f"`lengths` has {name!r:.100}, whose type {kind!s:.200} is no list of numbers"
        )
    return replace(spec, shape=(length, *spec.shape), ragged=False)


def _field_of(name: str, kind: Any) -> FieldSpec | None:
    """The field for a type of pyarrow; None if there is none."""
    if isinstance(kind, pa.FixedShapeTensorType):
        inner = _field_of(name, kind.value_type)
        is_permuted = kind.permutation not in (None, list(range(len(kind.shape))))
        if inner is None or inner.ragged or is_permuted or min(kind.shape, default=0) < 1:
            return None
        return replace(inner, shape=(*kind.shape, *inner.shape))
    if isinstance(kind, pa.BaseExtensionType):
        return _field_of(name, kind.storage_type)
    is_list = _is_list(plain_type(kind))
    if is_list or types.is_fixed_size_list(kind):
        inner = _field_of(name, kind.value_type)
        if inner is None or inner.ragged:
            return None
        if is_list:
            return replace(inner, ragged=True)
        is_some = kind.list_size > 0
        return replace(inner, shape=(kind.list_size, *inner.shape)) if is_some else None
    kind = plain_type(kind)
    is_bytes = _is_bytes(kind) or (types.is_struct(kind) and _is_file(kind))
    if is_bytes or _is_text(kind):
        codec: CodecName = "bytes" if is_bytes else "text"
        return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec=codec)
    if types.is_fixed_size_binary(kind):
        spec = FieldSpec(name, np.dtype(np.uint8), (kind.byte_width,), ragged=False, codec="bytes")
        return spec if kind.byte_width else None
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        return None
    return FieldSpec(name, np.dtype(kind.to_pandas_dtype()), (), ragged=False, codec="bytes")


def _document(name: str, kind: Any) -> FieldSpec | None:
    """The field of JSON for a type that no tensor has; None if JSON has none of it."""
    is_document = types.is_nested(kind) or types.is_null(kind)
    if not is_document or not _is_json(plain_type(kind)):
        return None
    return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec="json")


def _is_stored(kind: Any) -> bool:
    """Whether Arrow has the values of a type back to back, as bytes or a bit each."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_stored(kind.storage_type)
    if types.is_struct(kind):
        return _is_stored(kind.field("bytes").type)
    if _is_list(kind) or types.is_fixed_size_list(kind):
        return plain_type(kind.value_type) != pa.bool_() and _is_stored(kind.value_type)
    is_time = _is_time(kind) and not types.is_date64(kind)  # which has milliseconds, not days
    return bool(is_time or plain_type(kind) == kind)


def _is_list(kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _is_text(kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_bytes(kind: Any) -> bool:
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _is_json(kind: Any) -> bool:
    """Whether JSON has all values of a type: objects, lists, texts, numbers and booleans."""
    if types.is_struct(kind):
        names = [kind.field(place).name for place in range(kind.num_fields)]
        if len(set(names)) < len(names):  # an object of JSON has each key once
            return False
        return all(_is_json(kind.field(place).type) for place in range(kind.num_fields))
    if types.is_map(kind):
        return not types.is_nested(kind.key_type) and all(
            map(_is_json, (kind.key_type, kind.item_type))
        )
    if _is_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return bool(is_number or types.is_null(kind) or _is_text(kind))


def _is_file(kind: Any) -> bool:
    names = {kind.field(place).name for place in range(kind.num_fields)}
    return names == _FILE_FIELDS and _is_bytes(kind.field("bytes").type)


def column_of(chunks: Sequence[Any], spec: FieldSpec) -> Column:
    """A column for arrays of pyarrow that follow each other.

    Raises:
        ValueError: a list has nulls among its elements, or the column is too large.
    """
    arrays = [_plain(array) for array in chunks]
    try:
        array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    except pa.ArrowInvalid as error:  # its offsets do not fit into 32 bits
        raise ValueError(f"it has more than {MAX_CHUNK_BYTES >> 30} GiB") from error
    if spec.codec == "json":
        return _documents(array)
    if types.is_struct(array.type):
        array = _files(array, spec.name)
    present = _valid(array)
    if not spec.ragged:
        data = _nested(array, spec) if _is_list(array.type) else _as_bytes(_fixed(array))
        return Column(data, None, present)
    if _is_list(array.type):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        data = _as_bytes(_fixed(_without_nulls(array.flatten())))
        return Column(data, np.cumsum(lengths, dtype=np.int64) * spec.element_bytes, present)
    data, ends = _bytes(array, present)
    return Column(data, ends, present)


def _files(array: Any, name: str) -> Any:
    """The bytes of structs of files, none of which has its path alone."""
    leaves = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
    if "path" in leaves:
        check_no_paths(name, leaves["bytes"].is_null(), leaves["path"])
    return leaves["bytes"]


def check_no_paths(name: str, lacks_bytes: Any, paths: Any) -> None:
    """Refuse files outside of a table.

    Args:
        name: of the column.
        lacks_bytes: bool [R], of pyarrow.
        paths: [R], of pyarrow.

    Raises:
        ValueError: a row has a path and no bytes.
    """
    outside = np.flatnonzero(np.asarray(lacks_bytes) & np.asarray(paths.is_valid()))
    if len(outside):
        raise ValueError(
            f"column {name!r:.100} has no bytes in row {outside[0]}, only the path "
            f"{paths[int(outside[0])]!s:.200}. Write the files into the table "
            "(`Dataset.to_parquet` of `datasets` does)."
        )


def _nested(array: Any, spec: FieldSpec) -> npt.NDArray[np.uint8]:
    """Arrays of one shape in lists of lists; zeros where one is missing."""
    is_there = np.asarray(array.is_valid())
    values = array.drop_null()
    for size in spec.shape:
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != size).any():
            wrong = lengths[lengths != size][0]
            raise ValueError(f"a row has a list of {wrong} elements, and {size} are declared")
        values = _without_nulls(values.flatten())
        if not _is_list(values.type):
            break
    flat = _as_bytes(_fixed(values)).reshape(len(values) and int(is_there.sum()), -1)
    found = np.zeros((len(array), spec.element_bytes), np.uint8)
    if len(flat):
        found[is_there] = flat
    return found.reshape(-1)


def _documents(array: Any) -> Column:
    """The values as JSON, `null` where one is missing; of a key that a map has twice, the last."""
    with warnings.catch_warnings(action="ignore"):
        values = array.to_pylist(maps_as_pydicts="lossy")
    documents = [json.dumps(value, separators=(",", ":")).encode() for value in values]
    return replace(text_column(documents), present=_valid(array))


def _plain(array: Any) -> Any:
    """The same values with a plain type.

    pyarrow 26 loses values of views in lists when it casts them, so this goes level by level.
    """
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    kind, plain = array.type, plain_type(array.type)
    if plain == kind:
        return array
    if not types.is_nested(kind):
        return (array.cast(pa.date32()) if types.is_date64(kind) else array).cast(plain)
    absent = array.is_null()
    if types.is_struct(kind):
        fields = [_plain(array.field(place)) for place in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(plain), mask=absent)
    if types.is_fixed_size_list(kind):
        begin, size = array.offset * kind.list_size, len(array) * kind.list_size
        values = _plain(array.values[begin : begin + size])
        return pa.FixedSizeListArray.from_arrays(values, type=plain, mask=absent)
    if types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    ends, values = np.cumsum(lengths), _plain(array.flatten())
    if types.is_map(kind):
        offsets = np.concatenate(([0], ends)).astype(np.int32)
        keys, items = values.flatten()
        return pa.MapArray.from_arrays(offsets, keys, items, type=plain, mask=absent)
    is_large = types.is_large_list(plain)
    offsets = np.concatenate(([0], ends)).astype(np.int64 if is_large else np.int32)
    make = pa.LargeListArray if is_large else pa.ListArray
    return make.from_arrays(offsets, values, type=plain, mask=absent)


def _valid(array: Any) -> _Bools | None:
    """Which values are there; None for all."""
    if not array.null_count:
        return None
    valid: _Bools = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _without_nulls(values: Any) -> Any:
    values = _plain(values)
    if values.null_count:
        raise ValueError("a list has nulls among its elements, which no tensor has")
    return values


def _bytes(
    array: Any, present: _Bools | None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes of strings, and where each ends."""
    if not len(array):
        return np.empty(0, np.uint8), np.empty(0, np.int64)
    is_large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    _, offsets, values = array.buffers()
    begin = array.offset * dtype.itemsize
    ends = np.frombuffer(offsets, dtype, len(array) + 1, begin).astype(np.int64)
    if present is not None and np.diff(ends)[~present].any():
        return _bytes(array.cast(pa.large_binary()).fill_null(b""), None)
    data = np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8)
    return data[ends[0] : ends[-1]], ends[1:] - ends[0]


def _fixed(array: Any) -> npt.NDArray[np.generic]:
    """The values of an array whose values have one size, `[n, ...]`."""
    array = _plain(array)
    valid = _valid(array)
    if types.is_fixed_size_list(array.type):
        flat = _fixed(_without_nulls(array.flatten()))
        some = flat.reshape(-1, array.type.list_size, *flat.shape[1:])
        if valid is None:
            return some
        values = np.zeros((len(array), *some.shape[1:]), some.dtype)
        values[valid] = some
        return values
    values = _primitive(array)
    if valid is not None:
        values = values.copy()
        values[~valid] = 0
    return values


def _primitive(array: Any) -> npt.NDArray[np.generic]:
    if types.is_boolean(array.type):
        bools: npt.NDArray[np.generic] = array.fill_null(False).to_numpy(zero_copy_only=False)
        return bools
    width = array.type.byte_width
    if not len(array):
        return np.empty((0, width), np.uint8)
    data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
    return data.reshape(len(array), width)


def _as_bytes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class _Messages:
    """The messages of a file or stream, one after the other.

    A file of this node is mapped, so that of the bodies only the touched pages are read; any other
    is read once, from its beginning to its end.

    Attributes:
        offset: of the message read now.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.offset = 0
        try:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            buffered = io.BufferedReader(cast("io.RawIOBase", file), _READ_BYTES)
            self._is_file = buffered.peek(1).startswith(_MAGIC[:1])
            self._source = pa.PythonFile(buffered, "r")
        else:
            self._is_file = memory[:1] == _MAGIC[:1]
            self._source = pa.BufferReader(pa.py_buffer(memory))

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """All messages of pyarrow, each with the byte at which it ends.

        Raises:
            ValueError: one is damaged, or the file is cut off.
        """
        source, is_file = self._source, self._is_file
        if is_file and not _parsed(source.read, _MAGIC_BYTES).startswith(_MAGIC):
            raise ValueError("it does not begin as an Arrow file does")
        while True:
            self.offset = source.tell()
            try:
                message = _parsed(pa.ipc.read_message, source)
            except EOFError:
                break
            yield message, source.tell()
        if source.tell() == self.offset:
            raise ValueError("it ends without the mark at the end of a stream; it is cut off")
        rest = b""
        while more := _parsed(source.read, _READ_BYTES):
            rest = (rest + more)[-len(_MAGIC) :]
        if is_file and not rest.endswith(_MAGIC):
            raise ValueError("it does not end as an Arrow file does; it is cut off")
        if rest and not is_file:
            raise ValueError("it goes on behind the end of its stream")


def scan_arrow(options: ColumnOptions, shard: str, file: BinaryIO) -> Arrays:
    """The `chunk_arrays` of a file, whose chunks are its record batches.

    Where the buffers of the file have the tensors' bytes, rows are found there (`base`). Otherwise
    record batches must be decoded.

    Args:
        options: say which columns.
        shard: for messages.
        file: see `_Messages`.

    Raises:
        CorruptSample: it is damaged; with the offset of the message.
        ConfigError: the columns do not fit.
    """
    messages = _Messages(file)
    try:
        return _scan(messages, options)
    except ConfigError as error:
        raise ConfigError(f"shard {shard}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise corrupt(shard, messages.offset, f"{error!s:.500}") from error


def _scan(messages: _Messages, options: ColumnOptions) -> Arrays:
    schema: Any = None
    found: _Batches | None = None
    head: list[Any] = []  # the schema and the dictionaries before all record batches
    begin = 0
    for message, stop in messages:
        kind = message.type
        if (kind == "schema") != (schema is None):
            raise ValueError("it has two schemas" if schema else "it does not begin with a schema")
        if kind == "record batch":
            num_rows = _parsed(pa.ipc.read_record_batch, message, pa.schema([])).num_rows
            if num_rows > MAX_CHUNK_BYTES:  # a damaged one may claim so
                raise ValueError(_TOO_LARGE)
            if num_rows:
                shared = begin, messages.offset
                found = found or _Batches(schema, options, message, head, shared)
                found.add(message, num_rows, messages.offset, stop)
            continue
        if kind == "schema":
            schema, begin = _parsed(pa.ipc.read_schema, message), messages.offset
        elif kind != "dictionary":
            raise ValueError(f"it has a message of the kind {kind}")
        elif found:
            found.take_dictionary()
        head.append(message)
    if schema is None:
        raise ValueError("it has no schema")
    return found.arrays() if found else chunk_arrays([], [], units=[])


def _parsed(parse: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of pyarrow, whose errors are ValueErrors."""
    try:
        return parse(*arguments)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(str(error)) from error
    except MemoryError as error:
        raise ValueError("a message claims more bytes than fit into memory") from error


def _undecoded_schema(schema: Any) -> Any:
    """The schema of the stored arrays: without extensions, and of indices in dictionaries.

    pyarrow reads a record batch of it without the dictionaries.
    """

    def stored(kind: Any) -> Any:
        if isinstance(kind, pa.BaseExtensionType):
            return stored(kind.storage_type)
        return kind.index_type if types.is_dictionary(kind) else with_children(kind, stored)

    return pa.schema([field.with_type(stored(field.type)) for field in schema])


def _batch(message: Any, schema: Any) -> Any:
    """The record batch of a message, whose buffers are in its body; None if it is compressed."""
    try:
        batch = pa.ipc.read_record_batch(message, schema)
    except OSError:  # its compressed data is damaged
        return None
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    begin = message.body.address
    stop = begin + message.body.size
    buffers = [each for column in batch.columns for each in column.buffers() if each]
    is_inside = all(begin <= each.address <= each.address + each.size <= stop for each in buffers)
    return batch if is_inside else None


_TOO_LARGE = f"a record batch has more than {MAX_CHUNK_BYTES >> 30} GiB"


class _Batches:
    """The record batches of a file, each a chunk.

    Where the buffers of the file have the tensors' bytes, the address of a buffer, minus that of
    its body, is its place in the file. Otherwise a chunk is decoded from its message and from the
    messages before all record batches: the schema and the dictionaries. Together they are a valid
    stream.

    Attributes:
        are_decoded: whether chunks are decoded.
    """

    def __init__(
        self,
        schema: Any,
        options: ColumnOptions,
        first: Any,
        head: Sequence[Any],
        shared: tuple[int, int],
    ) -> None:
        """Decide by the first record batch; `head` are all messages before it, and `shared` where.

        Raises:
            ConfigError: the columns do not fit.
        """
        self._columns, self._schema = served_columns(schema, options), _undecoded_schema(schema)
        self._specs = [column.spec for column in self._columns]
        are_stored = all(column.is_stored for column in self._columns)
        self.are_decoded = not are_stored or _batch(first, self._schema) is None
        self._head = b"".join(each.serialize() for each in head) if self.are_decoded else b""
        self._shared = shared
        self._chunks: list[ScannedChunk] = []

    def add(self, message: Any, num_rows: int, offset: int, stop: int) -> None:
        """Take the record batch at bytes `[offset, stop)` of the file."""
        if self.are_decoded:
            chunk = self._decode(message, ScannedChunk(num_rows, [(offset, stop)]), stop)
        else:
            begin = stop - message.body.size
            stored = ScannedChunk(num_rows, [(begin, stop)], parameters=[offset])
            chunk = self._find(message, stored, begin)
        self._chunks.append(chunk)

    def take_dictionary(self) -> None:
        """Take a dictionary behind the first record batch.

        Raises:
            ConfigError: record batches are decoded.
        """
        if self.are_decoded:
            raise ConfigError(
                "the file has dictionaries behind its first record batch, which is not read "
                "where batches are decoded. Write it as Parquet, or without dictionaries."
            )
        self._shared = (0, 0)

    def arrays(self) -> Arrays:
        """See `chunk_arrays`."""
        units = [column.units for column in self._columns]
        return chunk_arrays(self._specs, self._chunks, self._shared, units)

    def _decode(self, message: Any, chunk: ScannedChunk, stop: int) -> ScannedChunk:
        """Decode a record batch, and note where its rows end."""
        fixed = sum(spec.element_bytes for spec in self._specs if not spec.ragged)
        if chunk.num_rows * fixed > MAX_CHUNK_BYTES:  # a damaged one may claim so
            raise ValueError(_TOO_LARGE)
        try:
            batch = _decoded(self._head, message.serialize())
            its = _columns_of(batch, self._columns)
        except ValueError as error:
            if chunk.num_rows > 8 * stop:
                raise ValueError(f"a damaged record batch claims {chunk.num_rows} rows") from error
            return replace(chunk, damage=str(error))
        if sum(column.data.nbytes for column in its) > MAX_CHUNK_BYTES:
            raise ValueError(_TOO_LARGE)
        return replace(chunk, columns=[column.without_data for column in its])

    def _find(self, message: Any, chunk: ScannedChunk, begin: int) -> ScannedChunk:
        """Find the columns of a record batch in the file."""
        batch = _batch(message, self._schema)
        if batch is None:
            raise ConfigError("some record batches are compressed and some are not; write it again")
        moved = begin - message.body.address
        found = []
        for column in self._columns:
            array = batch.column(column.name)
            _parsed(array.validate)  # lengths, and sizes of buffers
            found.append(_stored_column(array, column.spec, moved))
        places = [(base, first) for base, first, _ in found]
        return replace(chunk, columns=[each for _, _, each in found], places=places)


def decode_batch(options: ColumnOptions, chunk: StoredChunk) -> Sequence[Column]:
    """The columns of a record batch.

    Raises:
        ValueError: it is damaged.
    """
    (_, shared), (_, data) = chunk.pieces
    batch = _decoded(shared, data)
    return _columns_of(batch, served_columns(batch.schema, options))


def _decoded(shared: bytes | memoryview, data: Any) -> Any:
    """The record batch of a message, with those before all record batches."""
    try:
        options = pa.ipc.IpcReadOptions(use_threads=False)
        stream = pa.BufferReader(b"".join((shared, data, _END)))
        batches = pa.ipc.open_stream(stream, options=options)
        while not (batch := batches.read_next_batch()).num_rows:
            pass  # before the first with rows, some may have none
        batch.validate(full=True)
    except (OSError, StopIteration, pa.ArrowException) as error:
        raise ValueError(f"a record batch cannot be read: {error!s:.500}") from error
    return batch


def _columns_of(batch: Any, columns: Sequence[ServedColumn]) -> list[Column]:
    return [column_of([batch.column(column.name)], column.spec) for column in columns]


def _stored_column(array: Any, spec: FieldSpec, moved: int) -> tuple[int, int, Column]:
    """A served column of a record batch, whose addresses become places in the file if `moved`.

    Returns:
        Where its values begin in the file; how far behind the first row begins; and the column,
        with data where they are no bytes of the file.
    """
    kind, present = array.type, _valid(array)
    if types.is_struct(kind):  # of a file and its path
        _files(array, spec.name)
        base, first, column = _stored_column(array.field("bytes"), spec, moved)
        both = [each for each in (present, column.present) if each is not None]
        return base, first, replace(column, present=np.logical_and.reduce(both) if both else None)
    if types.is_boolean(kind):
        return 0, 0, Column(_as_bytes(_primitive(array)), None, present)
    if not spec.ragged and not _is_list(kind):
        return _place_of(array, moved, present), 0, Column(_NO_DATA, None, present)
    offsets = _offsets(array)
    bounds, data = array.buffers()[1:3]
    # an empty buffer has no address, and pyarrow aligns those that it writes to 8 bytes
    behind = -(-(bounds.address + moved + bounds.size) // 8) * 8
    length, base = 1, data.address + moved if data else behind
    if _is_list(kind):
        length = 1 if spec.ragged else spec.shape[0]
        base = _place_of(array.values, moved, present, offsets) or behind
    ends = offsets * (spec.element_bytes // length)
    if spec.ragged:
        if ends[-1] - ends[0] >= 1 << 32:
            raise ConfigError(
                f"a record batch has more than 4 GiB of {spec.name!r:.100}; write smaller ones"
            )
        return base, int(ends[0]), Column(_NO_DATA, ends[1:] - ends[0], present)
    if len(wrong := np.flatnonzero(np.diff(offsets) != length)):
        row = int(wrong[0])
        is_null = present is not None and not present[row]
        has = "is null" if is_null else f"has {offsets[row + 1] - offsets[row]} elements"
        raise ConfigError(
            f"a row of {spec.name!r:.100} {has}, and `lengths` says {length}. Correct it, or "
            "leave the column out of `lengths`"
        )
    return base + int(ends[0]), 0, Column(_NO_DATA, None, present)


def _offsets(array: Any) -> npt.NDArray[np.int64]:
    """Int64 [n + 1], the offsets of n texts, byte strings or lists, within their values."""
    kind, bounds = array.type, array.buffers()[1]
    is_large = types.is_large_string(kind) or types.is_large_binary(kind)
    dtype = np.dtype("<i8" if is_large or types.is_large_list(kind) else "<i4")
    offsets = np.frombuffer(bounds, dtype, len(array) + 1).astype(np.int64)
    if (np.diff(offsets) < 0).any():
        raise ValueError("a record batch has offsets that do not rise")
    return offsets


def _place_of(
    array: Any, moved: int, present: _Bools | None, offsets: npt.NDArray[np.int64] | None = None
) -> int:
    """The first byte of values of one size, 0 for none; lists of them may have no null element.

    `offsets` are those of the rows among the values; None where each row is one.
    """
    is_first = offsets is None
    if offsets is None:
        offsets = np.arange(len(array) + 1)
    while True:
        valid = None if is_first else _valid(array)
        if valid is not None:
            missing = np.concatenate(([0], np.cumsum(~valid)))
            has_null = missing[offsets[1:]] != missing[offsets[:-1]]
            if (has_null if present is None else has_null & present).any():
                raise ConfigError(
                    "a column has lists with nulls among their elements, which become no "
                    "tensor; leave it out: name the others in `columns`"
                )
        if not types.is_fixed_size_list(array.type):
            break
        offsets, is_first = offsets * array.type.list_size, False
        array = array.values
    data = array.buffers()[1]
    return data.address + moved if data else 0
