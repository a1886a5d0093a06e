"""The formats `csv` and `tsv`: every record of a table is one sample, with a field for each column.

In: UTF-8 text as RFC 4180 describes it, with the names of the columns in the first record. Out:
the places of each record's cells, found without looking at characters one by one.

A delimiter or line feed counts if the number of quotes before it in its record is even: within a
quoted cell that number is odd, and a doubled quote within a cell counts twice.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    SampleIndex,
    Scan,
    array_of,
    corrupt,
    json_of,
    presence_of,
    require,
)
from gyre_daemon.datasets.formats.chunk_index import DamagedPart, num_samples
from gyre_daemon.datasets.formats.concat import assemble_union
from gyre_daemon.datasets.formats.lines import pieces_of
from gyre_daemon.datasets.formats.sample_table import (
    SampleTable,
    SchemaOptions,
    check_columns,
    chosen_columns,
    common_schema,
    joined_columns,
)
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.shard import Shard

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
# More than that without the end of a record is no table; it is kept in memory until the end comes.
_MAX_RECORD_BYTES = 64 << 20
_NAMES = msgspec.json.Decoder(list[str])

Int64s = npt.NDArray[np.int64]


def scan_table(file: BinaryIO, delimiter: str, names: Sequence[str]) -> Arrays:
    """The places of the cells of N records of F columns.

    Args:
        file: is read once.
        delimiter: one character of ASCII, between the cells.
        names: of the columns; empty if the first record has them.

    Returns:
        start, size: int64 [N, F], first byte and length of each cell, without its quotes.
        length: int64 [N, F], the length once doubled quotes are single ones.
        names: JSON of the columns' names.

    Raises:
        DamagedPart: it is no table of the declared kind; with the offset.
    """
    names = list(names)
    tables: list[tuple[Int64s, Int64s, Int64s]] = []
    for offset, data in _whole_records(file):
        start, stop, cells_of = _cells(data, ord(delimiter))
        if not len(cells_of):
            continue
        if not names:
            names = _names(data[: stop[cells_of[0] - 1]], delimiter, offset)
            start, stop = start[cells_of[0] :], stop[cells_of[0] :]
            cells_of = cells_of[1:]
        if (wrong := np.flatnonzero(cells_of != len(names))).size:
            first = int(start[cells_of[: wrong[0]].sum()])
            has = f"a record has {cells_of[wrong[0]]} cells"
            raise DamagedPart(f"{has}, and there are {len(names)} columns", offset + first)
        start, size, length = _without_quotes(data, offset, start, stop)
        tables.append((start + offset, size, length))
    nothing = np.empty(0, np.int64)
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.concatenate([nothing, *(table[place] for table in tables)]).reshape(
            -1, len(names) or 1
        )
        for place, name in enumerate(("start", "size", "length"))
    }
    return {**arrays, "names": np.frombuffer(json.dumps(names).encode(), np.uint8)}


def _whole_records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Pieces of a file that end where a record ends, each with its offset."""
    begin, pending = 0, b""
    for offset, chunk in pieces_of(file):
        if not pending:
            begin = offset
        pending += chunk
        newlines = _outside_quotes(np.frombuffer(pending, np.uint8), _NEWLINE)
        if len(newlines):
            stop = int(newlines[-1]) + 1
            yield begin, pending[:stop]
            begin, pending = begin + stop, pending[stop:]
        elif len(pending) > _MAX_RECORD_BYTES:
            raise DamagedPart(f"no record ends within {_MAX_RECORD_BYTES >> 20} MiB", begin)
    if pending:
        if pending.count(_QUOTE) % 2:
            raise DamagedPart("the record there has a quote without a second one", begin)
        yield begin, pending + b"\n"


def _outside_quotes(values: npt.NDArray[np.uint8], *wanted: int) -> Int64s:
    """Where the wanted bytes stand outside of quotes; the first byte begins a record."""
    is_inside = np.cumsum(values == _QUOTE, dtype=np.int64) & 1
    is_wanted = values == wanted[0]
    for each in wanted[1:]:
        is_wanted |= values == each
    return np.flatnonzero(is_wanted & (is_inside == 0))


def _cells(data: bytes, delimiter: int) -> tuple[Int64s, Int64s, Int64s]:
    """Begin and end of all cells, quotes included, and how many cells each record has."""
    values = np.frombuffer(data, np.uint8)
    stop = _outside_quotes(values, delimiter, _NEWLINE)
    start = np.concatenate(([0], stop[:-1] + 1))
    is_last = values[stop] == _NEWLINE
    stop = stop - (is_last & (stop > start) & (values[stop - 1] == _RETURN))
    lasts = np.flatnonzero(is_last)
    cells_of = np.diff(lasts, prepend=-1)
    is_empty = (cells_of == 1) & (stop[lasts] == start[lasts])
    if is_empty.any():
        start, stop = np.delete(start, lasts[is_empty]), np.delete(stop, lasts[is_empty])
        cells_of = cells_of[~is_empty]
    return start, stop, cells_of


def _names(record: bytes, delimiter: str, offset: int) -> list[str]:
    try:
        lines = csv.reader(io.StringIO(record.decode(), newline=""), delimiter=delimiter)
        names = next(lines)
        if next(lines, None) is not None:
            raise ValueError("a line ends with a carriage return alone. Write line feeds behind it")
    except (ValueError, csv.Error) as error:
        raise DamagedPart(f"the names of the columns cannot be read: {error}", offset) from error
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DamagedPart(f"two columns have the name {twice!r:.100}", offset)
    return names


