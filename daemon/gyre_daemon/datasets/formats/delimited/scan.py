"""Finds the cells of a table of text, without looking at its characters one by one.

A delimiter or line feed counts if the number of quotes before it in its record is even: within a
quoted cell that number is odd, and a doubled quote within a cell counts twice.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.lines.scan import chunks

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
# More than that without the end of a record is no table; it is kept in memory until the end comes.
_MAX_RECORD_BYTES = 64 << 20

Int64s = npt.NDArray[np.int64]


class MalformedTable(ValueError):
    """A file is no table of the declared kind.

    Attributes:
        offset: where, in bytes.
    """

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset


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
        MalformedTable: with the offset.
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
            raise MalformedTable(
                offset + first,
                f"a record has {cells_of[wrong[0]]} cells, and there are {len(names)} columns",
            )
        start, size, length = _without_quotes(data, offset, start, stop)
        tables.append((start + offset, size, length))
    nothing = np.empty(0, np.int64)
    columns = [
        np.concatenate([nothing, *parts]).reshape(-1, len(names) or 1)
        for parts in (zip(*tables, strict=True) if tables else ((), (), ()))
    ]
    return {
        "start": columns[0],
        "size": columns[1],
        "length": columns[2],
        "names": np.frombuffer(json.dumps(names).encode(), np.uint8),
    }


def _whole_records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Pieces of a file that end where a record ends, each with its offset."""
    begin, pending = 0, b""
    for offset, chunk in chunks(file):
        if not pending:
            begin = offset
        pending += chunk
        newlines = _outside_quotes(np.frombuffer(pending, np.uint8), _NEWLINE)
        if len(newlines):
            stop = int(newlines[-1]) + 1
            yield begin, pending[:stop]
            begin, pending = begin + stop, pending[stop:]
        elif len(pending) > _MAX_RECORD_BYTES:
            raise MalformedTable(begin, f"no record ends within {_MAX_RECORD_BYTES >> 20} MiB")
    if pending:
        if pending.count(_QUOTE) % 2:
            raise MalformedTable(begin, "the record there has a quote without a second one")
        yield begin, pending + b"\n"


def _outside_quotes(values: npt.NDArray[np.uint8], *wanted: int) -> Int64s:
    """Where the wanted bytes stand outside of quotes; the first byte begins a record."""
    is_inside = np.cumsum(values == _QUOTE, dtype=np.int64) & 1
    is_wanted = values == wanted[0]
    for each in wanted[1:]:
        is_wanted |= values == each
    return np.flatnonzero(is_wanted & (is_inside == 0))


def _cells(data: bytes, delimiter: int) -> tuple[Int64s, Int64s, Int64s]:
    """Begin and end of all cells, quotes included, and how many cells each record has.

    An empty line is no record.
    """
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
        names = next(csv.reader(io.StringIO(record.decode(), newline=""), delimiter=delimiter))
    except (ValueError, csv.Error) as error:
        raise MalformedTable(offset, f"the names of the columns cannot be read: {error}") from error
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedTable(offset, f"two columns have the name {twice!r:.100}")
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
        raise MalformedTable(
            offset + int(start[wrong[0]]),
            "a cell has a quote but is not wholly quoted; write it as RFC 4180 says",
        )
    size = stop - start - 2 * is_quoted
    return start + is_quoted, size, size - np.where(is_quoted, (has - 2) // 2, 0)
