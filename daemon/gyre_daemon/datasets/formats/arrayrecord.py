"""The format `arrayrecord`: every record of an ArrayRecord file is one sample, as bytes.

In: files of ArrayRecord's writer. Out: chunks, which the library decodes in compute workers.

By Riegeli's `doc/riegeli_records_file_format.md` and ArrayRecord's `cpp/layout.proto`, a file is
chunks one after the other, and a block header interrupts them at every 64 KiB. An ArrayRecord file
ends with a chunk that has the offsets of all others (its footer), and a block with the offset of
the footer. All numbers are little-endian.

[Note: How a part of a file is read]

The library reads files by their paths. So a part of a file goes into a memory file, at a place
where Riegeli's block headers stay where they were, with a new footer. Footers are records of the
library, so it writes this one, too: into another memory file, from which its bytes are copied. The
library computes and compares all hashes and decompresses; nothing of it is done here. It runs in
processes that may be killed, as it may crash.
"""

import itertools
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    FieldSpec,
    NoOptions,
    Scan,
    corrupt,
    require_library,
)
from gyre_daemon.datasets.formats.chunk_index import (
    MAX_CHUNK_BYTES,
    ChunkFormat,
    ChunkIndex,
    Column,
    ScannedChunk,
    StoredChunk,
    check_chunks,
    chunk_arrays,
    num_rows,
    text_column,
)
from gyre_daemon.storage.shard import Shard

BLOCK_BYTES = 1 << 16
SIGNATURE = bytes.fromhex(
    "83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9"
    "0000000000000000e19f13c0e9b1c37273000000000000000000000000000000"
)
# A file that Gyre makes names at most this many chunks, which bounds the memory for its footer.
MAX_CHUNKS = 2000
_BLOCK_HEADER_BYTES = 24  # a hash and two numbers
_CHUNK_HEADER = struct.Struct("<8xQQQQ")  # behind a hash
_CHUNK_HEADER_BYTES = _CHUNK_HEADER.size
_USABLE_BYTES = BLOCK_BYTES - _BLOCK_HEADER_BYTES
# The most that a chunk header may take: a block header interrupts it once.
_HEAD_BYTES = _CHUNK_HEADER_BYTES + _BLOCK_HEADER_BYTES
VERSION, MAGIC = 1, 0x71930E704FDAE05E


class Chunk(NamedTuple):
    """A chunk at bytes `[start, stop)` of a file; `decoded_bytes` are of all its records."""

    start: int
    stop: int
    num_records: int
    decoded_bytes: int


def chunks_of(data: memoryview, start: int) -> Iterator[Chunk]:
    """All chunks with records of whole chunks, by their headers, whose hashes are not compared.

    Raises:
        ValueError: a chunk does not end within the data, which begins at `start` in the file.
    """
    position, end = start, start + len(data)
    while position < end:
        head = bytes(data[position - start : position - start + _HEAD_BYTES])
        border = -position % BLOCK_BYTES  # where a block header may interrupt it
        head = head[:border] + head[border + _BLOCK_HEADER_BYTES :]
        if len(head) < _CHUNK_HEADER_BYTES:
            raise ValueError(f"the chunk at byte {position} is cut off")
        chunk = _chunk_of(head, position)
        if chunk.stop > end:
            raise ValueError(f"the chunk at byte {position} does not end where it should")
        if chunk.num_records:
            yield chunk
        position = chunk.stop


def _chunk_of(head: bytes, start: int) -> Chunk:
    data_bytes, _, kind, decoded_bytes = _CHUNK_HEADER.unpack_from(head)
    num_records = kind >> 8
    num_bytes = _CHUNK_HEADER_BYTES + data_bytes
    headers = (num_bytes + (start + _USABLE_BYTES - 1) % BLOCK_BYTES) // _USABLE_BYTES
    stop = start + num_bytes + headers * _BLOCK_HEADER_BYTES
    # each record has a distinct position, and a chunk ends neither in a block header nor after it
    least = start + num_records
    stop = max(stop, least + max(-least % BLOCK_BYTES - _USABLE_BYTES + 1, 0))
    return Chunk(start, stop, num_records, decoded_bytes)


def _message(*fields: tuple[int, int]) -> bytes:
    """A message of protocol buffers with numbers."""
    return b"".join(_varint(number << 3) + _varint(value) for number, value in fields)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)


def numbers_of(message: bytes) -> dict[int, int]:
    """The numbers of a message of protocol buffers, by their tags; other fields are left out."""
    numbers, position = {}, 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        value, position = _read_varint(message, position)
        if tag & 7 == 0:
            numbers[tag >> 3] = value
        elif tag & 7 == 2:
            position += value
        else:
            raise ValueError("it is no message of an ArrayRecord file")
    return numbers


