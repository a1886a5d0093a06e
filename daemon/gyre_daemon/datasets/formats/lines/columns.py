"""The keys of JSON lines as columns: lines are rows of chunks, which are parsed as a whole. Pure.

A chunk is some lines, or frames of zstd with the lines that begin in them. Which kind a column has
is known when all lines of a file have been seen.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec
from gyre_daemon.datasets.formats.indexes.chunks import (
    Column,
    DamagedPart,
    StoredChunk,
    chunk_arrays,
    lacking,
    num_rows,
)
from gyre_daemon.datasets.formats.lines.array import (
    NAME_AN_ARRAY,
    bounds_of,
    check_is_records,
    found_records,
    is_array,
    may_be_array,
    peeked,
    records_of,
)
from gyre_daemon.datasets.formats.lines.frames import FramedLines, framed_lines, lines_of
from gyre_daemon.datasets.formats.lines.scan import chunks
from gyre_daemon.datasets.formats.lines.values import (
    NULL,
    Seen,
    TypedLines,
    TypeName,
    Written,
    seen,
    spec_of,
)
from gyre_daemon.datasets.formats.names import check_names
from gyre_daemon.datasets.formats.values import lone_surrogate, without_surrogates
from gyre_daemon.datasets.formats.zstd import decompress, recognised
from gyre_daemon.errors import ConfigError, CorruptSample

# Consecutive lines are one chunk until they have this many bytes. A decoder takes about a
# millisecond for the smallest chunk; but to read a line costs to parse all.
_MIN_CHUNK_BYTES = 64 << 10
# A file whose lines each have other keys is a dictionary, and no table.
_MAX_COLUMNS = 1000
# Bits of a chunk's parameters.
_COMPRESSED, _ARRAY = 1, 2
_NO_NUMBER = re.compile(rb"NaN|-?Infinity")
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Line(NamedTuple):
    """A line or record of a file: its number, empty lines not counted, and its offset.

    Attributes:
        number: from 1.
        offset: in the file.
        is_record: of an array.
    """

    number: int
    offset: int
    is_record: bool

    def __str__(self) -> str:
        """Where it is, for messages."""
        return f"{'record' if self.is_record else 'line'} {self.number}"

    @property
    def counted(self) -> str:
        """How its number is counted, for messages."""
        return "" if self.is_record else " (empty lines not counted)"


_Place = Callable[[int], _Line]  # takes the number of a line within its chunk


@dataclass(slots=True)
class _Seen:
    """A column of a file.

    Attributes:
        lines: for each kind of value, the first line with one.
        sizes: of each chunk by its place: int64 [R, 2], bytes as text or list, and as JSON.
        present: of each chunk by its place: bool [R].
    """

    lines: dict[Written, _Line] = field(default_factory=dict)
    sizes: dict[int, np.ndarray] = field(default_factory=dict)
    present: dict[int, np.ndarray] = field(default_factory=dict)

    def add_typed(self, place: int, column: Column, num_rows: int) -> None:
        """Take a chunk whose values have the kind that those before had."""
        ends = np.zeros(num_rows, np.int64) if column.ends is None else column.ends
        self.sizes[place] = np.diff(ends, prepend=0).repeat(2).reshape(-1, 2)
        assert column.present is not None
        self.present[place] = column.present

    def add(self, place: int, raws: Sequence[bytes | None], where: _Place) -> None:
        """Take the values of a chunk.

        Raises:
            DamagedPart: one cannot be served.
        """
        values = [
            _NOTHING if raw is None else _seen(raw, row, where) for row, raw in enumerate(raws)
        ]
        for row, (raw, value) in enumerate(zip(raws, values, strict=True)):
            if raw is not None and value.written not in self.lines:
                self.lines[value.written] = where(row)
        pairs = zip(raws, values, strict=True)
        sizes = [(value.num_bytes, len(raw or NULL)) for raw, value in pairs]
        self.sizes[place] = np.array(sizes, np.int64)
        self.present[place] = np.array([raw is not None for raw in raws], np.bool_)

    def column(self, spec: FieldSpec, place: int, num_rows: int) -> Column:
        """Where the rows of a chunk end; without their data."""
        nothing = np.empty(0, np.uint8)
        if place not in self.present:
            size = len(NULL) if spec.codec == "json" else 0
            ends = np.arange(1, num_rows + 1) * size if spec.ragged else None
            return Column(nothing, ends, np.zeros(num_rows, np.bool_))
        ends = np.cumsum(self.sizes[place][:, int(spec.codec == "json")]) if spec.ragged else None
        return Column(nothing, ends, self.present[place])


_NOTHING = Seen("empty", 0)


def _seen(raw: bytes, row: int, where: _Place) -> Seen:
    try:
        return seen(raw)
    except (ValueError, msgspec.DecodeError) as error:
        line = where(row)
        why = _surrogate_in(b"[" + raw + b"]") or str(error)
        raise DamagedPart(f"{line}{line.counted}: {why}", line.offset) from error


@dataclass(frozen=True, slots=True)
class JsonColumns:
    """Scans files; the `run` of a `Scan`.

    Attributes:
        pairs: names of the fields, and of their keys; empty for all keys.
        types: of columns by their keys, as the operator has them.
        may_lack: whether a file may lack some of the keys.
        replaces_surrogates: whether half a character becomes U+FFFD; else it is refused.
    """

    pairs: tuple[tuple[str, str], ...]
    types: tuple[tuple[str, TypeName], ...]
    may_lack: bool
    replaces_surrogates: bool

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        """The `chunk_arrays` of a file.

        Raises:
            CorruptSample: it is damaged, or the values of a key are not alike; with the lines.
            ConfigError: the columns do not fit.
        """
        try:
            with recognised(shard, file) as (opened, is_compressed):
                if is_compressed:
                    found = framed_lines(opened, may_be_array=may_be_array(shard))
                    return self._scan(found, is_compressed=True)
                if may_be_array(shard):
                    head = peeked(opened)
                    if is_array(head):
                        return self._scan(_plain_records(opened), is_compressed=False)
                    check_is_records(head)
                    scan = self._scan(_plain_lines(opened), is_compressed=False)
                    check_is_records(head, num_rows(scan))
                    return scan
                return self._scan(_plain_lines(opened), is_compressed=False)
        except ConfigError:
            raise
        except ValueError as error:
            facts: dict[str, str | int] = {"shard": shard, "reason": str(error)}
            if isinstance(error, DamagedPart):
                facts["offset"] = error.offset
            raise CorruptSample(f"shard {shard}: {error}", facts) from error

    def _scan(self, found: Iterator[FramedLines], *, is_compressed: bool) -> Arrays:
        columns: dict[str, _Seen] = {}
        keys: dict[str, None] = {}
        typed: TypedLines | None = None
        rows: list[int] = []
        pieces: list[Sequence[tuple[int, int]]] = []
        parameters: list[tuple[int, int, int]] = []
        damaged: dict[int, ValueError] = {}
        line = 1
        for chunk in found:
            lines = chunk.lines()
            if self.replaces_surrogates:
                lines = list(map(without_surrogates, lines))
            if lines:
                place = len(rows)
                rows.append(len(lines))
                pieces.append(chunk.pieces)
                flags = is_compressed * _COMPRESSED | (chunk.records is not None) * _ARRAY
                parameters.append((chunk.begin, len(chunk.data), flags))
                if not typed or not _add_typed(columns, typed, place, lines):
                    try:
                        where = partial(_line, chunk, line, is_compressed=is_compressed)
                        self._add(columns, keys, place, lines, where)
                    except ConfigError:
                        raise
                    except ValueError as error:
                        damaged[place] = error
                    typed = self._typed(columns)
            line += len(lines)
        is_lacking = not self.may_lack and any(key not in keys for _, key in self.pairs)
        if damaged and (is_lacking or len(damaged) == len(rows)):
            raise next(iter(damaged.values()))  # a damaged block may have the key
        served = self._served(columns, keys, has_rows=bool(rows))
        specs = [spec for spec, _ in served]
        return chunk_arrays(
            specs,
            rows,
            pieces,
            [
                lacking(specs, count)
                if place in damaged
                else [column.column(spec, place, count) for spec, column in served]
                for place, count in enumerate(rows)
            ],
            parameters=parameters,
            damaged={place: str(error) for place, error in damaged.items()},
        )

    def _add(
        self,
        columns: dict[str, _Seen],
        keys: dict[str, None],
        place: int,
        lines: Sequence[bytes],
        where: _Place,
    ) -> None:
        """Take the lines of a chunk.

        Raises:
            DamagedPart: one is no object, or has a value that cannot be served; with the line.
        """
        rows = _rows_of(lines, where)
        its = dict.fromkeys(key for row in rows for key in row)
        keys.update(its)
        if len(keys) > _MAX_COLUMNS:
            raise ConfigError(
                f"the objects have more than {_MAX_COLUMNS} keys; leave `columns` out, and parse "
                "the documents where you need them"
            )
        for key in [key for _, key in self.pairs if key in its] if self.pairs else its:
            columns.setdefault(key, _Seen()).add(place, _raws(rows, key), where)

    def _typed(self, columns: Mapping[str, _Seen]) -> TypedLines | None:
        """A parser of lines like the previous ones; None as long as too little is known."""
        types, specs = dict(self.types), []
        for key, column in columns.items():
            written = frozenset(column.lines)
            spec = spec_of(key, written, types.get(key))
            if spec is None or written <= {"empty"}:
                return None
            specs.append(spec)
        return TypedLines(tuple(specs), tuple(columns), knows_all=not self.pairs)

    def _served(
        self, columns: Mapping[str, _Seen], keys: Mapping[str, None], *, has_rows: bool
    ) -> list[tuple[FieldSpec, _Seen]]:
        """The fields of a file, each with the values seen of its column."""
        if not has_rows:
            return []
        types = dict(self.types)
        known = {key for key, column in columns.items() if column.lines} | types.keys()
        pairs = self.pairs or tuple((key, key) for key in sorted(known & columns.keys()))
        check_names([name for name, _ in pairs], "columns")
        served = []
        for name, key in pairs:
            if key not in known:
                if self.may_lack:
                    continue
                raise ConfigError(
                    f"there is no key {key!r:.100} with a value; the objects have "
                    f"{', '.join(keys):.1000}"
                )
            column = columns.get(key, _Seen())
            spec = spec_of(name, frozenset(column.lines), types.get(key))
            if spec is None:
                raise _unlike(key, column.lines, types.get(key))
            served.append((spec, column))
        return served


def _add_typed(
    columns: Mapping[str, _Seen], typed: TypedLines, place: int, lines: Sequence[bytes]
) -> bool:
    """Take the lines of a chunk, if all are like those before."""
    try:
        found = typed.columns(b"\n".join(lines))
    except ValueError:
        return False
    for key, column in zip(typed.keys, found, strict=True):
        columns[key].add_typed(place, column, len(lines))
    return True


def _unlike(key: str, lines: Mapping[Written, _Line], wanted: TypeName | None) -> DamagedPart:
    """The error, with the place of the last kind that was seen."""
    kinds = ", ".join(f"{_WORDS[kind]} in {line}" for kind, line in lines.items())
    counted = next(iter(lines.values())).counted
    what = f"and `types` has {wanted}" if wanted else "which is no column"
    return DamagedPart(
        f"the key {key!r:.100} has {kinds}{counted}, {what}; name the other keys "
        f'in `columns`, or serve it as JSON: `types = {{{key:.100} = "json"}}`',
        max(line.offset for line in lines.values()),
    )


_WORDS: Mapping[Written, str] = {
    "integer": "an integer",
    "float": "a number with a fraction",
    "bool": "true or false",
    "text": "text",
    "list": "a list of integers",
    "floats": "a list of numbers",
    "empty": "an empty list",
    "other": "an object or another list",
}


def _line(chunk: FramedLines, first: int, row: int, *, is_compressed: bool) -> _Line:
    """A line of a chunk; its place is that of the chunk if the file is compressed."""
    offset = chunk.pieces[0][0]
    if not is_compressed and chunk.records is not None:
        offset += chunk.records[row][0]
    elif not is_compressed:
        offset += chunk.begin + _offset(bytes(memoryview(chunk.data)[chunk.begin :]), row)
    return _Line(first + row, offset, chunk.records is not None)


def _offset(data: bytes, row: int) -> int:
    """Where a line begins; empty ones are not counted."""
    begin = 0
    for line in data.split(b"\n"):
        if line not in (b"", b"\r"):
            if not row:
                break
            row -= 1
        begin += len(line) + 1
    return begin


def _rows_of(lines: Sequence[bytes], where: _Place) -> list[dict[str, msgspec.Raw]]:
    rows = []
    for row, line in enumerate(lines):
        try:
            rows.append(_OBJECT.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            place = where(row)
            surrogate = _surrogate_in(line)
            why = f": {surrogate}" if surrogate else f" is no JSON object: {_reason(line, error)}"
            raise DamagedPart(f"{place}{place.counted}{why}", place.offset) from error
    return rows


def _reason(line: bytes, error: Exception) -> str:
    """Why a line is no object; also for values that Python's `json` writes and JSON lacks."""
    if is_array(line):
        return f"{error}. {NAME_AN_ARRAY}"
    if number := _NO_NUMBER.search(line):
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(line)
            return (
                f"JSON has no {number[0].decode()}. Write null, or leave `columns` out to get the "
                "documents as they are"
            )
    return str(error)


