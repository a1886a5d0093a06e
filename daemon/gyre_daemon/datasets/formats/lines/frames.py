"""Lines of files that zstd compressed: chunks are one or several frames. Pure.

A line may begin in one frame and end in another. It belongs to the chunk in which it begins, and
that chunk has the further frames, too. So a chunk is frames, and which bytes of them are its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec
from gyre_daemon.datasets.formats.chunks import Column, StoredChunk, chunk_arrays
from gyre_daemon.datasets.formats.zstd import decompress, frames

# Frames are joined to chunks of at least this size, decompressed. Each chunk costs a turn of a
# decoder of about a millisecond; larger ones mix worse in the order `block`.
_MIN_CHUNK_BYTES = 1 << 20
_UTF8_MARK = b"\xef\xbb\xbf"


@dataclass(slots=True)
class FramedLines:
    """Pieces of a file, and the bytes `[begin, ...)` of what they have, which are lines."""

    begin: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

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

    def scan(self, file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
        """What `chunk_arrays` returns for a file.

        Args:
            file: is read once.
            check: is called with the first line that is not empty.

        Raises:
            ValueError: the file is damaged; says at which byte.
            ConfigError: the extra `zstd` is not installed.
        """
        rows: list[int] = []
        pieces: list[Sequence[tuple[int, int]]] = []
        columns: list[Sequence[Column]] = []
        cuts: list[tuple[int, int]] = []
        for chunk in framed_lines(file):
            lines = self._lines(memoryview(chunk.data)[chunk.begin :])
            if not rows:
                check(next((line for line in lines if line), b""))
            if lines:
                rows.append(len(lines))
                pieces.append(chunk.pieces)
                columns.append([_column(lines)])
                cuts.append((chunk.begin, len(chunk.data)))
        return chunk_arrays([self.spec], rows, pieces, columns, parameters=cuts)

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        """The lines of a chunk; a `Decode`."""
        begin, stop = chunk.parameters
        return [_column(self._lines(memoryview(decompress(chunk.pieces))[begin:stop]))]

    def _lines(self, data: memoryview) -> list[bytes]:
        return lines_of(bytes(data), keeps_empty=self.keeps_empty)


def lines_of(data: bytes, *, keeps_empty: bool = False) -> list[bytes]:
    """The lines without their ends; the last one needs none."""
    lines = data.split(b"\n")
    last = lines.pop()
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    lines += [last] * bool(last)
    return lines if keeps_empty else [line for line in lines if line]


def framed_lines(file: BinaryIO) -> Iterator[FramedLines]:
    """All chunks of a file, each to the end of the last line that begins in it.

    A byte order mark at the beginning of the file is left out.
    """
    for number, chunk in enumerate(_framed(file)):
        if number == 0 and chunk.data.startswith(_UTF8_MARK):
            chunk.begin = len(_UTF8_MARK)
        yield chunk


def _framed(file: BinaryIO) -> Iterator[FramedLines]:
    current, unfinished = FramedLines(), None
    for start, stop, data in frames(file):
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
