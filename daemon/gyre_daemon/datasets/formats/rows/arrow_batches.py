"""Finds the rows in record batches of Arrow, or decodes these. Only compute workers import it.

pyarrow parses the messages of a file, whose bodies are left out: it makes arrays of blank memory
in their place. The address of a buffer there, minus that of its body, is its place in the file. Of
the file only the metadata, validity bits and offsets are read.
"""

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec
from gyre_daemon.datasets.formats.indexes.chunks import (
    MAX_CHUNK_BYTES,
    Column,
    StoredChunk,
    chunk_arrays,
    lacking,
)
from gyre_daemon.datasets.formats.rows.arrow_columns import Wanted
from gyre_daemon.datasets.formats.rows.arrow_types import (
    ServedColumn,
    column_of,
    served_columns,
    with_children,
)
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.runtime.positioned import PositionedFile

_MAGIC, _MAGIC_BYTES = b"ARROW1", 8  # padded
_CONTINUATION = 0xFFFFFFFF
_HEAD = struct.Struct("<II")
_MAX_METADATA_BYTES = 64 << 20
# Bytes to read at once at the beginning of each message: the metadata of most.
_READ_BYTES = 8 << 10
_BLANK = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, "prot": mmap.PROT_READ}
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_Bits = npt.NDArray[np.bool_]
_Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Message:
    """A message, whose body is blank.

    Attributes:
        offset: of its first byte in the file.
        body: first byte and end of its body in the file.
        its: pyarrow's message.
    """

    offset: int
    body: tuple[int, int]
    its: Any


class _WithoutBody(PositionedFile):
    """A file from a message on, as pyarrow reads it, with zeros in place of the body."""

    def __init__(self, num_bytes: int, offset: int, metadata: bytes) -> None:
        super().__init__(num_bytes)
        self._position, self._offset, self._metadata = offset, offset, metadata

    def read(self, size: int = -1) -> memoryview:  # not a copy
        begin = self._position - self._offset
        if begin < len(self._metadata):
            piece = memoryview(self._metadata)[begin : begin + size]
        elif not 0 <= size <= self._num_bytes - self._position:
            raise ValueError(f"it ends within a message of {size} bytes")
        else:
            piece = memoryview(mmap.mmap(-1, max(size, 1), **_BLANK))[:size]
        self._position += len(piece)
        return piece


