"""Finds the records of a JSON array, as a stream and without parsing them. Pure.

Only quotes, brackets and commas are looked at, in numpy. So a file of any size takes the memory of
a piece of it, and 16 bytes for each record.
"""

import io
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.indexes.chunks import DamagedPart
from gyre_daemon.datasets.formats.lines.scan import PIECE_BYTES, chunks

_Int64 = npt.NDArray[np.int64]
_QUOTE, _COMMA, _OPEN, _CLOSE = b'",{]'
_SPACES, _UTF8_MARK = b" \t\r\n", b"\xef\xbb\xbf"
_NOT_SPACE = np.ones(256, np.bool_)
_NOT_SPACE[list(_SPACES)] = False
_STRUCTURAL = np.zeros(256, np.bool_)
_STRUCTURAL[list(b'"{}[],')] = True
_DELTA = np.zeros(256, np.int64)
_DELTA[list(b"{[")], _DELTA[list(b"}]")] = 1, -1

NAME_AN_ARRAY = "If the file is one JSON array of records, name it `.json`"

# An object whose first key has an array.
_OF_ARRAY = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*("(?:[^"\\]|\\.){0,100}")\s*:\s*\[')


def may_be_array(name: str) -> bool:
    """Whether a file of this name may be a JSON array: its bytes tell."""
    return name.removesuffix(".gz").removesuffix(".zst").removesuffix(".zstd").endswith(".json")


def peeked(file: BinaryIO) -> bytes:
    """The first bytes of a file with a buffer, which are not taken."""
    return cast("io.BufferedReader", file).peek()


def is_array(head: bytes) -> bool:
    """Whether a file that begins so is a JSON array, and no lines."""
    return head.removeprefix(_UTF8_MARK).lstrip(_SPACES).startswith(b"[")


def has_records(head: bytes, *, is_whole: bool) -> bool:
    """Whether a file named `.json` that begins so has samples: an array of objects, or lines.

    Args:
        head: of the file.
        is_whole: whether the head is all of it.
    """
    text = head.removeprefix(_UTF8_MARK).lstrip(_SPACES)
    if text.startswith(b"["):
        return text[1:].lstrip(_SPACES).startswith((b"{", b"]"))  # or none yet
    first, newline, rest = text.partition(b"\n")
    if not first.startswith(b"{"):
        return False
    if not newline:
        return not is_whole
    return first.rstrip().endswith(b"}") and rest.lstrip(_SPACES).startswith(b"{")


def check_is_records(head: bytes, num_lines: int | None = None) -> None:
    """Refuse a file named `.json` with one object: metadata, or an array within an object.

    Args:
        head: of the file, which is no array.
        num_lines: of the file; None as long as unknown.

    Raises:
        ValueError: it has one line, or its first line is not the whole object.
    """
    first, newline, _ = head.removeprefix(_UTF8_MARK).lstrip(_SPACES).partition(b"\n")
    is_cut = bool(newline) and first.startswith(b"{") and not first.rstrip().endswith(b"}")
    if num_lines != 1 and not is_cut:
        return
    found = _OF_ARRAY.match(head)
    if found:
        key = found[1].decode(errors="replace")
        fix = f"Its key {key} has an array: write that alone, as `jq '.[{key}]'` does"
    else:
        fix = (
            'If it is a sample, serve whole files: format="files", extensions=["json"]. If it is '
            "none, name the files with samples by a pattern"
        )
    raise ValueError(f"it is one JSON object, and no array or lines of objects. {fix}")


class Records(NamedTuple):
    """Records that end in a piece of a file.

    Attributes:
        starts: int64, the first byte of each in the file.
        stops: int64, the end of each, exclusive.
    """

    starts: _Int64
    stops: _Int64


