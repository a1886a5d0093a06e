"""Shards of chunks as other programs write them: Parquet, Arrow, zstd frames."""

import io
import struct
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


def parquet(table: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream, **{"write_page_checksum": True, **options})
    return stream.getvalue()


def arrow(table: Any, compression: str | None, *, is_stream: bool = False) -> bytes:
    stream = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with make(stream, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=40)
    return stream.getvalue()


def compressed(data: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor(write_checksum=True).compress(data))


def seekable(data: bytes, frame_bytes: int = 1000) -> bytes:
    """Frames of one size, and a skippable frame with the sizes of all."""
    cut = [data[begin : begin + frame_bytes] for begin in range(0, len(data), frame_bytes)]
    parts = [compressed(each) for each in cut]
    entries = b"".join(
        struct.pack("<II", len(part), len(each)) for part, each in zip(parts, cut, strict=True)
    )
    table = entries + struct.pack("<IBI", len(parts), 0, 0x8F92EAB1)
    return b"".join(parts) + struct.pack("<II", 0x184D2A5E, len(table)) + table