def _without_quotes(
    data: bytes, offset: int, start: Int64s, stop: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Begin and size of all cells without the quotes around them, and their real length."""
    values = np.frombuffer(data, np.uint8)
    quotes = np.concatenate(([0], np.cumsum(values == _QUOTE, dtype=np.int64)))
    has = quotes[stop] - quotes[start]
    is_quoted = (values[start] == _QUOTE) & (values[stop - 1] == _QUOTE) & (stop - start > 1)
    wrong = np.flatnonzero((has > 0) & ~is_quoted)
    if len(wrong):
        raise DamagedPart(
            "a cell has a quote but is not wholly quoted; write it as RFC 4180 says",
            offset + int(start[wrong[0]]),
        )
    size = stop - start - 2 * is_quoted
    return start + is_quoted, size, size - np.where(is_quoted, (has - 2) // 2, 0)


_STORED: Mapping[str, tuple[str, CodecName]] = {
    "int64": ("<i8", "integer"),
    "float64": ("<f8", "number"),
}


@dataclass(frozen=True, slots=True)
class DelimitedOptions(SchemaOptions):
    """The keys of a `csv` or `tsv` dataset.

    Attributes:
        types: of columns with numbers, by the name in the file: `int64` or `float64`.
        names: of the columns, if the files do not begin with them.
        delimiter: one character of ASCII; empty for a comma, or for `tsv` a tab.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    delimiter: str = ""

    def __post_init__(self) -> None:
        """Reject options that fit no table."""
        SchemaOptions.__post_init__(self)
        if self.delimiter and (len(self.delimiter) > 1 or self.delimiter in '"\r\n\0'):
            raise ConfigError("`delimiter` must be one character, and no quote or end of a line")
        if not self.delimiter.isascii():
            raise ConfigError("`delimiter` must be a character of ASCII")
        for name, column_type in self.types.items():
            if column_type not in ("text", *_STORED):
                raise ConfigError(
                    f"the type of column {name!r:.100} is {column_type!r:.100}; it must be one of "
                    f"text, {', '.join(_STORED)}"
                )


class CsvFormat:
    """A `Format` that reads each file once to find its cells."""

    pattern = "*.{csv,csv.gz}"
    unpacks_gzip = True
    _usual_delimiter = ","

    def __init__(self, options: DelimitedOptions) -> None:
        self._options = options
        self._delimiter = options.delimiter or self._usual_delimiter

    @property
    def inspection(self) -> Scan:
        kind = json.dumps([self._delimiter, self._options.names])
        return Scan(f"delimited/1 {kind}", self._scan, num_samples, _check)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        known = {name for scan in inspected for name in _NAMES.decode(scan["names"].tobytes())}
        for column in self._options.types:
            if known and column not in known:
                raise ConfigError(
                    f"there is no column {column!r:.100}, which `types` has; the files have "
                    f"{', '.join(sorted(known)):.1000}"
                )
        return assemble_union(self._options, shards, inspected, "names", self._assemble)

    def _assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        """The index of shards that have the same columns."""
        every = [_NAMES.decode(scan["names"].tobytes()) for scan in inspected]
        names = (
            common_schema(shards, [each or None for each in every], "the columns {}".format) or []
        )
        chosen = chosen_columns(self._options, names, shards[0].name) if names else []
        places = [place for _, place in chosen]
        start, size, length = (
            joined_columns(inspected, name, places) for name in ("start", "size", "length")
        )
        has_doubled = (size != length).any(axis=0).tolist()
        specs = [
            _spec(field, self._options.types.get(names[place], "text"), has_doubled=doubled)
            for (field, place), doubled in zip(chosen, has_doubled, strict=True)
        ]
        is_number = np.array([not spec.ragged for spec in specs], np.bool_)
        absent = (size == 0) & is_number
        optional = np.flatnonzero(absent.any(axis=0))
        return SampleTable(
            [*specs, *(presence_of(specs[place].name) for place in optional)],
            [len(scan["size"]) for scan in inspected],
            start,
            size,
            identity=json.dumps([(spec.name, spec.codec) for spec in specs]).encode(),
            absent=absent if len(optional) else None,
            indexed=[~absent[:, place] for place in optional],
            lengths={
                number: length[:, number]
                for number, spec in enumerate(specs)
                if spec.codec == "quoted"
            },
        )

    def _scan(self, shard: str, file: BinaryIO) -> Arrays:
        try:
            return scan_table(file, self._delimiter, self._options.names)
        except DamagedPart as error:
            raise corrupt(shard, error.offset, str(error)) from error


class TsvFormat(CsvFormat):
    """The same, with tabs between the cells."""

    pattern = "*.{tsv,tsv.gz}"
    _usual_delimiter = "\t"


def _check(arrays: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    names = json_of(arrays, "names", _NAMES, "its columns have no names")
    check_columns(arrays, file_bytes, len(names))
    size, length = (array_of(arrays, name, np.int64, 2) for name in ("size", "length"))
    fits = length.shape == size.shape and ((2 * length >= size) & (length <= size)).all()
    require(fits, "its lengths are not those of its cells")


def _spec(name: str, column_type: str, *, has_doubled: bool) -> FieldSpec:
    if column_type == "text":
        codec: CodecName = "quoted" if has_doubled else "text"
        return FieldSpec(name, np.dtype(np.uint8), (), ragged=True, codec=codec)
    dtype, codec = _STORED[column_type]
    return FieldSpec(name, np.dtype(dtype), (), ragged=False, codec=codec)