def _surrogate_in(line: bytes) -> str:
    """Why a line with half a character is refused; empty if it has none."""
    escape = lone_surrogate(line)
    if not escape:
        return ""
    try:
        document = json.loads(line)
    except ValueError:
        return ""
    where = "it"
    if isinstance(document, dict):
        key = next(key for key, value in document.items() if _has_surrogate([key, value]))
        where = "a key" if _has_surrogate(key) else f"the key {key!r:.100}"
    return (
        f"{where} has a lone surrogate ({escape}), half a character that UTF-8 does not have. Set "
        '`surrogates = "replace"` to serve U+FFFD in its place, or leave `columns` out to get the '
        "documents as they are"
    )


def _has_surrogate(value: Any) -> bool:
    return lone_surrogate(json.dumps(value).encode()) != ""


def _raws(rows: Sequence[dict[str, msgspec.Raw]], key: str) -> list[bytes | None]:
    raws = [bytes(row[key]) if key in row else NULL for row in rows]
    return [None if raw == NULL else raw for raw in raws]


def _plain_lines(file: BinaryIO) -> Iterator[FramedLines]:
    """The lines of an uncompressed file, some at a time."""
    start, data = 0, b""
    for offset, more in chunks(file):
        if not data:
            start = offset
        data += more
        begin = 0
        while len(data) - begin >= _MIN_CHUNK_BYTES:
            end = data.find(b"\n", begin + _MIN_CHUNK_BYTES - 1) + 1
            if not end:
                break
            yield _plain(start + begin, data[begin:end])
            begin = end
        start, data = start + begin, data[begin:]
    if data:
        yield _plain(start, data)