class _Messages:
    """The messages of a file or stream, one after the other.

    Attributes:
        offset: of the message read now.
        num_bytes: of the file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.offset = 0
        self._file = file
        self.num_bytes = file.seek(0, os.SEEK_END)

    def __iter__(self) -> Iterator[_Message]:
        """All messages.

        Raises:
            ValueError: one is damaged, or the file is cut off.
        """
        is_file = self._read(0, _MAGIC_BYTES).startswith(_MAGIC)
        if is_file and (self.num_bytes < 20 or self._read(self.num_bytes - 6, 6) != _MAGIC):
            raise ValueError("it does not end as an Arrow file does; it is cut off")
        position = _MAGIC_BYTES if is_file else 0
        while True:
            self.offset = position
            data = self._read(position, min(_READ_BYTES, self.num_bytes - position))
            if len(data) < _HEAD.size:
                raise ValueError("it ends without the mark at the end of a stream; it is cut off")
            first, num_bytes = _HEAD.unpack_from(data)
            if first != _CONTINUATION:
                raise ValueError("here is no message of Arrow, or one of before version 0.15")
            if not num_bytes:
                if not is_file and position + _HEAD.size != self.num_bytes:
                    raise ValueError("it goes on behind the end of its stream")
                return
            if num_bytes > _MAX_METADATA_BYTES:
                raise ValueError(f"a message claims {num_bytes} bytes of metadata")
            size = _HEAD.size + num_bytes
            if size > len(data):
                data = self.read(position, size)
            source = _WithoutBody(self.num_bytes, position, data[:size])
            message = _parsed(pa.ipc.read_message, source)
            yield _Message(position, (position + size, source.tell()), message)
            position = source.tell()

    def read(self, start: int, size: int) -> bytes:
        """A part of the file.

        Raises:
            ValueError: it ends before.
        """
        data = self._read(start, size)
        if len(data) < size:
            raise ValueError("it is cut off")
        return data

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        data = b""
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        return data


def scan_arrow(wanted: Wanted, shard: str, file: BinaryIO) -> Arrays:
    """The places of the N rows of C record batches, with F served columns.

    Where record batches must be decoded, it returns `chunk_arrays`.

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
        columns: JSON, of each column its name, dtype, shape, whether it is ragged, its codec, its
            categories and its media type.

    Raises:
        CorruptSample: it is damaged; with the offset of the message.
        ConfigError: the columns do not fit.
    """
    messages = _Messages(file)
    try:
        return _scan(messages, wanted)
    except ConfigError as error:
        raise ConfigError(f"shard {shard}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        reason = f"{error!s:.500}"
        raise CorruptSample(
            f"shard {shard} at byte {messages.offset}: {reason}",
            {"shard": shard, "offset": messages.offset, "reason": reason},
        ) from error


def _scan(messages: _Messages, wanted: Wanted) -> Arrays:
    schema: Any = None
    found: _StoredBatches | _Chunks | None = None
    begin = 0
    for message in messages:
        kind = message.its.type
        if (kind == "schema") != (schema is None):
            raise ValueError("it has two schemas" if schema else "it does not begin with a schema")
        if kind == "schema":
            schema, begin = _parsed(pa.ipc.read_schema, message.its), message.offset
        elif kind == "record batch":
            num_rows = _parsed(pa.ipc.read_record_batch, message.its, pa.schema([])).num_rows
            if num_rows:
                found = found or _opened(messages, schema, wanted, begin, message)
                found.add(message, num_rows)
        elif kind != "dictionary":
            raise ValueError(f"it has a message of the kind {kind}")
        elif isinstance(found, _Chunks):
            raise ConfigError(
                "the file has dictionaries behind its first record batch, which is not read "
                "where batches are decoded. Write it as Parquet, or without dictionaries."
            )
    if schema is None:
        raise ValueError("it has no schema")
    return found.arrays() if found else _StoredBatches(messages, [], schema).arrays()


def _opened(
    messages: _Messages, schema: Any, wanted: Wanted, begin: int, first: _Message
) -> "_StoredBatches | _Chunks":
    """The record batches of a file, whose schema begins there, by the first of them."""
    columns, undecoded = served_columns(schema, wanted), _undecoded_schema(schema)
    is_stored = all(column.is_stored for column in columns)
    if is_stored and _batch(first, undecoded) is not None:
        return _StoredBatches(messages, columns, undecoded)
    return _Chunks(messages, columns, (begin, first.offset))


def _parsed(parse: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function of pyarrow, whose errors are ValueErrors."""
    try:
        return parse(*arguments)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(str(error)) from error


def _undecoded_schema(schema: Any) -> Any:
    """The schema of the stored arrays: without extensions, and of indices in dictionaries.

    pyarrow reads a record batch of it without the dictionaries.
    """

    def stored(kind: Any) -> Any:
        if isinstance(kind, pa.BaseExtensionType):
            return stored(kind.storage_type)
        return kind.index_type if types.is_dictionary(kind) else with_children(kind, stored)

    return pa.schema([field.with_type(stored(field.type)) for field in schema])


def _batch(message: _Message, schema: Any) -> Any:
    """The record batch of a message, whose buffers are in its blank body; None if it is compressed.

    Raises:
        ValueError: it is damaged.
    """
    body = message.its.body
    begin, stop = body.address, body.address + body.size
    try:
        batch = pa.ipc.read_record_batch(message.its, schema)
    except OSError:  # blank memory is no compressed data
        return None
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
    buffers = [each for column in batch.columns for each in column.buffers() if each]
    if not all(begin <= each.address <= each.address + each.size <= stop for each in buffers):
        return None
    return batch


class _Chunks:
    """The decoded record batches of a file, each a chunk.

    A chunk is decoded from its message and from the messages before all record batches: the schema
    and the dictionaries. Together they are a valid stream.
    """

    def __init__(
        self, messages: _Messages, columns: Sequence[ServedColumn], shared: tuple[int, int]
    ) -> None:
        self._messages, self._columns, self._shared = messages, columns, shared
        self._head = messages.read(shared[0], shared[1] - shared[0])
        self._rows, self._pieces = list[int](), list[list[tuple[int, int]]]()
        self._found, self._damaged = list[Sequence[Column | None]](), dict[int, str]()

    def add(self, message: _Message, num_rows: int) -> None:
        """Decode a record batch, and note where its rows end."""
        stop = message.body[1]
        data = self._messages.read(message.offset, stop - message.offset)
        self._rows.append(num_rows)
        self._pieces.append([(message.offset, stop)])
        try:
            its = _decoded(self._head, data, self._columns)
        except ValueError as error:
            if num_rows > 8 * self._messages.num_bytes:
                raise ValueError(f"a damaged record batch claims {num_rows} rows") from error
            self._damaged[len(self._found)] = f"{error!s:.500}"
            specs = [column.spec for column in self._columns]
            self._found.append(lacking(specs, num_rows))
            return
        if sum(column.data.nbytes for column in its) > MAX_CHUNK_BYTES:
            raise ValueError(f"a record batch has more than {MAX_CHUNK_BYTES >> 30} GiB")
        self._found.append([Column(column.data[:0], column.ends, column.present) for column in its])

    def arrays(self) -> Arrays:
        """See `chunk_arrays`."""
        specs = [column.spec for column in self._columns]
        return chunk_arrays(
            specs, self._rows, self._pieces, self._found, self._shared, damaged=self._damaged
        )


