"""Finds the rows in the record batches of an Arrow file. Only scan processes import it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from gyre_daemon.datasets.formats.arrow.compressed import scan_compressed
from gyre_daemon.datasets.formats.arrow.messages import Messages, RecordBatch
from gyre_daemon.datasets.formats.arrow_columns import Wanted
from gyre_daemon.datasets.formats.base import Arrays, FieldSpec
from gyre_daemon.datasets.formats.parquet.columns import ServedColumn, served_columns
from gyre_daemon.errors import ConfigError, CorruptSample

_Bits = npt.NDArray[np.bool_]
_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Found:
    """One column of the n rows of a record batch.

    Attributes:
        base: the first byte of its values in the file.
        ends: int64 [n + 1], where each row begins and ends behind the base, in bytes; None if all
            rows have the same size.
        present: bool [n], which rows have a value; None if all do.
        bits: bool [n], the values of booleans, which are no bytes of the file.
    """

    base: int
    ends: _Int64 | None = None
    present: _Bits | None = None
    bits: _Bits | None = None


def scan_arrow(wanted: Wanted, shard: str, file: BinaryIO) -> Arrays:
    """Where the N rows of C record batches lie, with F columns that are served.

    Where record batches must be decoded, it returns what `scan_compressed` does.

    Args:
        wanted: which columns.
        shard: for messages.
        file: is read around the metadata, and where lengths and nulls are.

    Returns:
        rows: int64 [C], of each record batch; none is empty.
        body: int64 [C, 2], first byte and end of each record batch.
        base: int64 [C, F], where the values of each column begin.
        first: int64 [C, R], where the first row begins behind the base, of each ragged column.
        ends: int64 [N, R], where each row ends behind the base.
        present: bool [N, P], of the columns that some row lacks.
        optional: int64 [P], which columns these are.
        bits: bool [N, B], the values of the columns of booleans.
        columns: JSON, of each column its name, dtype, shape, whether it is ragged, its codec, and
            what its values stand for.

    Raises:
        CorruptSample: it is damaged; with the offset of the message.
        ConfigError: the columns do not fit.
    """
    messages = Messages(file)
    try:
        found = _scan(messages, wanted)
        return scan_compressed(wanted, file) if found is None else found
    except ConfigError as error:
        raise ConfigError(f"shard {shard}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        reason = f"{error!s:.500}"
        raise CorruptSample(
            f"shard {shard} at byte {messages.offset}: {reason}",
            {"shard": shard, "offset": messages.offset, "reason": reason},
        ) from error


def _scan(messages: Messages, wanted: Wanted) -> Arrays | None:
    """See `scan_arrow`; None if record batches must be decoded: compressed ones, or for JSON."""
    schema: Any = None
    columns: list[ServedColumn] = []
    batches: list[RecordBatch] = []
    found: list[list[_Found]] = []
    for message in messages:
        if message.schema:
            if schema is not None:
                raise ValueError("it has two schemas")
            schema = _schema_of(message.schema)
        elif schema is None:
            raise ValueError("it does not begin with a schema")
        elif message.batch and message.batch.num_rows:
            if message.batch.compression and not batches:
                return None
            if not batches and _has_documents(schema, wanted):
                return None
            columns = columns or _served(schema, wanted)
            batches.append(message.batch)
            found.append(_columns_of(messages, message.batch, schema, columns))
    if schema is None:
        raise ValueError("it has no schema")
    return _joined(columns, batches, found)


def _schema_of(message: bytes) -> Any:
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"its schema cannot be read: {error}") from error


def _has_documents(schema: Any, wanted: Wanted) -> bool:
    """Whether a column becomes JSON, which no range of the file is."""
    return any(column.spec.codec == "json" for column in served_columns(schema, wanted))


def _served(schema: Any, wanted: Wanted) -> list[ServedColumn]:
    """The columns that are served; refuses those that are no ranges of bytes.

    Raises:
        ConfigError: with the column.
    """
    columns = []
    for column in served_columns(schema, wanted):
        kind = _storage(schema.field(column.name).type)
        if not _is_addressable(kind):
            raise ConfigError(
                f"column {column.name!r:.100} has the type {kind!s:.200}, which an Arrow file does "
                "not store as ranges of bytes; leave it out: name the others in `columns`, or cast "
                "it when you write the file"
            )
        columns.append(column)
    return columns


def _is_addressable(kind: Any) -> bool:
    """Whether each value of a type that a batch can have is a range of bytes, or one bit."""
    if types.is_dictionary(kind) or types.is_string_view(kind) or types.is_binary_view(kind):
        return False
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _storage(kind.value_type)
        return not types.is_boolean(inner) and _is_addressable(inner)
    return True


def _storage(kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _columns_of(
    messages: Messages, batch: RecordBatch, schema: Any, columns: Sequence[ServedColumn]
) -> list[_Found]:
    if batch.compression:
        raise ConfigError(
            f"some record batches are compressed ({batch.compression}) and some are not; write the "
            "file again"
        )
    walk = _Walk(messages, batch)
    served = {column.name: column for column in columns}
    found: dict[str, _Found] = {}
    for field in schema:
        kind = _storage(field.type)
        if field.name in served:
            column = served[field.name]
            found[field.name] = (
                walk.file(kind) if column.is_file else walk.column(kind, column.spec)
            )
        else:
            walk.skip(kind)
    walk.end()
    return [found[column.name] for column in columns]


class _Walk:
    """Goes through the arrays and buffers of a record batch, in the order of its schema."""

    def __init__(self, messages: Messages, batch: RecordBatch) -> None:
        self._messages, self._batch = messages, batch
        self._nodes, self._buffers = iter(batch.nodes), iter(batch.buffers)

    def end(self) -> None:
        """Check that nothing is left."""
        if next(self._nodes, None) is not None or next(self._buffers, None) is not None:
            raise ValueError("a record batch has more arrays than its schema")

    def column(self, kind: Any, spec: FieldSpec) -> _Found:
        """The values of a column whose type is served."""
        num_rows = self._batch.num_rows
        present = self._validity(num_rows)
        if types.is_boolean(kind):
            return _Found(0, present=present, bits=self._bits(self._buffer(), num_rows))
        if not spec.ragged:
            if types.is_fixed_size_list(kind):
                return replace(self._fixed_list(kind, num_rows, present), present=present)
            start, size = self._buffer()
            _check(num_rows * spec.element_bytes <= size)
            return _Found(start, present=present)
        offsets = self._offsets(kind, num_rows)
        if types.is_list(kind) or types.is_large_list(kind):
            inner = _storage(kind.value_type)
            count = self._peek_length()
            _check(int(offsets[-1]) <= count)
            self._validity_of_elements(count, offsets, present)
            if types.is_fixed_size_list(inner):
                start = self._fixed_list(inner, count, None).base
            else:
                start, size = self._buffer()
                _check(count * spec.element_bytes <= size)
            return _Found(start, offsets * spec.element_bytes, present)
        start, size = self._buffer()
        _check(int(offsets[-1]) <= size)
        return _Found(start, offsets, present)

    def file(self, kind: Any) -> _Found:
        """The bytes of a struct of a file and its path."""
        present = self._validity(self._batch.num_rows)
        found = _Found(0)
        for place in range(kind.num_fields):
            inner = kind.field(place)
            if inner.name == "bytes":
                spec = FieldSpec("bytes", np.dtype(np.uint8), (), ragged=True, codec="bytes")
                found = self.column(inner.type, spec)
            else:
                self.skip(_storage(inner.type))
        both = [each for each in (present, found.present) if each is not None]
        return replace(found, present=np.logical_and.reduce(both) if both else None)

    def skip(self, kind: Any) -> None:
        """Pass over a column that is not served."""
        next(self._nodes, None)
        for _ in range(_num_buffers(kind)):
            self._buffer()
        if types.is_run_end_encoded(kind):
            self.skip(_storage(kind.run_end_type))
            self.skip(_storage(kind.value_type))
        elif types.is_nested(kind):
            for place in range(kind.num_fields):
                self.skip(_storage(kind.field(place).type))

    def _fixed_list(self, kind: Any, num_rows: int, present: _Bits | None) -> _Found:
        """Fixed-size lists, whose own validity was read before."""
        count = num_rows * kind.list_size
        validity = self._validity(count)
        if validity is not None:
            whole = np.asarray(validity.reshape(num_rows, -1).all(axis=1))
            _check_elements(whole if present is None else whole | ~present)
        inner = _storage(kind.value_type)
        if types.is_fixed_size_list(inner):
            return self._fixed_list(inner, count, None if validity is None else validity)
        start, size = self._buffer()
        width = inner.byte_width if types.is_fixed_size_binary(inner) else inner.bit_width // 8
        _check(count * width <= size)
        return _Found(start)

    def _peek_length(self) -> int:
        """The length of the next array."""
        node = next(self._nodes, None)
        if node is None:
            raise ValueError("a record batch has fewer arrays than its schema")
        self._nodes = iter([node, *self._nodes])
        return node[0]

    def _validity_of_elements(self, count: int, offsets: _Int64, present: _Bits | None) -> None:
        """Check that no element of a list is null; what lies between the lists does not count."""
        validity = self._validity(count)
        if validity is None:
            return
        missing = np.concatenate(([0], np.cumsum(~validity)))
        num_missing = missing[offsets[1:]] - missing[offsets[:-1]]
        _check_elements((num_missing == 0) if present is None else (num_missing == 0) | ~present)

    def _validity(self, length: int) -> _Bits | None:
        """Which elements of the next array have a value; None if all have."""
        node = next(self._nodes, None)
        if node is None:
            raise ValueError("a record batch has fewer arrays than its schema")
        _check(node[0] >= length)
        buffer = self._buffer()
        if not node[1] or not buffer[1]:
            return None
        valid = self._bits(buffer, length)
        return None if valid.all() else valid

    def _bits(self, buffer: tuple[int, int], count: int) -> _Bits:
        num_bytes = -(-count // 8)
        _check(num_bytes <= buffer[1])
        data = np.frombuffer(self._messages.read(buffer[0], num_bytes), np.uint8)
        return np.unpackbits(data, count=count, bitorder="little").astype(np.bool_)

    def _offsets(self, kind: Any, num_rows: int) -> _Int64:
        is_large = (
            types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
        )
        dtype = np.dtype("<i8" if is_large else "<i4")
        start, size = self._buffer()
        num_bytes = (num_rows + 1) * dtype.itemsize
        _check(num_bytes <= size)
        offsets = np.frombuffer(self._messages.read(start, num_bytes), dtype).astype(np.int64)
        if offsets[0] < 0 or (np.diff(offsets) < 0).any():
            raise ValueError("a record batch has offsets that do not rise")
        return offsets

    def _buffer(self) -> tuple[int, int]:
        buffer = next(self._buffers, None)
        if buffer is None:
            raise ValueError("a record batch has fewer buffers than its schema")
        return buffer


def _num_buffers(kind: Any) -> int:
    """How many buffers an array of a type has, without those of its children.

    Raises:
        ConfigError: each array may have another number.
    """
    if types.is_string_view(kind) or types.is_binary_view(kind):
        raise ConfigError(
            "the file has columns of string views, of which no rows can be found; cast them to "
            "string or binary when you write the file"
        )
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        return 0
    if types.is_union(kind):
        return 1 if kind.mode == "sparse" else 2
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1
    of_size = types.is_string(kind) or types.is_binary(kind)
    of_large_size = types.is_large_string(kind) or types.is_large_binary(kind)
    return 3 if of_size or of_large_size else 2


def _check(is_inside: bool) -> None:
    if not is_inside:
        raise ValueError("a record batch has a buffer that is too short")


def _check_elements(are_whole: _Bits) -> None:
    if not are_whole.all():
        raise ConfigError(
            "a column has lists with nulls among their elements, which become no tensor; leave it "
            "out: name the others in `columns`"
        )


def _joined(
    columns: Sequence[ServedColumn], batches: Sequence[RecordBatch], found: Sequence[list[_Found]]
) -> Arrays:
    """The arrays of a file; see `scan_arrow`."""
    rows = np.array([batch.num_rows for batch in batches], np.int64)
    num_rows = int(rows.sum())
    ragged = [place for place, column in enumerate(columns) if column.spec.ragged]
    optional = [
        place
        for place in range(len(columns))
        if any(its[place].present is not None for its in found)
    ]
    bits = [place for place in range(len(columns)) if found and found[0][place].bits is not None]

    def table(places: Sequence[int], dtype: Any, values: Callable[[_Found, int], Any]) -> Any:
        result = np.empty((num_rows, len(places)), dtype)
        for number, place in enumerate(places):
            parts = [
                values(its[place], batch.num_rows)
                for its, batch in zip(found, batches, strict=True)
            ]
            result[:, number] = np.concatenate(parts) if parts else []
        return result

    def bounds(each: _Found) -> _Int64:
        assert each.ends is not None
        return each.ends

    meaning = [
        [
            column.spec.name,
            column.spec.dtype.str,
            column.spec.shape,
            column.spec.ragged,
            column.spec.codec,
            column.spec.categories,
            column.spec.media_type,
        ]
        for column in columns
    ]
    return {
        "rows": rows,
        "body": np.array([batch.body for batch in batches], np.int64).reshape(len(batches), 2),
        "base": np.array([[each.base for each in its] for its in found], np.int64).reshape(
            len(batches), len(columns)
        ),
        "first": np.array(
            [[bounds(its[place])[0] for place in ragged] for its in found], np.int64
        ).reshape(len(batches), len(ragged)),
        "ends": table(ragged, np.int64, lambda each, _: bounds(each)[1:]),
        "present": table(
            optional,
            np.bool_,
            lambda each, count: np.ones(count, np.bool_) if each.present is None else each.present,
        ),
        "optional": np.array(optional, np.int64),
        "bits": table(bits, np.bool_, lambda each, _: each.bits),
        "columns": np.frombuffer(json.dumps(meaning).encode(), np.uint8),
    }
