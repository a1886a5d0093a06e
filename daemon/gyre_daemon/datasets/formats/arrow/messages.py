"""The messages of an Arrow IPC file or stream: its schema, and where record batches have buffers.

Layout: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc.
A file is a stream between two magic words, with a footer. So both are read as a stream, from
message to message, and the bodies are passed over. Parts of a body are read when needed.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from gyre_daemon.datasets.formats.arrow.flatbuffer import Table

_MAGIC = b"ARROW1"
_MAGIC_BYTES = 8  # padded
_CONTINUATION = 0xFFFFFFFF
_HEAD = struct.Struct("<II")
_MAX_METADATA_BYTES = 64 << 20
# Bytes to read at once at the beginning of each message: the metadata of most.
_READ_BYTES = 8 << 10
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_COMPRESSIONS = {0: "lz4", 1: "zstd"}


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """A record batch and its place.

    Attributes:
        offset: of its message in the file.
        num_rows: that it has.
        nodes: of each array, its length and its number of nulls.
        buffers: of each buffer, its first byte in the file and its size.
        body: first byte and end of its body.
        compression: of the buffers; empty if there is none.
    """

    offset: int
    num_rows: int
    nodes: list[tuple[int, ...]]
    buffers: list[tuple[int, int]]
    body: tuple[int, int]
    compression: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        offset: of its first byte in the file.
        schema: the whole message, if it is a schema.
        batch: the record batch, if it is one.
        is_dictionary: whether it is a batch of a dictionary.
    """

    offset: int
    schema: bytes = b""
    batch: RecordBatch | None = None
    is_dictionary: bool = False


class Messages:
    """The messages of a file, in their order.

    Attributes:
        offset: of the message read now.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.offset = 0
        self._file = file
        self._size = file.seek(0, os.SEEK_END)

    def __iter__(self) -> Iterator[Message]:
        """All messages.

        Raises:
            ValueError: one is damaged, or the file is cut off.
        """
        is_file = self._read(0, _MAGIC_BYTES).startswith(_MAGIC)
        if is_file and (self._size < 20 or self._read(self._size - 6, 6) != _MAGIC):
            raise ValueError("it does not end as an Arrow file does; it is cut off")
        position = _MAGIC_BYTES if is_file else 0
        while True:
            self.offset = position
            data = self._read(position, min(_READ_BYTES, self._size - position))
            if len(data) < _HEAD.size:
                raise ValueError("it ends without the mark at the end of a stream; it is cut off")
            first, num_bytes = _HEAD.unpack_from(data)
            if first != _CONTINUATION:
                raise ValueError("here is no message of Arrow, or one of before version 0.15")
            if not num_bytes:
                if not is_file and position + _HEAD.size != self._size:
                    raise ValueError("it goes on behind the end of its stream")
                return
            if num_bytes > _MAX_METADATA_BYTES:
                raise ValueError(f"a message claims {num_bytes} bytes of metadata")
            end = position + _HEAD.size + num_bytes
            if _HEAD.size + num_bytes > len(data):
                data = self._read(position, _HEAD.size + num_bytes)
            if _HEAD.size + num_bytes > len(data):
                raise ValueError("it ends within the metadata of a message")
            message, position = self._parsed(data[: _HEAD.size + num_bytes], position, end)
            yield message

    def read(self, start: int, size: int) -> bytes:
        """A part of the file.

        Raises:
            ValueError: it ends before.
        """
        data = self._read(start, size)
        if len(data) < size:
            raise ValueError("it is cut off")
        return data

    def _parsed(self, data: bytes, offset: int, end: int) -> tuple[Message, int]:
        """The message, and where the next one begins."""
        table = Table.root(data[_HEAD.size :])
        kind, body_bytes = table.number(1, "<B"), table.number(3, "<q")
        if not 0 <= body_bytes <= self._size - end:
            raise ValueError(f"it ends within a message of {body_bytes} bytes")
        body = (end, end + body_bytes)
        if kind == _SCHEMA:
            return Message(offset, schema=data), body[1]
        if kind == _BATCH:
            header = table.table(2)
            if header is None:
                raise ValueError("a record batch has no header")
            return Message(offset, batch=_batch(header, offset, body)), body[1]
        if kind == _DICTIONARY:
            return Message(offset, is_dictionary=True), body[1]
        raise ValueError(f"it has a message of the unknown kind {kind}")

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        data = b""
        while len(data) < size and (more := self._file.read(size - len(data))):
            data += more
        return data


def _batch(header: Table, offset: int, body: tuple[int, int]) -> RecordBatch:
    compression = header.table(3)
    codec = "" if compression is None else _COMPRESSIONS.get(compression.number(0, "<b"), "unknown")
    buffers = []
    for start, size in header.structs(2, "<qq"):
        if not 0 <= start <= body[1] - body[0] - size or size < 0:
            raise ValueError("a record batch has a buffer outside of its body")
        buffers.append((body[0] + start, size))
    nodes, num_rows = header.structs(1, "<qq"), header.number(0, "<q")
    if num_rows < 0 or any(length < 0 or not 0 <= nulls <= length for length, nulls in nodes):
        raise ValueError("a record batch claims negative numbers of rows")
    return RecordBatch(offset, num_rows, nodes, buffers, body, codec)