class RecordFinder:
    """Takes a file piece by piece, and says where the records of its array are.

    Attributes:
        num_records: whose ends were seen.
        open_from: where the first record begins or will begin whose end was not seen.
    """

    def __init__(self) -> None:
        self.num_records = self.open_from = 0
        self._rest = b""  # half an escape, at the end of a piece
        self._is_begun = self._is_ended = self._in_string = False
        self._depth = 0  # 0 between records
        self._start = -1  # of a record whose end was not seen
        self._num_commas = 0  # after the last record

    def feed(self, offset: int, piece: bytes) -> Records:
        """Take the next bytes.

        Args:
            offset: of the piece in the file.
            piece: of the file, after the one before.

        Raises:
            DamagedPart: it is no array of objects.
        """
        offset, data = offset - len(self._rest), self._rest + piece
        clean = data.replace(b"\\\\", b"__")
        self._rest = data[-1:] if clean.endswith(b"\\") else b""
        if self._rest:
            data, clean = data[:-1], clean[:-1]
        self.open_from = offset + len(data)
        clean = clean.replace(b'\\"', b"__")
        begin = 0
        if not self._is_begun:
            begin = len(data) - len(data.removeprefix(_UTF8_MARK).lstrip(_SPACES))
            if begin == len(data):
                return _NO_RECORDS
            if data[begin : begin + 1] != b"[":
                raise DamagedPart("it does not begin with a bracket", offset + begin)
            self._is_begun = True
            begin += 1
        return self._find(offset + begin, clean[begin:])

    def feed_whole(self, data: bytes, offset: int = 0) -> Records:
        """Take the next bytes, which may be many, as pieces of a file are; see `feed`."""
        found = [
            self.feed(offset + begin, data[begin : begin + PIECE_BYTES])
            for begin in range(0, len(data), PIECE_BYTES)
        ]
        return Records(*(np.concatenate(each) for each in zip(*found, strict=True)))

    @property
    def in_record(self) -> bool:
        """Whether a record has begun, and not ended."""
        return self._start >= 0

    def finish(self, num_bytes: int) -> None:
        """Check that the array has ended.

        Args:
            num_bytes: of the file.

        Raises:
            DamagedPart: it has not.
        """
        if self._is_begun and not self._is_ended:
            raise DamagedPart(
                f"its array does not end after record {self.num_records}: it is cut off", num_bytes
            )

    def _find(self, offset: int, data: bytes) -> Records:
        values = np.frombuffer(data, np.uint8)
        if self._is_ended:
            self._check_end(offset, values)
            return _NO_RECORDS
        places = np.flatnonzero(_STRUCTURAL[values])
        kinds = values[places]
        quotes = kinds == _QUOTE
        in_string = (np.cumsum(quotes) + self._in_string) & 1
        outside = ~quotes & (in_string == 0)
        if len(places):
            self._in_string = bool(in_string[-1])
        before = self._depth
        places, kinds = places[outside], kinds[outside]
        deltas = _DELTA[kinds]
        depths = np.cumsum(deltas) + before
        ends = np.flatnonzero(depths < 0)
        if len(ends):
            end = int(places[ends[0]])
            if kinds[ends[0]] != _CLOSE:
                raise DamagedPart("its array ends with a brace", offset + end)
            self._is_ended = True
            self._check_end(offset + end + 1, values[end + 1 :])
            places, kinds = places[: ends[0]], kinds[: ends[0]]
            deltas, depths, values = deltas[: ends[0]], depths[: ends[0]], values[:end]
        starts = places[(deltas > 0) & (depths == 1)]
        stops = places[(deltas < 0) & (depths == 0)] + 1
        commas = places[(kinds == _COMMA) & (depths == 0)]
        self._depth = int(depths[-1]) if len(depths) else before
        self._check_gaps(offset, values, starts, stops, commas, in_gap=before == 0)
        if len(wrong := np.flatnonzero(values[starts] != _OPEN)):
            raise self._no_object(offset + int(starts[wrong[0]]), int(wrong[0]) + (before > 0))
        self.num_records += len(stops)
        starts, stops = starts + offset, stops + offset
        if self._start >= 0:
            starts = np.concatenate(([self._start], starts))
        self._start = int(starts[-1]) if len(starts) > len(stops) else -1
        if self._start >= 0:
            self.open_from = self._start
        return Records(starts[: len(stops)], stops)

    def _check_gaps(
        self,
        offset: int,
        values: npt.NDArray[np.uint8],
        starts: _Int64,
        stops: _Int64,
        commas: _Int64,
        *,
        in_gap: bool,
    ) -> None:
        """Check that between records there is one comma, and nothing else but white space."""
        begins = np.concatenate(([0], stops)) if in_gap else stops
        ends = np.concatenate((starts, [len(values)])) if self._depth == 0 else starts
        if not len(begins):
            return
        count = np.concatenate(([0], np.cumsum(_NOT_SPACE[values], dtype=np.int64)))
        has = count[ends] - count[begins]
        num_commas = np.searchsorted(commas, ends) - np.searchsorted(commas, begins)
        first = self.num_records + (not in_gap)  # records before the first gap
        if len(wrong := np.flatnonzero(has != num_commas)):
            gap = int(wrong[0])
            raise self._no_object(offset + int(begins[gap]), first - self.num_records + gap)
        if in_gap:
            num_commas[0] += self._num_commas
        wanted = np.minimum(np.arange(first, first + len(num_commas)), 1)
        self._num_commas = 0
        if self._depth == 0:  # the last gap goes on, or is before the end
            self._num_commas = int(num_commas[-1])
            most = 0 if self._is_ended else int(wanted[-1])
            wanted[-1] = min(self._num_commas, most)
        if len(wrong := np.flatnonzero(num_commas != wanted)):
            gap = int(wrong[0])
            raise DamagedPart(
                f"there must be one comma between records (record {first + gap} is followed by "
                f"{num_commas[gap]})",
                offset + int(begins[gap]),
            )

    def _no_object(self, place: int, number: int) -> DamagedPart:
        return DamagedPart(
            f"record {self.num_records + number + 1} of its array is no object", place
        )

    def _check_end(self, offset: int, values: npt.NDArray[np.uint8]) -> None:
        if len(wrong := np.flatnonzero(_NOT_SPACE[values])):
            raise DamagedPart(
                "more follows after the end of its array. If each line has an array, name the file "
                "`.jsonl`",
                offset + int(wrong[0]),
            )