def decode_batch(wanted: Wanted, chunk: StoredChunk) -> Sequence[Column]:
    """The columns of a record batch.

    Raises:
        ValueError: it is damaged.
    """
    (_, shared), (_, data) = chunk.pieces
    return _decoded(shared, data, None, wanted)


def _decoded(
    shared: bytes | memoryview,
    data: bytes | memoryview,
    columns: Sequence[ServedColumn] | None,
    wanted: Wanted | None = None,
) -> list[Column]:
    try:
        options = pa.ipc.IpcReadOptions(use_threads=False)
        stream = pa.BufferReader(b"".join((shared, data, _END)))
        batch = pa.ipc.open_stream(stream, options=options).read_next_batch()
        batch.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a record batch cannot be read: {error!s:.500}") from error
    if columns is None:
        assert wanted is not None
        columns = served_columns(batch.schema, wanted)
    return [column_of([batch.column(column.name)], column.spec) for column in columns]


@dataclass(frozen=True, slots=True)
class _StoredColumn:
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


class _StoredBatches:
    """The record batches of a file whose buffers have the tensors' bytes."""

    def __init__(self, messages: _Messages, columns: Sequence[ServedColumn], schema: Any) -> None:
        self._messages, self._columns, self._schema = messages, columns, schema
        self._rows, self._bodies = list[int](), list[tuple[int, int]]()
        self._found = list[list[_StoredColumn]]()

    def add(self, message: _Message, num_rows: int) -> None:
        """Find the columns of a record batch."""
        batch = _batch(message, self._schema)
        if batch is None:
            raise ConfigError("some record batches are compressed and some are not; write it again")
        buffers = _Buffers(self._messages, message.body[0] - message.its.body.address, num_rows)
        self._rows.append(num_rows)
        self._bodies.append(message.body)
        arrays = [batch.column(each.name) for each in self._columns]
        for array in arrays:
            _parsed(array.validate)  # lengths, and sizes of buffers; offsets are still blank
        pairs = zip(arrays, self._columns, strict=True)
        self._found.append([buffers.column(array, each.spec) for array, each in pairs])

    def arrays(self) -> Arrays:
        """The arrays of the file; see `scan_arrow`."""
        rows, found, columns = np.array(self._rows, np.int64), self._found, self._columns
        everyone, count = range(len(columns)), len(rows)
        ragged = [place for place in everyone if columns[place].spec.ragged]
        optional = [
            place for place in everyone if any(its[place].present is not None for its in found)
        ]
        bits = [place for place in everyone if any(its[place].bits is not None for its in found)]

        def table(places: Sequence[int], dtype: Any, values: Callable[[Any, int], Any]) -> Any:
            result = np.empty((int(rows.sum()), len(places)), dtype)
            for number, place in enumerate(places):
                pairs = zip(found, self._rows, strict=True)
                result[:, number] = np.concatenate([values(its[place], n) for its, n in pairs])
            return result

        def present(each: _StoredColumn, num_rows: int) -> _Bits:
            return np.ones(num_rows, np.bool_) if each.present is None else each.present

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
        base = [[each.base for each in its] for its in found]
        first = [[its[place].ends[0] for place in ragged] for its in found]  # type: ignore[index]
        return {
            "rows": rows,
            "body": np.array(self._bodies, np.int64).reshape(count, 2),
            "base": np.array(base, np.int64).reshape(count, len(columns)),
            "first": np.array(first, np.int64).reshape(count, len(ragged)),
            "ends": table(ragged, np.int64, lambda each, _: each.ends[1:]),
            "present": table(optional, np.bool_, present),
            "optional": np.array(optional, np.int64),
            "bits": table(bits, np.bool_, lambda each, _: each.bits),
            "columns": np.frombuffer(json.dumps(meaning).encode(), np.uint8),
        }