def _plain_records(file: BinaryIO) -> Iterator[FramedLines]:
    """The records of an array in an uncompressed file, some at a time."""
    start, data = 0, b""
    starts = stops = np.empty(0, np.int64)
    for offset, more, found, open_from in found_records(file):
        if not data:
            start = offset
        data += more
        starts, stops = np.concatenate((starts, found.starts)), np.concatenate((stops, found.stops))
        while len(stops) and stops[-1] - starts[0] >= _MIN_CHUNK_BYTES:
            count = int(np.searchsorted(stops, starts[0] + _MIN_CHUNK_BYTES)) + 1
            yield _records(start, data, starts[:count], stops[:count])
            starts, stops = starts[count:], stops[count:]
        end = int(starts[0] if len(starts) else open_from) - start
        start, data = start + end, data[end:]
    if len(starts):
        yield _records(start, data, starts, stops)


def _records(
    start: int, data: bytes, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
) -> FramedLines:
    first, last = int(starts[0]), int(stops[-1])
    some = bytearray(memoryview(data)[first - start : last - start])
    bounds = zip((starts - first).tolist(), (stops - first).tolist(), strict=True)
    return FramedLines(0, [(first, last)], some, list(bounds))


def _plain(start: int, data: bytes) -> FramedLines:
    return FramedLines(0, [(start, start + len(data))], bytearray(data))


