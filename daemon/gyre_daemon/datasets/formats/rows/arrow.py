"""The format `arrow`: each row of an Arrow IPC file or stream is one sample.

`arrow_batches` finds the rows in record batches, and this makes one index of all shards. Record
batches are chunks and decoded if they are compressed, or a column is no range of bytes.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    DamagedSample,
    Extents,
    FieldSpec,
    SampleIndex,
    Scan,
    array_of,
)
from gyre_daemon.datasets.formats.indexes.bounds import RaggedBounds
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.indexes.chunks import (
    Column,
    StoredChunk,
    check_chunks,
    chunk_arrays,
    refuse_damaged,
)
from gyre_daemon.datasets.formats.indexes.stored import json_of
from gyre_daemon.datasets.formats.indexes.union_index import assemble_union
from gyre_daemon.datasets.formats.names import is_servable
from gyre_daemon.datasets.formats.npy import is_number_type
from gyre_daemon.datasets.formats.rows.arrow_columns import (
    ColumnOptions,
    Wanted,
    require_pyarrow,
    scan_version,
)
from gyre_daemon.datasets.formats.schemas import described_all
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.order.shuffle.blocks import BlockTable, BlockTables, blocks_of_unequal_samples
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.storage.shard import Shard

_NOUN = "record batch"


class ArrowFormat:
    """A `Format` that reads the metadata of record batches, and where their rows begin."""

    pattern = "*.{arrow,arrows,ipc,feather}"
    unpacks_gzip = False

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: a file's magic; streams have none."""
        return head.startswith(b"ARROW1\0\0")

    def __init__(self, options: ColumnOptions) -> None:
        """Refuse to start without the library that reads schemas.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        require_pyarrow("arrow")
        self._options, self._columns = options, options.wanted

    @property
    def inspection(self) -> Scan:
        """See `Format.inspection`."""
        return Scan(
            scan_version("arrow/2", self._columns),
            RecordBatchScan(self._columns),
            _num_rows,
            check_scan,
            seeks=True,
            ragged=self._options.ragged,
        )

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`."""
        refuse_damaged(shards, [scan if _is_chunked(scan) else {} for scan in inspected], _NOUN)
        return self.assemble_tolerantly(shards, inspected)[0]

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleIndex, Sequence[DamagedSample]]:
        """See `TolerantFormat`: all samples of compressed record batches that cannot be decoded.

        They are found when all record batches are tried.
        """
        order = [field for field, _ in self._columns.pairs]
        index = assemble_union(
            self._options, order, shards, inspected, _schema_of, _num_rows, self._assemble
        )
        return index, ()

    def _assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """The index of shards that have the same columns."""
        pairs = [
            (shard, scan)
            for shard, scan in zip(shards, inspected, strict=True)
            if len(scan["rows"])
        ]
        compressed = [shard.name for shard, scan in pairs if _is_chunked(scan)]
        if not compressed:
            return RecordBatchIndex(shards, inspected)
        if len(compressed) < len(pairs):
            raise ConfigError(
                f"the record batches of some shards are compressed, such as those of "
                f"{compressed[0]}, and others are not. Serve them as two datasets."
            )
        empty = chunk_arrays([], [], [], [])
        scans = [scan if _is_chunked(scan) else empty for scan in inspected]
        decoder, identity = (
            RecordBatchDecoder(self._columns),
            f"arrow {self._columns.pairs}".encode(),
        )
        return ChunkIndex(shards, scans, decoder, _NOUN, identity)


@dataclass(frozen=True, slots=True)
class RecordBatchScan:
    """Scans a file; the `run` of a `Scan`.

    Attributes:
        wanted: which columns.
    """

    wanted: Wanted

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        """See `scan_arrow`, which needs pyarrow and is imported when a file is read."""
        from gyre_daemon.datasets.formats.rows.arrow_batches import scan_arrow  # noqa: PLC0415

        return scan_arrow(self.wanted, shard, file)


