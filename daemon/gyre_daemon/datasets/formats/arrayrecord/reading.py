"""Scans ArrayRecord files and decodes their chunks, by the library that wrote them.

[Note: How a part of a file is read]

The library reads files by their paths. So a part of a file goes into a memory file, at a place
where Riegeli's block headers stay where they were, with a new footer (`riegeli`). The library
compares all hashes and decompresses; nothing of either is done here. It runs in processes that may
be killed, as it may crash.
"""

import importlib.util
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from gyre_daemon.datasets.formats.arrayrecord.riegeli import (
    BLOCK_BYTES,
    MAGIC,
    MAX_CHUNKS,
    SIGNATURE,
    VERSION,
    Chunk,
    chunks_of,
    footer_and_postscript,
    inner_message,
    numbers_of,
)
from gyre_daemon.datasets.formats.base import Arrays, FieldSpec
from gyre_daemon.datasets.formats.chunks import (
    MAX_CHUNK_BYTES,
    Column,
    StoredChunk,
    chunk_arrays,
    lacking,
)
from gyre_daemon.errors import ConfigError, CorruptSample

FIELD = FieldSpec("record", np.dtype(np.uint8), (), ragged=True, codec="bytes")
# Chunks of the file are joined until they have as much. A decoder takes about a millisecond for the
# smallest, and a request to an object storage longer; but to read a record costs to decode all.
_MIN_CHUNK_BYTES = 64 << 10
# The bytes of one read in a scan, if chunks have several records.
_WINDOW_BYTES = 8 << 20
_PLACES = re.compile(r"[;,] (?:chunk )?at |; reading ")


def records_of(data: memoryview, start: int) -> list[bytes]:
    """The records of whole chunks of a file.

    Args:
        data: the chunks.
        start: where they begin in the file.

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
    from array_record.python import array_record_module  # noqa: PLC0415  # see `require_library`

    # not into the first block, in which the library looks for a signature
    shift = BLOCK_BYTES + start % BLOCK_BYTES - start
    moved = [chunk._replace(start=chunk.start + shift, stop=chunk.stop + shift) for chunk in chunks]
    begin, footer, postscript = footer_and_postscript(moved, start + len(data) + shift)
    file = os.memfd_create("gyre-records")
    try:
        _write(file, data, start + shift)
        _write(file, footer, begin)
        _write(file, postscript, begin + BLOCK_BYTES)
        # no threads: the bytes are in memory
        reader = array_record_module.ArrayRecordReader(f"/proc/self/fd/{file}", "max_parallelism:0")
        try:
            records: list[bytes] = reader.read_all()
        finally:
            reader.close()
    except RuntimeError as error:
        raise ValueError(_reason(error)) from error
    finally:
        os.close(file)
    return records


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _reason(error: Exception) -> str:
    """The library's message, without the offsets in a memory file."""
    return _PLACES.split(str(error), maxsplit=1)[0][:300]


