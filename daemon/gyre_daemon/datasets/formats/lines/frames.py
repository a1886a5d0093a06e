"""Lines of files that zstd compressed: chunks are one or several frames. Pure.

A line, or a record of an array, may begin in one frame and end in another. It belongs to the chunk
in which it begins, and that chunk has the further frames, too. So a chunk is frames, and which
bytes of them are its own.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec
from gyre_daemon.datasets.formats.indexes.chunks import Column, StoredChunk, chunk_arrays
from gyre_daemon.datasets.formats.lines.array import (
    RecordFinder,
    Records,
    is_array,
    records_of,
)
from gyre_daemon.datasets.formats.zstd import Frame, decompress, frames

# Frames are joined to chunks of at least this size, decompressed. Each chunk costs a turn of a
# decoder of about a millisecond; larger ones mix worse in the order `block`.
_MIN_CHUNK_BYTES = 1 << 20
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class FramedLines:
    """Pieces of a file, and the bytes `[begin, ...)` of their data, which are lines.

    Attributes:
        begin: the first byte of the data that counts.
        pieces: of the file, the bytes `[start, stop)`.
        data: of the pieces, up to the last byte that counts.
        records: of an array, the bytes `[start, stop)` of each record in the data; None of lines.
    """

    begin: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    records: list[tuple[int, int]] | None = None

    def lines(self, *, keeps_empty: bool = False) -> list[bytes]:
        """The lines without their ends, or the records."""
        if self.records is None:
            data = bytes(memoryview(self.data)[self.begin :])
            return lines_of(data, keeps_empty=keeps_empty)
        return [bytes(self.data[start:stop]) for start, stop in self.records]

    def take_records(self, base: int, found: Sequence[Records]) -> bool:
        """Keep only these records; whether there are any.

        Args:
            base: where the data begins, as the records have it.
            found: the records that begin in the data.
        """
        starts, stops = (np.concatenate(each) - base for each in zip(*found, strict=True))
        self.records = list(zip(starts.tolist(), stops.tolist(), strict=True))
        if self.records:
            self.begin = self.records[0][0]
            del self.data[self.records[-1][1] :]
        return bool(self.records)

    def add(self, start: int, stop: int, data: bytes) -> None:
        """Take bytes `[start, stop)` of the file, which have this data."""
        self.data += data
        if self.pieces and self.pieces[-1][1] == start:
            self.pieces[-1] = (self.pieces[-1][0], stop)
        else:
            self.pieces.append((start, stop))


@dataclass(frozen=True, slots=True)
class LineFrames:
    """Scans and decodes such files.

    Attributes:
        spec: the field.
        keeps_empty: whether empty lines are samples.
    """

    spec: FieldSpec
    keeps_empty: bool

    def scan(
        self, file: BinaryIO, check: Callable[[bytes], None], *, may_be_array: bool = False
    ) -> Arrays:
        """The `chunk_arrays` of a file.

        Args:
            file: is read once.
            may_be_array: whether the file may be a JSON array.
            check: is called with the first nonempty line.

        Raises:
            ValueError: the file is damaged; says at which byte.
            ConfigError: zstandard is not installed.
        """
        rows: list[int] = []
        pieces: list[Sequence[tuple[int, int]]] = []
        columns: list[Sequence[Column]] = []
        cuts: list[tuple[int, ...]] = []
        for chunk in framed_lines(file, may_be_array=may_be_array):
            lines = chunk.lines(keeps_empty=self.keeps_empty)
            if not rows:
                check(next((line for line in lines if line), b""))
            if lines:
                rows.append(len(lines))
                pieces.append(chunk.pieces)
                columns.append([_column(lines)])
                mark = [1] * (chunk.records is not None)
                cuts.append((chunk.begin, len(chunk.data), *mark))
        return chunk_arrays([self.spec], rows, pieces, columns, parameters=cuts)

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        """The lines of a chunk; a `Decode`."""
        begin, stop, *mark = chunk.parameters
        data = decompress(chunk.pieces)[begin:stop]
        if mark:
            return [_column(records_of(data))]
        return [_column(lines_of(data, keeps_empty=self.keeps_empty))]


def lines_of(data: bytes, *, keeps_empty: bool = False) -> list[bytes]:
    """The lines without their ends; the last one needs none."""
    lines = data.split(b"\n")
    last = lines.pop()
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    lines += [last] * bool(last)
    return lines if keeps_empty else [line for line in lines if line]


def framed_lines(file: BinaryIO, *, may_be_array: bool = False) -> Iterator[FramedLines]:
    """All chunks of a file, each to the end of the last line or record that begins in it.

    A byte order mark at the beginning of the file is left out.

    Raises:
        ValueError: the file is damaged, or one object of JSON where it may be an array.
    """
    its = frames(file)
    first = next(its, None)
    its = itertools.chain([first] if first else [], its)
    if may_be_array and first and is_array(first.data):
        yield from _framed_records(its)
        return
    for number, chunk in enumerate(_framed(its)):
        if number == 0 and chunk.data.startswith(_UTF8_MARK):
            chunk.begin = len(_UTF8_MARK)
        yield chunk


def _framed_records(its: Iterator[Frame]) -> Iterator[FramedLines]:
    finder, num_bytes, base = RecordFinder(), 0, 0
    current, is_unfinished = FramedLines(), False
    records: list[Records] = []
    for start, stop, data in its:
        found, offset = finder.feed_whole(data, num_bytes), num_bytes
        num_bytes += len(data)
        if is_unfinished:
            current.add(start, stop, data)
            records.append(Records(found.starts[:1], found.stops[:1]))
            if not len(found.stops):
                continue
            if current.take_records(base, records):
                yield current
            found = Records(found.starts[1:], found.stops[1:])
            current, records, base, is_unfinished = FramedLines(), [], offset, False
        current.add(start, stop, data)
        records.append(found)
        if len(current.data) >= _MIN_CHUNK_BYTES:
            is_unfinished = finder.in_record
            if not is_unfinished:
                if current.take_records(base, records):
                    yield current
                current, records, base = FramedLines(), [], num_bytes
    finder.finish(num_bytes)
    if records and current.take_records(base, records):
        yield current


def _framed(its: Iterator[Frame]) -> Iterator[FramedLines]:
    current, unfinished = FramedLines(), None
    for start, stop, data in its:
        if unfinished:
            end = data.find(b"\n") + 1
            unfinished.add(start, stop, data[:end] if end else data)
            if not end:
                continue
            yield unfinished
            current, unfinished = FramedLines(begin=end), None
            if end == len(data):
                current = FramedLines()
                continue
        current.add(start, stop, data)
        if len(current.data) - current.begin >= _MIN_CHUNK_BYTES:
            if current.data.endswith(b"\n"):
                yield current
            else:
                unfinished = current
            current = FramedLines()
    yield unfinished or current


def _column(lines: Sequence[bytes]) -> Column:
    ends = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)))
    return Column(np.frombuffer(b"".join(lines), np.uint8), ends)