class _Buffers:
    """The buffers of one record batch, by their places in the file."""

    def __init__(self, messages: _Messages, moved: int, num_rows: int) -> None:
        """Take the difference of a place in the file and an address.

        Raises:
            ValueError: the file has not so many bits.
        """
        self._messages, self._moved, self._num_rows = messages, moved, num_rows
        _check(num_rows <= 8 * messages.num_bytes)

    def column(self, array: Any, spec: FieldSpec) -> _StoredColumn:
        """The values of a served column.

        Raises:
            ValueError: the record batch is damaged.
            ConfigError: rows have no values that make a tensor.
        """
        kind, present = array.type, self._validity(array)
        _check(len(array) == self._num_rows)
        if types.is_struct(kind):  # of a file and its path
            found = self.column(array.field("bytes"), spec)
            both = [each for each in (present, found.present) if each is not None]
            return replace(found, present=np.logical_and.reduce(both) if both else None)
        if types.is_boolean(kind):
            return _StoredColumn(0, None, present, self._bits(array.buffers()[1], len(array)))
        is_list = types.is_list(kind) or types.is_large_list(kind)
        if not spec.ragged and not is_list:
            return _StoredColumn(self._values(array, present), None, present)
        is_large = types.is_large_string(kind) or types.is_large_binary(kind)
        is_large |= types.is_large_list(kind)
        offsets = self._offsets(array, np.dtype("<i8" if is_large else "<i4"))
        bounds, values = array.buffers()[1:3]
        # an empty buffer has no address, and pyarrow aligns those that it writes to 8 bytes
        behind = -(-(self._place(bounds) + bounds.size) // 8) * 8
        if not is_list:
            _check(offsets[-1] <= (values.size if values else 0))
            return _StoredColumn(self._place(values) if values else behind, offsets, present)
        _check(offsets[-1] <= len(array.values))
        length = 1 if spec.ragged else spec.shape[0]
        base = self._values(array.values, present, offsets) or behind
        ends = offsets * (spec.element_bytes // length)
        if spec.ragged:
            return _StoredColumn(base, ends, present)
        if len(wrong := np.flatnonzero(np.diff(offsets) != length)):
            row = int(wrong[0])
            is_null = present is not None and not present[row]
            has = "is null" if is_null else f"has {offsets[row + 1] - offsets[row]} elements"
            raise ConfigError(
                f"a row of {spec.name!r:.100} {has}, and `lengths` says {length}. Correct it, or "
                "leave the column out of `lengths`"
            )
        return _StoredColumn(base + int(ends[0]), None, present)

    def _values(self, array: Any, present: _Bits | None, offsets: _Int64 | None = None) -> int:
        """The first byte of values of one size, 0 for none; lists of them may have no null element.

        Args:
            array: of numbers, or of lists of one size, also nested.
            present: which rows have a value; None for all.
            offsets: of the rows among the values; None where each is one.
        """
        is_first = offsets is None
        if offsets is None:
            offsets = np.arange(len(array) + 1)
        while True:
            validity = None if is_first else self._validity(array)
            if validity is not None:
                missing = np.concatenate(([0], np.cumsum(~validity)))
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
            _check(offsets[-1] <= len(array))
        data, width = array.buffers()[1], array.type.bit_width // 8
        _check(len(array) * width <= (data.size if data else 0))
        return self._place(data) if data else 0

    def _validity(self, array: Any) -> _Bits | None:
        """Which elements have a value; None if all have."""
        buffer = array.buffers()[0] if array.null_count else None
        if buffer is None:
            return None
        valid = self._bits(buffer, len(array))
        return None if valid.all() else valid

    def _bits(self, buffer: Any, count: int) -> _Bits:
        num_bytes = -(-count // 8)
        _check(buffer is not None and num_bytes <= buffer.size)
        data = np.frombuffer(self._messages.read(self._place(buffer), num_bytes), np.uint8)
        return np.unpackbits(data, count=count, bitorder="little").astype(np.bool_)

    def _offsets(self, array: Any, dtype: np.dtype[Any]) -> _Int64:
        buffer, num_bytes = array.buffers()[1], (len(array) + 1) * dtype.itemsize
        _check(buffer is not None and num_bytes <= buffer.size)
        data = self._messages.read(self._place(buffer), num_bytes)
        offsets = np.frombuffer(data, dtype).astype(np.int64)
        if offsets[0] < 0 or (np.diff(offsets) < 0).any():
            raise ValueError("a record batch has offsets that do not rise")
        return offsets

    def _place(self, buffer: Any) -> int:
        place: int = buffer.address + self._moved
        return place


def _check(is_inside: object) -> None:
    if not is_inside:
        raise ValueError("a record batch has too short a buffer")