_NO_RECORDS = Records(np.empty(0, np.int64), np.empty(0, np.int64))


def scan_array(file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
    """Where the N records of an array are.

    Args:
        file: is read once.
        check: is called with the first record, unless it is longer than a piece of the file.

    Returns:
        start, size: int64 [N], first byte and length of each record.

    Raises:
        DamagedPart: it is no array of objects.
    """
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for offset, data, found, _ in found_records(file):
        if len(found.starts) and len(starts) == 1 and found.starts[0] >= offset:
            check(data[found.starts[0] - offset : found.stops[0] - offset])
        starts.append(found.starts)
        sizes.append(found.stops - found.starts)
    return {"start": np.concatenate(starts), "size": np.concatenate(sizes)}


def bounds_of(data: bytes) -> list[tuple[int, int]]:
    """The bytes `[start, stop)` of successive records, with commas between them.

    Raises:
        DamagedPart: they do not.
    """
    finder = RecordFinder()
    found = finder.feed_whole(b"[" + data + b"]", -1)
    finder.finish(len(data))
    return list(zip(found.starts.tolist(), found.stops.tolist(), strict=True))


def records_of(data: bytes) -> list[bytes]:
    """The same records themselves."""
    return [data[start:stop] for start, stop in bounds_of(data)]


def found_records(file: BinaryIO) -> Iterator[tuple[int, bytes, Records, int]]:
    """The pieces of a file, each with its offset, the records that end in it, and `open_from`."""
    finder, stop = RecordFinder(), 0
    for offset, data in chunks(file):
        found = finder.feed(offset, data)
        yield offset, data, found, finder.open_from
        stop = offset + len(data)
    finder.finish(stop)