def require_library() -> None:
    """Refuse the format where its library is not installed.

    Raises:
        ConfigError: names the extra.
    """
    if importlib.util.find_spec("array_record") is None:
        raise ConfigError(
            "the format arrayrecord needs array_record, which is not installed. "
            'Run pip install "gyre-ml[records]".'
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks of a file to decode together: bytes `[start, stop)`."""

    start: int
    stop: int
    chunks: Sequence[Chunk]

    @property
    def num_records(self) -> int:
        return sum(chunk.num_records for chunk in self.chunks)


def scan_file(shard: str, file: BinaryIO) -> Arrays:
    """The `chunk_arrays` of a file.

    Where each chunk has one record, only the footer is read. Otherwise all chunks are decoded once,
    to know how long their records are.

    Raises:
        CorruptSample: it is no sound ArrayRecord file; with shard and offset.
    """
    size = file.seek(0, os.SEEK_END)
    groups = list(_groups(_footer(shard, file, size)))
    ends, damaged = _ends(file, groups)
    columns = [
        lacking([FIELD], group.num_records) if its is None else [Column(_NOTHING, its)]
        for group, its in zip(groups, ends, strict=True)
    ]
    return chunk_arrays(
        [FIELD],
        [group.num_records for group in groups],
        [[(group.start, group.stop)] for group in groups],
        columns,
        damaged=damaged,
    )


_NOTHING = np.empty(0, np.uint8)


def _footer(shard: str, file: BinaryIO, size: int) -> list[Chunk]:
    """All chunks, as the footer has them."""
    offset = max(size - BLOCK_BYTES, 0)
    try:
        if _part(file, 0, len(SIGNATURE)) != SIGNATURE:
            raise ValueError("it does not begin as an ArrayRecord file")
        postscript = numbers_of(_first(_part(file, offset, size), offset))
        footer = postscript.get(1, 0)
        if postscript.get(2) != MAGIC or not len(SIGNATURE) <= footer <= offset:
            raise ValueError("its last block is not that of an ArrayRecord file")
        offset, last = footer, offset
        head, *entries = records_of(memoryview(_part(file, offset, last)), offset)
        return _entries(head, entries, offset)
    except ValueError as error:
        reason = (
            f"{error}; ArrayRecord files end with a footer and a block that names it: is this "
            "one, and whole?"
        )
        raise CorruptSample(
            f"shard {shard} at byte {offset}: {reason}",
            {"shard": shard, "offset": offset, "reason": reason},
        ) from error


def _first(data: bytes, start: int) -> bytes:
    """The first record of the chunk at the beginning of a part of a file."""
    chunk = next(chunks_of(memoryview(data), start), None)
    if chunk is None:
        raise ValueError("its last block has no record")
    record, *_ = records_of(memoryview(data)[: chunk.stop - start], start)
    return record


def _entries(head: bytes, entries: Sequence[bytes], stop: int) -> list[Chunk]:
    """The chunks that a footer names.

    Args:
        head: its first record.
        entries: the others, for a chunk each.
        stop: the end of the last chunk.
    """
    (version, num_chunks, num_records), rows = _counts(head), list(map(numbers_of, entries))
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


def _counts(head: bytes) -> tuple[int, int, int]:
    """Version, chunks and records, from the message within the first record."""
    counts = numbers_of(inner_message(head))
    return counts.get(1, 0), counts.get(2, 0), counts.get(3, 0)


def _groups(chunks: Sequence[Chunk]) -> Iterator[_Group]:
    """The chunks joined to such of at least `_MIN_CHUNK_BYTES`."""
    some: list[Chunk] = []
    num_bytes = 0
    for chunk in chunks:
        if some and num_bytes + chunk.decoded_bytes > MAX_CHUNK_BYTES:
            yield _Group(some[0].start, some[-1].stop, some)
            some, num_bytes = [], 0
        some.append(chunk)
        num_bytes += chunk.decoded_bytes
        if num_bytes >= _MIN_CHUNK_BYTES:
            yield _Group(some[0].start, some[-1].stop, some)
            some, num_bytes = [], 0
    if some:
        yield _Group(some[0].start, some[-1].stop, some)


def _ends(
    file: BinaryIO, groups: Sequence[_Group]
) -> tuple[list[np.ndarray | None], dict[int, str]]:
    """Where the records of each group end in its decoded bytes; and why some cannot be decoded."""
    ends: list[np.ndarray | None] = []
    damaged: dict[int, str] = {}
    window, begin = b"", 0
    for place, group in enumerate(groups):
        if all(chunk.num_records == 1 for chunk in group.chunks):
            ends.append(np.cumsum([chunk.decoded_bytes for chunk in group.chunks]))
            continue
        if group.stop > begin + len(window):
            begin = group.start
            window = _part(file, begin, max(group.stop, begin + _WINDOW_BYTES))
        data = memoryview(window)[group.start - begin : group.stop - begin]
        try:
            sizes = [len(record) for record in records_of(data, group.start)]
            if len(sizes) != group.num_records:
                raise ValueError("its records are not those of the footer")
            ends.append(np.cumsum(sizes))
        except ValueError as error:
            damaged[place] = str(error)
            ends.append(None)
    return ends, damaged


def _part(file: BinaryIO, start: int, stop: int) -> bytes:
    """Bytes `[start, stop)` of a file, up to its end."""
    file.seek(start)
    parts = []
    while start < stop and (part := file.read(stop - start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def decode_chunks(chunk: StoredChunk) -> Sequence[Column]:
    """The records of a group of chunks; a `Decode`.

    Raises:
        ValueError: it is damaged.
    """
    ((start, data),) = chunk.pieces
    records = records_of(data, start)
    ends = np.cumsum(np.fromiter(map(len, records), np.int64, len(records)))
    return [Column(np.frombuffer(b"".join(records), np.uint8), ends)]
