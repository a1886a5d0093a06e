"""The format `text`: every line of a file is one sample; and the lines of `jsonl`, see there.

The end of a line belongs to no sample. Of uncompressed files the place of each line is indexed.

[Note: Lines in frames of zstd] A file is one frame (RFC 8878) after the other. Those that a decoder
must skip, such as the table of the seekable format, are between them or at the end. A line may
begin in one frame and end in another. It belongs to the block in which it begins, and that block
has the further frames, too. So a block is frames, and which bytes of them are its lines; and a line
is a row of a chunk, which is a block. The library is imported when the first frame is read.
"""

import contextlib
import importlib
import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    FieldSpec,
    NoOptions,
    SampleIndex,
    Scan,
    corrupt,
    require_library,
)
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkIndex,
    Column,
    ScannedChunk,
    StoredChunk,
    check_chunks,
    chunk_arrays,
    num_samples,
    text_column,
)
from gyre_daemon.datasets.formats.sample_table import SampleTable, are_compressed, check_extents
from gyre_daemon.datasets.formats.values import check_text
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.shard import Shard

# Compressed bytes for the decoder at once: they may become 16,000 times as many.
_PIECE_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20
# The most that one frame may have, decompressed. It is in memory several times while its lines
# are found.
MAX_FRAME_BYTES = 1 << 30
_MAGIC, _SKIPPABLE, _SKIPPABLE_MASK = 0xFD2FB528, 0x184D2A50, 0xFFFFFFF0
_HEAD = struct.Struct("<I")


class Frame(NamedTuple):
    """A frame of a file.

    Attributes:
        start: its first byte.
        stop: its end.
        data: decompressed.
    """

    start: int
    stop: int
    data: bytes


@contextlib.contextmanager
def recognised(name: str, file: BinaryIO) -> Iterator[tuple[BinaryIO, bool]]:
    """A file from its beginning, and whether zstd compressed it, by its name or its first bytes."""
    buffered = io.BufferedReader(cast("io.RawIOBase", file), _BUFFER_BYTES)
    try:
        is_compressed = buffered.peek(_HEAD.size)[: _HEAD.size] == _HEAD.pack(_MAGIC)
        yield buffered, is_compressed or name.endswith((".zst", ".zstd"))
    finally:
        buffered.detach()  # the file stays the caller's


def frames(file: BinaryIO) -> Iterator[Frame]:
    """All frames of a file, which is read once.

    Raises:
        ValueError: the file is damaged or cut off, or a frame is too large; says at which byte.
        ConfigError: zstandard is not installed.
    """
    offset, rest = 0, b""  # of the bytes that were read, those that no frame had yet
    while True:
        while len(rest) < _HEAD.size and (more := file.read(_PIECE_BYTES)):
            rest += more
        if not rest:
            return
        start, (magic,) = offset, _HEAD.unpack(rest[: _HEAD.size].ljust(_HEAD.size, b"\0"))
        data, num_bytes, rest = _one_frame(rest, file, start)
        offset += num_bytes
        if magic & _SKIPPABLE_MASK != _SKIPPABLE:
            yield Frame(start, offset, data)


def _one_frame(rest: bytes, file: BinaryIO, start: int) -> tuple[bytes, int, bytes]:
    """The contents of a frame, its size, and the bytes behind it that were read already."""
    library = _library()
    decoder = library.ZstdDecompressor().decompressobj()
    found, num_bytes, num_read = [], 0, 0
    while not decoder.eof:
        piece, rest = rest or file.read(_PIECE_BYTES), b""
        if not piece:
            raise ValueError(f"the frame at byte {start} is cut off")
        try:
            found.append(decoder.decompress(piece))
        except library.ZstdError as error:
            raise ValueError(f"the frame at byte {start} is damaged: {error}") from error
        num_bytes, num_read = num_bytes + len(found[-1]), num_read + len(piece)
        if num_bytes > MAX_FRAME_BYTES:
            raise ValueError(
                f"the frame at byte {start} has more than {MAX_FRAME_BYTES >> 30} GiB. Compress "
                "the file in several frames (`pzstd`, or the seekable format), or in parts."
            )
    rest = decoder.unused_data
    return b"".join(found), num_read - len(rest), rest


