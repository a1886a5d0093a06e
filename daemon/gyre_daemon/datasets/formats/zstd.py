"""Frames of zstd, by RFC 8878. Pure; the library is imported when the first frame is read.

A file is one frame after the other. Those that a decoder must skip, such as the table of the
seekable format, are between them or at the end.
"""

import contextlib
import importlib
import io
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from gyre_daemon.datasets.formats.base import require_library

# Compressed bytes for the decoder at once: they may become 16,000 times as many.
_PIECE_BYTES = 64 << 10
_BUFFER_BYTES = 1 << 20
# The most that one frame may have, decompressed. It is in memory several times while its lines
# are found.
MAX_FRAME_BYTES = 1 << 30
_MAGIC, _SKIPPABLE, _SKIPPABLE_MASK = 0xFD2FB528, 0x184D2A50, 0xFFFFFFF0
_HEAD, _SKIPPED = struct.Struct("<I"), struct.Struct("<II")


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
    reader = _Reader(file)
    while head := reader.peek(_SKIPPED.size):
        start = reader.offset
        magic = _HEAD.unpack(head[: _HEAD.size])[0] if len(head) >= _HEAD.size else 0
        if magic & _SKIPPABLE_MASK == _SKIPPABLE and len(head) == _SKIPPED.size:
            reader.skip(_SKIPPED.size + _SKIPPED.unpack(head)[1])
            continue
        if magic != _MAGIC:
            raise ValueError(f"at byte {start} begins no frame of zstd")
        yield Frame(start, *_one_frame(reader, start))


def _one_frame(reader: "_Reader", start: int) -> tuple[int, bytes]:
    """The end of a frame and its contents; the reader is at its end then."""
    library = _library()
    decoder = library.ZstdDecompressor().decompressobj()
    found, num_bytes = [], 0
    while not decoder.eof:
        piece = reader.take(_PIECE_BYTES)
        if not piece:
            raise ValueError(f"the frame at byte {start} is cut off")
        try:
            data = decoder.decompress(piece)
        except library.ZstdError as error:
            raise ValueError(f"the frame at byte {start} is damaged: {error}") from error
        num_bytes += len(data)
        if num_bytes > MAX_FRAME_BYTES:
            raise ValueError(
                f"the frame at byte {start} has more than {MAX_FRAME_BYTES >> 30} GiB. Compress "
                "the file in several frames (`pzstd`, or the seekable format), or in parts."
            )
        found.append(data)
    reader.give_back(decoder.unused_data)
    return reader.offset, b"".join(found)


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


class _Reader:
    """A file to read once, which takes back some bytes.

    Attributes:
        offset: of the next byte.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.offset = 0
        self._file, self._rest = file, b""

    def peek(self, num_bytes: int) -> bytes:
        """The next bytes, which are not taken; fewer at the end."""
        while len(self._rest) < num_bytes and (more := self._file.read(_PIECE_BYTES)):
            self._rest += more
        return self._rest[:num_bytes]

    def take(self, num_bytes: int) -> bytes:
        """Some of the next bytes; none at the end."""
        self.peek(1)
        data, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        self.offset += len(data)
        return data

    def give_back(self, data: bytes) -> None:
        """The last bytes that were taken are not."""
        self._rest = data + self._rest
        self.offset -= len(data)

    def skip(self, num_bytes: int) -> None:
        """Take this many bytes and forget them."""
        while num_bytes and (data := self.take(min(num_bytes, _PIECE_BYTES))):
            num_bytes -= len(data)
        if num_bytes:
            raise ValueError(f"it is cut off at byte {self.offset}")
