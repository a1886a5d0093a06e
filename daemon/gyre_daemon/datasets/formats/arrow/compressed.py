"""Arrow files whose record batches are decoded, each as one chunk. Only scan processes import it.

They are compressed, or some column is nested and becomes JSON.

A chunk is decoded from its message and from the messages before all record batches: the schema and
the dictionaries. Together they are a valid stream.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from gyre_daemon.datasets.formats.arrow.messages import Messages, RecordBatch
from gyre_daemon.datasets.formats.arrow_columns import Wanted
from gyre_daemon.datasets.formats.arrow_types import ServedColumn, column_of, served_columns
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.chunks import (
    MAX_CHUNK_BYTES,
    Column,
    StoredChunk,
    chunk_arrays,
    lacking,
)
from gyre_daemon.errors import ConfigError

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def scan_compressed(wanted: Wanted, file: BinaryIO) -> Arrays:
    """The `chunk_arrays` of a file; it is read once.

    Raises:
        ValueError: the file is damaged.
        ConfigError: the columns do not fit.
    """
    messages, batches = Messages(file), list[RecordBatch]()
    begin = stop = 0
    for message in messages:
        if message.schema:
            begin = message.offset
        elif message.is_dictionary and stop:
            raise ConfigError(
                "the file has dictionaries behind its first record batch, which is not read where "
                "batches are compressed. Write it as Parquet, or without compression."
            )
        elif message.batch:
            stop = stop or message.offset
            batches += [message.batch] if message.batch.num_rows else []
    shared, columns = messages.read(begin, stop - begin), list[ServedColumn]()
    found: list[Sequence[Column | None]] = []
    damaged: dict[int, str] = {}
    for batch in batches:
        messages.offset = batch.offset
        data = messages.read(batch.offset, batch.body[1] - batch.offset)
        try:
            columns = columns or served_columns(_read_schema(shared), wanted)
            its = _columns(_read(shared, data), columns)
        except ValueError as error:
            damaged[len(found)] = f"{error!s:.500}"
            found.append(lacking([column.spec for column in columns], batch.num_rows))
            continue
        if sum(column.data.nbytes for column in its) > MAX_CHUNK_BYTES:
            raise ValueError(f"a record batch has more than {MAX_CHUNK_BYTES >> 30} GiB")
        found.append([Column(column.data[:0], column.ends, column.present) for column in its])
    return chunk_arrays(
        [column.spec for column in columns],
        [batch.num_rows for batch in batches],
        [[(batch.offset, batch.body[1])] for batch in batches],
        found,
        (begin, stop),
        damaged=damaged,
    )


def decode_batch(wanted: Wanted, chunk: StoredChunk) -> Sequence[Column]:
    """The columns of a record batch.

    Raises:
        ValueError: it is damaged.
    """
    (_, shared), (_, data) = chunk.pieces
    batch = _read(shared, data)
    return _columns(batch, served_columns(batch.schema, wanted))


def _read_schema(shared: bytes) -> Any:
    try:
        return pa.ipc.open_stream(pa.BufferReader(shared + _END)).schema
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"the schema cannot be read: {error!s:.500}") from error


def _read(shared: bytes | memoryview, data: bytes | memoryview) -> Any:
    try:
        options = pa.ipc.IpcReadOptions(use_threads=False)
        stream = pa.BufferReader(b"".join((shared, data, _END)))
        batch = pa.ipc.open_stream(stream, options=options).read_next_batch()
        batch.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"a record batch cannot be read: {error!s:.500}") from error
    return batch


def _columns(batch: Any, columns: Sequence[ServedColumn]) -> list[Column]:
    return [column_of([batch.column(column.name)], column.spec) for column in columns]