@dataclass(frozen=True, slots=True)
class RecordBatchDecoder:
    """Decodes compressed record batches; a `Decode`.

    Attributes:
        wanted: which columns.
    """

    wanted: Wanted

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        """See `decode_batch`, which needs pyarrow."""
        from gyre_daemon.datasets.formats.rows.arrow_batches import decode_batch  # noqa: PLC0415

        return decode_batch(self.wanted, chunk)


def _is_chunked(scan: Arrays) -> bool:
    """Whether a scan is that of a file with compressed record batches."""
    return "num_pieces" in scan


def _schema_of(scan: Arrays) -> bytes:
    return bytes(scan["fields" if _is_chunked(scan) else "columns"])


def _num_rows(scan: Arrays) -> int:
    return int(scan["rows"].sum())


def check_scan(arrays: Arrays, file_bytes: int) -> None:
    """Refuse arrays that `scan_arrow` cannot have returned for a file of this size.

    Raises:
        ValueError: they cannot be; says why.
    """
    if _is_chunked(arrays):
        check_chunks(arrays, file_bytes)
        return
    rows, optional = array_of(arrays, "rows", np.int64), array_of(arrays, "optional", np.int64)
    body, base, first, ends = (
        array_of(arrays, name, np.int64, 2) for name in ("body", "base", "first", "ends")
    )
    present, bits = (array_of(arrays, name, np.bool_, 2) for name in ("present", "bits"))
    columns = json_of(arrays, "columns")
    if not isinstance(columns, list) or not all(map(_is_column, columns)):
        raise ValueError("its columns are none")
    is_bit = [column[1] == "|b1" and not column[2] for column in columns]
    ragged = [place for place, column in enumerate(columns) if column[3]]
    if (rows < 1).any() or (rows > 8 * file_bytes).any():
        raise ValueError("its numbers of rows are impossible")
    count, num_rows = len(rows), int(rows.sum())
    shapes = (
        (body, (count, 2)),
        (base, (count, len(columns))),
        (first, (count, len(ragged))),
        (ends, (num_rows, len(ragged))),
        (present, (num_rows, len(optional))),
        (bits, (num_rows, sum(is_bit))),
    )
    if any(array.shape != shape for array, shape in shapes):
        raise ValueError("its arrays do not have the sizes of its rows")
    if not set(optional.tolist()) <= set(range(len(columns))):
        raise ValueError("it has nulls in missing columns")
    if count:
        _check_places(arrays, columns, is_bit, ragged, file_bytes)


def _check_places(
    arrays: Arrays, columns: list[Any], is_bit: list[bool], ragged: list[int], file_bytes: int
) -> None:
    """Check that all columns are within the shard."""
    rows, body, base = arrays["rows"], arrays["body"], arrays["base"]
    first, ends = arrays["first"], arrays["ends"]
    edges = body.ravel()
    if edges[0] < 0 or edges[-1] > file_bytes or (np.diff(edges) < 0).any():
        raise ValueError("its record batches are not in sequence")
    if (base < 0).any() or (base > file_bytes).any():
        raise ValueError("its columns point outside the shard")
    _check_ends(rows, base[:, ragged], first, ends, file_bytes)
    for place, (_, dtype, shape, is_ragged, *_) in enumerate(columns):
        if not is_ragged and not is_bit[place]:
            _check_regular(rows, base[:, place], np.dtype(dtype).itemsize, shape, file_bytes)


def _check_regular(
    rows: np.ndarray, base: np.ndarray, itemsize: int, shape: list[int], file_bytes: int
) -> None:
    """Check that a column whose rows have one size ends within the shard."""
    size = itemsize * math.prod(shape)
    if size < 1 or size > file_bytes or (base > file_bytes - rows * size).any():
        raise ValueError("its columns point outside the shard")


def _check_ends(
    rows: np.ndarray, base: np.ndarray, first: np.ndarray, ends: np.ndarray, file_bytes: int
) -> None:
    """Check that ragged columns rise, and end within the shard."""
    last = np.cumsum(rows) - 1
    begin = np.empty_like(ends)
    begin[1:] = ends[:-1]
    begin[last - rows + 1] = first
    if (first < 0).any() or (ends < begin).any() or (ends[last] > file_bytes - base).any():
        raise ValueError("its rows are not in sequence")