def inner_message(message: bytes) -> bytes:
    """The first field of a message if it is a message, too; else empty."""
    if message[:1] != b"\x0a":
        return b""
    size, position = _read_varint(message, 1)
    return message[position : position + size]


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message) or shift > 63:
            raise ValueError("it is no message of an ArrayRecord file")
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


FIELD = FieldSpec("record", np.dtype(np.uint8), (), ragged=True, codec="bytes")
# Chunks of the file are joined until they have as much. A decoder takes about a millisecond for the
# smallest, and a request to an object storage longer; but to read a record costs to decode all.
_MIN_CHUNK_BYTES = 64 << 10
# The bytes of one read in a scan, if chunks have several records.
_WINDOW_BYTES = 8 << 20
_PLACES = re.compile(r"[;,] (?:chunk )?at |; reading ")


def records_of(data: memoryview, start: int) -> list[bytes]:
    """The records of whole chunks, which begin at `start` in the file.

    Raises:
        ValueError: they are damaged; has the library's message.
    """
    found: list[bytes] = []
    chunks = chunks_of(data, start)
    while some := list(itertools.islice(chunks, MAX_CHUNKS)):
        begin, stop = some[0].start, some[-1].stop
        found += _read(data[begin - start : stop - start], begin, some)
    return found


def _read(data: memoryview, start: int, chunks: Sequence[Chunk]) -> list[bytes]:
    """The records of these chunks; see [Note: How a part of a file is read]."""
    from array_record.python import array_record_module  # noqa: PLC0415  # only these processes need it

    # not into the first block, in which the library looks for a signature
    shift = BLOCK_BYTES + start % BLOCK_BYTES - start
    stop = start + len(data) + shift
    footer = stop + -stop % BLOCK_BYTES
    moved = [chunk._replace(start=chunk.start + shift) for chunk in chunks]
    end_of_file = _end_of_file(array_record_module.ArrayRecordWriter, moved, footer)
    file = os.memfd_create("gyre-records")
    try:
        _write(file, data, start + shift)
        _write(file, end_of_file, footer)
        # no threads: the bytes are in memory
        reader = array_record_module.ArrayRecordReader(f"/proc/self/fd/{file}", "max_parallelism:0")
        try:
            records: list[bytes] = reader.read_all()
        finally:
            reader.close()
    except RuntimeError as error:
        # without the offsets in a memory file
        reason = _PLACES.split(str(error), maxsplit=1)[0][:300]
        raise ValueError(reason) from error
    finally:
        os.close(file)
    return records


def _end_of_file(make_writer: Any, chunks: Sequence[Chunk], start: int) -> bytes:
    """The footer that names these chunks and begins there, and the block that names the footer."""
    total = sum(chunk.num_records for chunk in chunks)
    counts = _message((1, VERSION), (2, len(chunks)), (3, total))
    footer = [b"\x0a" + _varint(len(counts)) + counts]
    footer += [
        _message((1, chunk.start), (2, chunk.decoded_bytes), (3, chunk.num_records))
        for chunk in chunks
    ]
    postscript = _message((1, start), (2, MAGIC))
    file = os.memfd_create("gyre-footer")
    try:
        # each chunk begins a block, but for the first one, which is left out
        options = f"group_size:{len(footer)},uncompressed,pad_to_block_boundary:true"
        writer = make_writer(f"/proc/self/fd/{file}", f"{options},max_parallelism:1")
        try:
            for record in (*[b""] * len(footer), *footer, postscript):
                writer.write(record)
        finally:
            writer.close()
        written = os.pread(file, os.fstat(file).st_size, 0)
    finally:
        os.close(file)
    its = chunks_of(memoryview(written)[len(SIGNATURE) :], len(SIGNATURE))
    _, begin, last = (chunk.start for chunk in itertools.islice(its, 3))
    return written[begin : last + BLOCK_BYTES]


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def scan_file(shard: str, file: BinaryIO) -> Arrays:
    """The `chunk_arrays` of a file.

    Where each chunk has one record, only the footer is read. Otherwise all chunks are decoded once,
    to know how long their records are.

    Raises:
        CorruptSample: it is no sound ArrayRecord file; with shard and offset.
    """
    size = file.seek(0, os.SEEK_END)
    chunks = []
    window, begin = b"", 0
    for group in _groups(_footer(shard, file, size)):
        start, stop = group[0].start, group[-1].stop
        chunk = ScannedChunk(sum(each.num_records for each in group), [(start, stop)])
        if chunk.num_rows == len(group):
            sizes = [each.decoded_bytes for each in group]
        else:
            if stop > begin + len(window):
                begin = start
                window = _part(file, begin, max(stop, begin + _WINDOW_BYTES))
            data = memoryview(window)[start - begin : stop - begin]
            try:
                sizes = [len(record) for record in records_of(data, start)]
                if len(sizes) != chunk.num_rows:
                    raise ValueError("its records are not those of the footer")
            except ValueError as error:
                chunks.append(replace(chunk, damage=str(error)))
                continue
        chunks.append(replace(chunk, columns=[Column(_NOTHING, np.cumsum(sizes))]))
    return chunk_arrays([FIELD], chunks)


