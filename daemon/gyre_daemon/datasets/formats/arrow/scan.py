"""Finds the rows in the record batches of an Arrow file. Only scan processes import it."""

import json
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gyre_daemon.datasets.formats.arrow.compressed import scan_compressed
from gyre_daemon.datasets.formats.arrow.messages import Messages, RecordBatch
from gyre_daemon.datasets.formats.arrow.walk import BatchWalk, FoundColumn, storage_type
from gyre_daemon.datasets.formats.arrow_columns import Wanted
from gyre_daemon.datasets.formats.arrow_types import ServedColumn, served_columns
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.errors import ConfigError, CorruptSample

_Bits = npt.NDArray[np.bool_]
_Int64 = npt.NDArray[np.int64]


def scan_arrow(wanted: Wanted, shard: str, file: BinaryIO) -> Arrays:
    """The places of the N rows of C record batches, with F served columns.

    Where record batches must be decoded, it returns the result of `scan_compressed`.

    Args:
        wanted: which columns.
        shard: for messages.
        file: is read around the metadata, and where lengths and nulls are.

    Returns:
        rows: int64 [C], of each record batch; none is empty.
        body: int64 [C, 2], first byte and end of each record batch.
        base: int64 [C, F], where the values of each column begin.
        first: int64 [C, R], where the first row begins behind the base, of each ragged column.
        ends: int64 [N, R], where each row ends behind the base.
        present: bool [N, P], of the columns that some row lacks.
        optional: int64 [P], which columns these are.
        bits: bool [N, B], the values of the columns of booleans.
        columns: JSON, of each column its name, dtype, shape, whether it is ragged, its codec, and
            and its categories.

    Raises:
        CorruptSample: it is damaged; with the offset of the message.
        ConfigError: the columns do not fit.
    """
    messages = Messages(file)
    try:
        found = _scan(messages, wanted)
        return scan_compressed(wanted, file) if found is None else found
    except ConfigError as error:
        raise ConfigError(f"shard {shard}: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        reason = f"{error!s:.500}"
        raise CorruptSample(
            f"shard {shard} at byte {messages.offset}: {reason}",
            {"shard": shard, "offset": messages.offset, "reason": reason},
        ) from error


def _scan(messages: Messages, wanted: Wanted) -> Arrays | None:
    """See `scan_arrow`; None if record batches must be decoded: compressed ones, or for JSON."""
    schema: Any = None
    columns: list[ServedColumn] = []
    batches: list[RecordBatch] = []
    found: list[list[FoundColumn]] = []
    for message in messages:
        if message.schema:
            if schema is not None:
                raise ValueError("it has two schemas")
            schema = _schema_of(message.schema)
        elif schema is None:
            raise ValueError("it does not begin with a schema")
        elif message.batch and message.batch.num_rows:
            if message.batch.compression and not batches:
                return None
            columns = columns or served_columns(schema, wanted)
            if not all(column.is_stored for column in columns):
                return None
            batches.append(message.batch)
            found.append(_columns_of(messages, message.batch, schema, columns))
    if schema is None:
        raise ValueError("it has no schema")
    return _joined(columns, batches, found)


def _schema_of(message: bytes) -> Any:
    try:
        return pa.ipc.read_schema(pa.py_buffer(message))
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"its schema cannot be read: {error}") from error


def _columns_of(
    messages: Messages, batch: RecordBatch, schema: Any, columns: Sequence[ServedColumn]
) -> list[FoundColumn]:
    if batch.compression:
        raise ConfigError(
            f"some record batches are compressed ({batch.compression}) and some are not; write the "
            "file again"
        )
    walk = BatchWalk(messages, batch)
    served = {column.name: column for column in columns}
    found: dict[str, FoundColumn] = {}
    for field in schema:
        kind = storage_type(field.type)
        if field.name in served:
            column = served[field.name]
            found[field.name] = (
                walk.file(kind) if column.is_file else walk.column(kind, column.spec)
            )
        else:
            walk.skip(kind)
    walk.end()
    return [found[column.name] for column in columns]


def _joined(
    columns: Sequence[ServedColumn],
    batches: Sequence[RecordBatch],
    found: Sequence[list[FoundColumn]],
) -> Arrays:
    """The arrays of a file; see `scan_arrow`."""
    rows = np.array([batch.num_rows for batch in batches], np.int64)
    num_rows = int(rows.sum())
    ragged = [place for place, column in enumerate(columns) if column.spec.ragged]
    optional = [
        place
        for place in range(len(columns))
        if any(its[place].present is not None for its in found)
    ]
    bits = [place for place in range(len(columns)) if found and found[0][place].bits is not None]

    def table(places: Sequence[int], dtype: Any, values: Callable[[FoundColumn, int], Any]) -> Any:
        result = np.empty((num_rows, len(places)), dtype)
        for number, place in enumerate(places):
            parts = [
                values(its[place], batch.num_rows)
                for its, batch in zip(found, batches, strict=True)
            ]
            result[:, number] = np.concatenate(parts) if parts else []
        return result

    def bounds(each: FoundColumn) -> _Int64:
        assert each.ends is not None
        return each.ends

    meaning = [
        [
            column.spec.name,
            column.spec.dtype.str,
            column.spec.shape,
            column.spec.ragged,
            column.spec.codec,
            column.spec.categories,
            column.spec.media_type,
        ]
        for column in columns
    ]
    return {
        "rows": rows,
        "body": np.array([batch.body for batch in batches], np.int64).reshape(len(batches), 2),
        "base": np.array([[each.base for each in its] for its in found], np.int64).reshape(
            len(batches), len(columns)
        ),
        "first": np.array(
            [[bounds(its[place])[0] for place in ragged] for its in found], np.int64
        ).reshape(len(batches), len(ragged)),
        "ends": table(ragged, np.int64, lambda each, _: bounds(each)[1:]),
        "present": table(
            optional,
            np.bool_,
            lambda each, count: np.ones(count, np.bool_) if each.present is None else each.present,
        ),
        "optional": np.array(optional, np.int64),
        "bits": table(bits, np.bool_, lambda each, _: each.bits),
        "columns": np.frombuffer(json.dumps(meaning).encode(), np.uint8),
    }