def _is_column(column: object) -> bool:
    """Whether this is a column as `scan_arrow` describes it."""
    if not isinstance(column, list) or len(column) != 7:
        return False
    name, dtype, shape, ragged, codec, categories, media_type = column
    return (
        isinstance(name, str)
        and is_servable(name)
        and isinstance(dtype, str)
        and is_number_type(dtype)
        and isinstance(shape, list)
        and all(type(size) is int and 0 < size < 1 << 40 for size in shape)
        and isinstance(ragged, bool)
        and codec in ("bytes", "text")
        and isinstance(categories, list)
        and all(isinstance(each, str) for each in categories)
        and isinstance(media_type, str)
        and media_type.isprintable()
    )


_BOOL = np.dtype(np.bool_)


class RecordBatchIndex:
    """A `SampleIndex` of the rows of all record batches of a dataset."""

    def __init__(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> None:
        """Join the scans of all shards; see `scan_arrow` for the arrays.

        Raises:
            CorruptSample: a shard has other columns than the first with rows.
        """
        text = _common_columns(shards, inspected)
        columns = [_spec(*each) for each in json.loads(text)]
        full = [(number, scan) for number, scan in enumerate(inspected) if len(scan["rows"])]
        scans = [scan for _, scan in full]
        is_bit = [spec.dtype == _BOOL and not spec.shape for spec in columns]
        order = [place for place, bit in enumerate(is_bit) if not bit]
        self._stored = [columns[place] for place in order]
        self._rows = _stacked([scan["rows"] for scan in scans], np.int64)
        self._first = np.concatenate(([0], np.cumsum(self._rows))).astype(np.int64)
        self.num_samples = int(self._first[-1])
        counts = [len(scan["rows"]) for scan in scans]
        self._shard = np.repeat(np.array([number for number, _ in full], np.int64), counts)
        self._body = _stacked([scan["body"] for scan in scans], np.int64, 2)
        self._base = _stacked([scan["base"] for scan in scans], np.int64, len(columns))[:, order]
        self._ragged = [spec.ragged for spec in self._stored]
        num_ragged = sum(self._ragged)
        self._begin = _stacked([scan["first"] for scan in scans], np.int64, num_ragged)
        self._ends = _stacked([scan["ends"] for scan in scans], np.int64, num_ragged)
        optional = sorted({place for scan in scans for place in scan["optional"].tolist()})
        self._present = {
            place: np.concatenate([_present(scan, place) for scan in scans]) for place in optional
        }
        bits = _stacked([scan["bits"] for scan in scans], _BOOL, sum(is_bit))
        self._absent = [
            (number, self._present[place])
            for number, place in enumerate(order)
            if place in self._present
        ]
        of_bits = [spec for spec, bit in zip(columns, is_bit, strict=True) if bit]
        self._indexed = [
            *((_indexed(spec.name), bits[:, number]) for number, spec in enumerate(of_bits)),
            *(
                (_indexed(columns[place].name + PRESENT_SUFFIX), values)
                for place, values in self._present.items()
            ),
        ]
        self._blocks = BlockTables(self._make_blocks)
        digest = hashlib.blake2b(b"arrow " + text, digest_size=16)
        for table in (self._first, self._base, self._begin, self._ends):
            digest.update(table.tobytes())
        for _, values in self._indexed:
            digest.update(np.packbits(values).tobytes())
        self._digest = digest.digest()

    @property
    def fields(self) -> Sequence[FieldSpec]:
        """See `SampleIndex.fields`; a field that some row lacks has one more, `NAME.present`."""
        return [*self._stored, *(spec for spec, _ in self._indexed)]

    def locate(self, sample_ids: Int64Array) -> Extents:
        """See `SampleIndex.locate`."""
        batch = np.searchsorted(self._first, sample_ids, side="right") - 1
        row = sample_ids - self._first[batch]
        start = self._base[batch]
        size = np.empty_like(start)
        ragged = 0
        for place, spec in enumerate(self._stored):
            if spec.ragged:
                ends = self._ends[:, ragged]
                begin = np.where(row > 0, ends[sample_ids - 1], self._begin[batch, ragged])
                size[:, place] = ends[sample_ids] - begin
                start[:, place] += begin
                ragged += 1
            else:
                size[:, place] = spec.element_bytes
                start[:, place] += row * spec.element_bytes
        absent: npt.NDArray[np.bool_] | None = None
        if self._absent:
            absent = np.zeros(size.shape, np.bool_)
            for place, present in self._absent:
                absent[:, place] = ~present[sample_ids]
            size[absent] = 0
        indexed = tuple(values[sample_ids] for _, values in self._indexed)
        return Extents(self._shard[batch], start, size, absent=absent, indexed=indexed)

    def max_ragged_bytes(self, num_samples: int) -> int:
        """See `SampleIndex.max_ragged_bytes`."""
        return self._bounds.largest(num_samples)

    def blocks(self, io_block_bytes: int) -> BlockTable:
        """See `SampleIndex.blocks`: a block has whole record batches, which store columns apart."""
        return self._blocks.of(io_block_bytes)

    def digest(self) -> bytes:
        """See `SampleIndex.digest`."""
        return self._digest

    @cached_property
    def _bounds(self) -> RaggedBounds:
        return RaggedBounds(self._ragged_bytes)

    def _ragged_bytes(self) -> Int64Array:
        """Int64 [N], the bytes of all ragged fields of each row."""
        begin = np.empty_like(self._ends)
        begin[1:] = self._ends[:-1]
        begin[self._first[:-1]] = self._begin
        total: Int64Array = (self._ends - begin).sum(axis=1)
        return total

    def _make_blocks(self, io_block_bytes: int) -> BlockTable:
        table = blocks_of_unequal_samples(
            self._shard, self._body[:, 0], self._body[:, 1], io_block_bytes
        )
        first = self._first[table.first_sample(np.arange(table.num_blocks + 1))]
        return BlockTable(
            max(1, self.num_samples // max(1, len(first) - 1)), np.arange(len(first)), first
        )


def _common_columns(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> bytes:
    first, owner = b"[]", ""
    for shard, scan in zip(shards, inspected, strict=True):
        columns = scan["columns"].tobytes()
        if not len(scan["rows"]) or columns == first:
            continue
        if owner:
            reason = f"it has {_describe(columns)}, and shard {owner} has {_describe(first)}"
            raise CorruptSample(
                f"shard {shard.name} does not fit: {reason}; serve them as two datasets",
                {"shard": shard.name, "reason": reason},
            )
        first, owner = columns, shard.name
    return first


def _describe(columns: bytes) -> str:
    return described_all([_spec(*each) for each in json.loads(columns)])


def _spec(
    name: str,
    dtype: str,
    shape: list[int],
    ragged: bool,
    codec: str,
    categories: list[str],
    media_type: str,
) -> FieldSpec:
    return FieldSpec(
        name,
        np.dtype(dtype),
        tuple(shape),
        ragged=ragged,
        codec="text" if codec == "text" else "bytes",
        categories=tuple(categories),
        media_type=media_type,
    )


def _indexed(name: str) -> FieldSpec:
    return FieldSpec(name, _BOOL, (), ragged=False, codec="indexed")


def _present(scan: Arrays, place: int) -> npt.NDArray[np.bool_]:
    """Bool [n], which rows of a shard have a value in a column."""
    found = np.flatnonzero(scan["optional"] == place)
    if not len(found):
        return np.ones(int(scan["rows"].sum()), np.bool_)
    present: npt.NDArray[np.bool_] = scan["present"][:, found[0]]
    return present


def _stacked(
    parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, *row: int
) -> npt.NDArray[Any]:
    """The rows of several arrays, each of this shape."""
    return np.concatenate([np.empty((0, *row), dtype), *parts])