@dataclass(frozen=True, slots=True)
class ColumnsDecoder:
    """Parses chunks; a `Decode`.

    Attributes:
        specs: the stored fields.
        keys: of each.
        replaces_surrogates: see `JsonColumns`.
    """

    specs: tuple[FieldSpec, ...]
    keys: tuple[str, ...]
    replaces_surrogates: bool = False

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        """The columns of a chunk.

        Raises:
            ValueError: a line is no object, or has other values than when it was indexed.
        """
        begin, stop, flags = chunk.parameters
        is_compressed = bool(flags & _COMPRESSED)
        data = decompress(chunk.pieces) if is_compressed else bytes(chunk.pieces[0][1])
        lines = (records_of if flags & _ARRAY else lines_of)(data[begin:stop])
        if self.replaces_surrogates:
            lines = list(map(without_surrogates, lines))
        try:
            return TypedLines(self.specs, self.keys).columns(b"\n".join(lines))
        except ValueError:
            pieces = [(start, start + len(piece)) for start, piece in chunk.pieces]
            bounds = bounds_of(data[begin:stop]) if flags & _ARRAY else None
            whole = FramedLines(begin, pieces, bytearray(data[:stop]), bounds)
            _rows_of(lines, partial(_line, whole, 1, is_compressed=bool(is_compressed)))
            raise  # of an object without a place: a value of another kind