def decompress(pieces: Sequence[tuple[int, memoryview]]) -> bytes:
    """The contents of whole frames; each piece is one or several.

    Raises:
        ValueError: a frame is damaged.
    """
    library = _library()
    try:
        decoders = library.ZstdDecompressor()
        return b"".join(
            decoders.decompressobj(read_across_frames=True).decompress(piece) for _, piece in pieces
        )
    except library.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error


def _library() -> Any:
    require_library("zstandard", "files compressed with zstd need", "records")
    return importlib.import_module("zstandard")


UTF8_MARK = b"\xef\xbb\xbf"
_NEWLINE, _RETURN = b"\n\r"
PIECE_BYTES = 4 << 20  # numpy's arrays for one piece stay in the processor's cache or near it
# Frames are joined to blocks of at least this size, decompressed. Each block costs a turn of a
# decoder of about a millisecond; larger ones mix worse in the order `block`.
MIN_BLOCK_BYTES = 1 << 20
BLOCK = "block of lines"


def pieces_of(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The pieces of a file, each with its offset, without a byte order mark at its beginning."""
    offset = 0
    while data := file.read(PIECE_BYTES):
        begin = 0
        if offset == 0:
            while len(data) < len(UTF8_MARK) and (more := file.read(PIECE_BYTES)):
                data += more
            begin = len(UTF8_MARK) if data.startswith(UTF8_MARK) else 0
        if data[begin:]:
            yield offset + begin, data[begin:]
        offset += len(data)


def scan_lines(file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
    """The places of the N lines of a file, found without looking at its characters one by one.

    Lines end with a line feed, or with a carriage return and a line feed. The last line needs no
    end.

    Args:
        file: is read once.
        check: is called with the first nonempty line, unless it is longer than 4 MiB.

    Returns:
        start, size: int64 [N], first byte and length of each line, without its end.
    """
    begin = stop = before = 0
    starts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for offset, data in pieces_of(file):
        if not stop:
            begin = offset
            first, end, _ = data.lstrip(b"\r\n").partition(b"\n")
            if end or len(data) < PIECE_BYTES:
                check(first)
        values = np.frombuffer(data, np.uint8)
        newlines = np.flatnonzero(values == _NEWLINE)
        if len(newlines):
            start = np.concatenate(([begin], newlines[:-1] + offset + 1))
            last = values[newlines - 1]
            if newlines[0] == 0:  # the byte before it was in the piece before
                last[0] = before
            starts.append(start)
            size = newlines + offset - start
            sizes.append(size - ((last == _RETURN) & (size > 0)))
            begin = int(newlines[-1]) + offset + 1
        before, stop = data[-1], offset + len(data)
    if begin < stop:
        starts.append(np.array([begin]))
        sizes.append(np.array([stop - begin]))
    return {"start": np.concatenate(starts), "size": np.concatenate(sizes)}


def lines_of(data: bytes, *, keeps_empty: bool = False) -> list[bytes]:
    """The lines without their ends; the last one needs none."""
    lines = data.split(b"\n")
    last = lines.pop()
    if b"\r" in data:
        lines = [line.removesuffix(b"\r") for line in lines]
    lines += [last] * bool(last)
    return lines if keeps_empty else [line for line in lines if line]


@dataclass(slots=True)
class Block:
    """Pieces of a file, and the bytes `[begin, ...)` of their data, which are whole lines.

    Attributes:
        begin: the first byte of the data that counts.
        pieces: of the file, the bytes `[start, stop)`.
        data: of the pieces, decompressed.
    """

    begin: int = 0
    pieces: list[tuple[int, int]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> bytes:
        """The lines with their ends."""
        return bytes(memoryview(self.data)[self.begin :])

    def add(self, start: int, stop: int, data: bytes) -> None:
        """Take bytes `[start, stop)` of the file, which have this data."""
        self.data += data
        if self.pieces and self.pieces[-1][1] == start:
            self.pieces[-1] = (self.pieces[-1][0], stop)
        else:
            self.pieces.append((start, stop))


def framed_blocks(file: BinaryIO) -> Iterator[Block]:
    """All blocks of a compressed file; see [Note: Lines in frames of zstd].

    A byte order mark at the beginning of the file is left out.

    Raises:
        ValueError: the file is damaged; says at which byte.
        ConfigError: zstandard is not installed.
    """
    for number, block in enumerate(_framed(file)):
        if number == 0 and block.data.startswith(UTF8_MARK):
            block.begin = len(UTF8_MARK)
        yield block


def _framed(file: BinaryIO) -> Iterator[Block]:
    current, unfinished = Block(), None
    for start, stop, data in frames(file):
        if unfinished:
            end = data.find(b"\n") + 1
            unfinished.add(start, stop, data[:end] if end else data)
            if not end:
                continue
            yield unfinished
            current, unfinished = Block(begin=end), None
            if end == len(data):
                current = Block()
                continue
        current.add(start, stop, data)
        if len(current.data) - current.begin >= MIN_BLOCK_BYTES:
            if current.data.endswith(b"\n"):
                yield current
            else:
                unfinished = current
            current = Block()
    yield unfinished or current


def decode_lines(keeps_empty: bool, chunk: StoredChunk) -> Sequence[Column]:
    """The lines of a block of a compressed file; a `Decode`, once `keeps_empty` is set."""
    begin, stop = chunk.parameters
    data = decompress(chunk.pieces)[begin:stop]
    return [text_column(lines_of(data, keeps_empty=keeps_empty))]


class TextFormat:
    """A `Format`: every line of a text file is a sample, empty lines included."""

    pattern = "*.{txt,text,txt.gz,text.gz,txt.zst,text.zst}"
    unpacks_gzip = True
    _field = FieldSpec("text", np.dtype(np.uint8), (), ragged=True, codec="text")
    _keeps_empty = True
    _version = 1

    def __init__(self, options: NoOptions) -> None:
        """There is nothing to choose."""

    @property
    def inspection(self) -> Scan:
        return Scan(
            f"{self._field.name}-lines/{self._version}", self._scan_any, num_samples, _check
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        identity = f"{self._field.name} lines".encode()
        if are_compressed(shards, ["rows" in scan for scan in inspected]):
            decode = partial(decode_lines, self._keeps_empty)
            return ChunkIndex(shards, inspected, decode, BLOCK, identity)
        return SampleTable.of_ranges(self._field, inspected, identity)

    def _scan_any(self, shard: str, file: BinaryIO) -> Arrays:
        check = partial(_check_first, shard, self._check_line)
        try:
            with recognised(shard, file) as (opened, is_compressed):
                if is_compressed:
                    return self._scan_frames(opened, check)
                return self._scan(shard, opened, check)
        except ConfigError:
            raise
        except ValueError as error:
            raise corrupt(shard, None, str(error)) from error

    def _scan(self, shard: str, file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
        """The places of the lines of an uncompressed file."""
        return scan_lines(file, check)

    def _scan_frames(self, file: BinaryIO, check: Callable[[bytes], None]) -> Arrays:
        """The `chunk_arrays` of a compressed file."""
        chunks: list[ScannedChunk] = []
        for block in framed_blocks(file):
            lines = lines_of(block.text, keeps_empty=self._keeps_empty)
            if not chunks:
                check(next((line for line in lines if line), b""))
            if lines:
                cut = block.begin, len(block.data)
                columns = [text_column(lines).without_data]
                chunks.append(ScannedChunk(len(lines), block.pieces, columns, parameters=cut))
        return chunk_arrays([self._field], chunks)

    def _check_line(self, line: bytes) -> None:
        check_text(line)


def _check(scan: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    check = check_chunks if "rows" in scan else check_extents
    check(scan, file_bytes)


def _check_first(shard: str, check: Callable[[bytes], None], line: bytes) -> None:
    """Refuse a file whose first line is nothing that this format serves."""
    try:
        if line:
            check(line)
    except ValueError as error:
        reason = f"its first line does not fit the format: {error}"
        raise corrupt(shard, 0, reason) from error