_NOTHING = np.empty(0, np.uint8)


def _footer(shard: str, file: BinaryIO, size: int) -> list[Chunk]:
    """All chunks, as the footer has them."""
    offset = max(size - BLOCK_BYTES, 0)
    try:
        if _part(file, 0, len(SIGNATURE)) != SIGNATURE:
            raise ValueError("it does not begin as an ArrayRecord file")
        data = memoryview(_part(file, offset, size))
        if (last := next(chunks_of(data, offset), None)) is None:
            raise ValueError("its last block has no record")
        record, *_ = records_of(data[: last.stop - offset], offset)
        postscript = numbers_of(record)
        footer = postscript.get(1, 0)
        if postscript.get(2) != MAGIC or not len(SIGNATURE) <= footer <= offset:
            raise ValueError("its last block is not that of an ArrayRecord file")
        offset, end = footer, offset
        head, *entries = records_of(memoryview(_part(file, offset, end)), offset)
        return _entries(head, entries, offset)
    except ValueError as error:
        reason = (
            f"{error}; ArrayRecord files end with a footer and a block that names it: is this "
            "one, and whole?"
        )
        raise corrupt(shard, offset, reason) from error


def _entries(head: bytes, entries: Sequence[bytes], stop: int) -> list[Chunk]:
    """The chunks that a footer names, by its records: the first one, and one for each chunk."""
    counts, rows = numbers_of(inner_message(head)), list(map(numbers_of, entries))
    version, num_chunks, num_records = (counts.get(tag, 0) for tag in (1, 2, 3))
    if version != VERSION:
        raise ValueError(f"it has version {version} of the format, and {VERSION} is known")
    starts = [row.get(1, 0) for row in rows] + [stop]
    chunks = [
        Chunk(start, end, row.get(3, 0), row.get(2, 0))
        for start, end, row in zip(starts, starts[1:], rows, strict=False)
    ]
    is_sound = all(len(SIGNATURE) <= each.start < each.stop for each in chunks)
    total = sum(chunk.num_records for chunk in chunks)
    if not is_sound or len(chunks) != num_chunks or total != num_records:
        raise ValueError("its footer contradicts itself")
    for chunk in chunks:
        if chunk.decoded_bytes > MAX_CHUNK_BYTES or chunk.num_records > MAX_CHUNK_BYTES:
            raise ValueError(
                f"the chunk at byte {chunk.start} has more than {MAX_CHUNK_BYTES >> 30} GiB; "
                "write smaller groups"
            )
    return [chunk for chunk in chunks if chunk.num_records]


def _groups(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """The chunks to decode together: successive ones of at least `_MIN_CHUNK_BYTES`."""
    some: list[Chunk] = []
    num_bytes = 0
    for chunk in chunks:
        is_full = num_bytes >= _MIN_CHUNK_BYTES
        if some and (is_full or num_bytes + chunk.decoded_bytes > MAX_CHUNK_BYTES):
            yield some
            some, num_bytes = [], 0
        some.append(chunk)
        num_bytes += chunk.decoded_bytes
    if some:
        yield some


def _part(file: BinaryIO, start: int, stop: int) -> bytes:
    """Bytes `[start, stop)` of a file, up to its end."""
    file.seek(start)
    return file.read(stop - start)


def decode_chunks(chunk: StoredChunk) -> Sequence[Column]:
    """The records of a group of chunks; a `Decode`."""
    ((start, data),) = chunk.pieces
    return [text_column(records_of(data, start))]


class ArrayRecordFormat(ChunkFormat):
    """A `Format` whose chunks are one or several of Riegeli's."""

    pattern = "*.{array_record,arrayrecord,riegeli,array_record-*-of-*[0-9]}"
    unpacks_gzip = False
    noun = "group of chunks"
    inspection = Scan("arrayrecord/1", scan_file, num_rows, check_chunks, seeks=True)

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: Riegeli's signature."""
        return head.startswith(SIGNATURE)

    def __init__(self, options: NoOptions) -> None:
        """Refuse to start without the library that reads such files.

        Raises:
            ConfigError: array_record is not installed.
        """
        require_library("array_record", "the format arrayrecord needs", "records")

    def index_of(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        return ChunkIndex(shards, inspected, decode_chunks, self.noun, b"arrayrecord")
