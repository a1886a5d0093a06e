"""The formats `arrow` and `parquet`: each row of a record batch or of a row group is one sample.

pyarrow scans files and decodes chunks, see `arrow_rows`. It is imported when the first file is
read, by compute workers that may be killed. Nothing is read ahead and no thread is started. Of an
Arrow IPC file or stream, chunks are decoded only if they are compressed, or a column is no range of
bytes.
"""

import io
import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import msgspec
import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    SampleIndex,
    Scan,
    corrupt,
    json_of,
    require,
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
    field_bytes,
    fields_of,
    num_rows,
)
from gyre_daemon.datasets.formats.concat import assemble_union
from gyre_daemon.datasets.formats.sample_table import ColumnOptions
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import PositionedFile, Shard

if TYPE_CHECKING:
    from gyre_daemon.datasets.formats.arrow_rows import ServedColumn

# Column chunks this close together are read as one range.
_MAX_GAP_BYTES = 64 << 10
# Footers that a process keeps parsed. Parsing one takes milliseconds if the file has a thousand row
# groups; a job that mixes many files needs another one for nearly every row group.
_MAX_FOOTERS = 64
_TAIL_BYTES = 8  # behind the footer: its size, and a magic
# pyarrow reads this much behind column chunks of old writers, which recorded too small sizes.
_SLACK_BYTES = 128

_UNITS = msgspec.json.Decoder(list[dict[str, str]])

_footers: dict[tuple[str, str, int, int], tuple[Any, "list[ServedColumn]"]] = {}


def _rows() -> ModuleType:
    """Rows of Arrow, which need pyarrow: only compute workers import it."""
    from gyre_daemon.datasets.formats import arrow_rows  # noqa: PLC0415

    return arrow_rows


def _scan_arrow(options: ColumnOptions, shard: str, file: BinaryIO) -> Arrays:
    scan: Arrays = _rows().scan_arrow(options, shard, file)
    return scan


def _decode_arrow(options: ColumnOptions, chunk: StoredChunk) -> Sequence[Column]:
    columns: Sequence[Column] = _rows().decode_batch(options, chunk)
    return columns


def _scan_parquet(options: ColumnOptions, shard: str, file: BinaryIO) -> Arrays:
    """The `chunk_arrays` of a file.

    Raises:
        CorruptSample: it is damaged; with the row group, if the footer is not.
        ConfigError: the columns do not fit.
    """
    where = "its footer"
    try:
        opened = _open(file)
        # a table without rows may have columns of unknown types
        served = _rows().served_columns
        columns = served(opened.schema_arrow, options) if opened.metadata.num_rows else []
        fixed = sum(column.spec.element_bytes for column in columns if not column.spec.ragged)
        chunks = []
        shard_bytes = file.seek(0, os.SEEK_END)
        for number in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(number)
            if not group.num_rows:
                continue
            where = f"row group {number}"
            pieces = _pieces(group, columns, shard_bytes)
            if group.num_rows * max(fixed, 1) > MAX_CHUNK_BYTES:
                raise ValueError(_TOO_LARGE)
            chunk = ScannedChunk(group.num_rows, pieces, number=number)
            try:
                chunk = replace(chunk, columns=_inspect(opened, number, columns))
            except (ConfigError, MemoryError):
                raise
            except Exception as error:
                chunk = replace(chunk, damage=str(error))
            chunks.append(chunk)
        where = "its footer"
        tail = opened.metadata.serialized_size + _TAIL_BYTES
        shared = shard_bytes - tail, shard_bytes
        units = [column.units for column in columns]
        return chunk_arrays([column.spec for column in columns], chunks, shared, units)
    except (CorruptSample, ConfigError):
        raise
    except MemoryError as error:
        raise corrupt(shard, None, f"{where} needs too much memory") from error
    except Exception as error:
        raise corrupt(shard, None, f"{where} cannot be read: {error!s:.500}") from error


def _decode_parquet(options: ColumnOptions, chunk: StoredChunk) -> Sequence[Column]:
    """The columns of a row group; a `Decode`."""
    (_, footer), *pieces = chunk.pieces
    metadata, columns = _footer(options, chunk.shard, footer)
    opened = _open(_Pieces(pieces, chunk.shard_bytes), metadata)
    return _read(opened, chunk.number, columns)


def _footer(
    options: ColumnOptions, shard: str, footer: memoryview
) -> "tuple[Any, list[ServedColumn]]":
    key = (repr(options), shard, len(footer), zlib.crc32(footer))
    if key not in _footers:
        if len(_footers) >= _MAX_FOOTERS:
            del _footers[next(iter(_footers))]
        opened = _open(io.BytesIO(footer))
        _footers[key] = opened.metadata, _rows().served_columns(opened.schema_arrow, options)
    return _footers[key]


class _Pieces(PositionedFile):
    """A file with only some of its pieces in memory."""

    def __init__(self, pieces: Sequence[tuple[int, memoryview]], num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._pieces = pieces

    def read(self, size: int = -1) -> memoryview:  # not a copy
        for start, data in self._pieces:
            if start <= self._position <= start + len(data):
                begin = self._position - start
                piece = data[begin : begin + size if size >= 0 else None]
                self._position += len(piece)
                return piece
        raise ValueError(f"byte {self._position} belongs to no column that was indexed")


def _open(file: Any, metadata: Any = None) -> Any:
    """A `ParquetFile`."""
    import pyarrow as pa  # noqa: PLC0415  # only these processes need it
    import pyarrow.parquet as pq  # noqa: PLC0415

    pa.set_cpu_count(1)
    return pq.ParquetFile(
        file, metadata=metadata, pre_buffer=False, page_checksum_verification=True
    )


def _read(opened: Any, number: int, columns: "Sequence[ServedColumn]") -> list[Column]:
    """Some columns of a row group."""
    if not columns:
        return []
    paths = list(dict.fromkeys(column.path for column in columns))
    table = opened.read_row_group(number, columns=paths, use_threads=False)
    stated = opened.metadata.row_group(number).num_rows
    if table.num_rows != stated:
        raise ValueError(f"it has {table.num_rows} rows, and {stated} by the footer")
    read = []
    for column in columns:
        try:
            read.append(_rows().column_of(table.column(column.name).chunks, column.spec))
        except ValueError as error:
            raise ValueError(f"column {column.name!r:.100}: {error}") from error
    return read


def _inspect(opened: Any, number: int, columns: "Sequence[ServedColumn]") -> list[Column | None]:
    """The columns of a row group that must be read to index it, and None for each other one."""
    group = opened.metadata.row_group(number)
    unknown = [
        column
        for column in columns
        if column.spec.ragged or column.is_nested or _may_lack(group, column)
    ]
    read: dict[str, Column] = {}
    for column, its in zip(unknown, _read(opened, number, unknown), strict=True):
        read[column.spec.name] = its
        if column.is_file and its.present is not None:
            names = [f"{column.name}.path"]
            table = opened.read_row_group(number, columns=names, use_threads=False)
            (paths,) = table.column(column.name).combine_chunks().flatten()[:1]
            _rows().check_no_paths(column.name, ~its.present, paths)
    if sum(each.data.nbytes for each in read.values()) > MAX_CHUNK_BYTES:
        raise ValueError(_TOO_LARGE)
    bounds = {name: each.without_data for name, each in read.items()}
    return [bounds.get(column.spec.name) for column in columns]


def _may_lack(group: Any, column: "ServedColumn") -> bool:
    """Whether a row of the group may lack a column, by the footer."""
    if not column.is_nullable:
        return False
    leaves = (group.column(place) for place in range(group.num_columns))
    statistics = [leaf.statistics for leaf in leaves if column.owns(leaf.path_in_schema)]
    return any(its is None or not its.has_null_count or its.null_count for its in statistics)


_TOO_LARGE = (
    f"it has more than {MAX_CHUNK_BYTES >> 30} GiB; write the table with smaller row groups "
    "(`row_group_size`)"
)


def _pieces(
    group: Any, columns: "Sequence[ServedColumn]", shard_bytes: int
) -> list[tuple[int, int]]:
    """The ranges of the file that have these columns."""
    ranges = []
    for place in range(group.num_columns):
        leaf = group.column(place)
        if any(column.owns(leaf.path_in_schema) for column in columns):
            start = leaf.data_page_offset
            if leaf.has_dictionary_page and leaf.dictionary_page_offset:
                start = min(start, leaf.dictionary_page_offset)
            stop = start + leaf.total_compressed_size
            if not 0 <= start <= stop <= shard_bytes:
                raise ValueError("it is outside the file")
            ranges.append((start, min(stop + _SLACK_BYTES, shard_bytes)))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start - merged[-1][1] <= _MAX_GAP_BYTES:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _check(arrays: Arrays, file_bytes: int) -> None:
    check_chunks(arrays, file_bytes)
    require(len(_units_of(arrays)) == len(fields_of(arrays)), "its units are none")


def _units_of(arrays: Arrays) -> list[dict[str, str]]:
    return json_of(arrays, "units", _UNITS, "its units are none")


def _check_units(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> None:
    """Refuse times of several units, and times next to numbers, in one column.

    The fields of such shards may be equal. Fingerprints cover fields, and no units.

    Raises:
        CorruptSample: a shard has another unit than one before it.
    """
    first: dict[tuple[str, str], tuple[str, str]] = {}
    seen: set[bytes] = set()
    for shard, scan in zip(shards, inspected, strict=True):
        schema = scan["fields"].tobytes() + scan["units"].tobytes()
        if not num_rows(scan) or schema in seen:
            continue
        seen.add(schema)
        for spec, units in zip(fields_of(scan), _units_of(scan), strict=True):
            for path, unit in units.items():
                other, owner = first.setdefault((spec.name, path), (unit, shard.name))
                if unit != other and "[" in unit + other:  # numbers have none; fields tell these
                    reason = (
                        f"its column {spec.name + path!r:.100} is {unit}, and that of shard "
                        f"{owner} is {other}"
                    )
                    raise CorruptSample(
                        f"shard {shard.name} does not fit: {reason}; write both with one type, or "
                        "name the other columns in `columns`",
                        {"shard": shard.name, "reason": reason},
                    )


def _as_decoded(shard: Shard, arrays: Arrays) -> Arrays:
    """The arrays of a shard whose chunks are to be decoded, though they may have `places`.

    Raises:
        ConfigError: they cannot be decoded.
    """
    if "base" not in arrays:
        return arrays
    start, stop = arrays["shared"].tolist()
    if start == stop:
        raise ConfigError(
            f"shard {shard.name}: it has dictionaries behind its first record batch, and must be "
            "decoded, since another shard must be. Write it as Parquet, or without dictionaries."
        )
    fields, rows, present = fields_of(arrays), arrays["rows"], arrays["present"]
    first = np.cumsum(rows) - rows
    lengths = np.diff(arrays["ends"].astype(np.int64), axis=0, prepend=0)
    lengths[first] = arrays["ends"][first]
    ragged = [place for place, spec in enumerate(fields) if spec.ragged]
    for column, place in enumerate(arrays["optional"].tolist()):
        if place in ragged:  # decoded rows have no bytes there, stored ones any
            lengths[~present[:, column], ragged.index(place)] = 0
    ends = np.cumsum(lengths, axis=0)
    ends = (ends - np.repeat(ends[first] - lengths[first], rows, axis=0)).astype(np.uint32)
    if (field_bytes(fields, rows, ends).sum(axis=1) > MAX_CHUNK_BYTES).any():
        raise ConfigError(
            f"shard {shard.name}: a record batch has more than {MAX_CHUNK_BYTES >> 30} GiB, and "
            "must be decoded, since another shard must be. Write smaller ones."
        )
    return {
        **{name: each for name, each in arrays.items() if name not in ("base", "first", "bits")},
        "pieces": np.stack((arrays["parameters"][:, 0], arrays["pieces"][:, 1]), axis=1),
        "parameters": np.empty((len(rows), 0), np.int64),
        "ends": ends,
    }


class _ColumnFormat(ChunkFormat):
    """A `Format` of files with columns, which pyarrow reads.

    Attributes:
        name: of the format.
        magic: at the beginning of its files.
        scan: the `run` of a `Scan`, once the columns are set.
        decode: a `Decode`, once the columns are set.
        seeks: see `Scan`.
    """

    name: ClassVar[str]
    magic: ClassVar[bytes]
    scan: ClassVar["staticmethod[[ColumnOptions, str, BinaryIO], Arrays]"]
    decode: ClassVar["staticmethod[[ColumnOptions, StoredChunk], Sequence[Column]]"]
    seeks: ClassVar[bool]
    unpacks_gzip = False

    def __init__(self, options: ColumnOptions) -> None:
        """Refuse to start without the library.

        Raises:
            ConfigError: pyarrow is not installed.
        """
        require_library("pyarrow", f"the format {self.name} needs", "arrow")
        self._options = options

    @classmethod
    def recognises(cls, head: bytes) -> bool:
        """See `FormatEntry.recognises`: the magic of a file; streams of Arrow have none."""
        return head.startswith(cls.magic)

    @property
    def inspection(self) -> Scan:
        options = self._options
        union = ["union"] * options.may_lack
        pairs = [f"{field}={column}" for field, column in options.pairs]
        lengths = [f"{name}:{length}" for name, length in options.declared.items()]
        version = " ".join([f"{self.name}/4", *union, *pairs, *lengths])
        run = partial(type(self).scan, options)
        return Scan(version, run, num_rows, _check, seeks=self.seeks, ragged=options.ragged)

    def index_of(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        _check_units(shards, inspected)
        return assemble_union(self._options, shards, inspected, "fields", self._index_of_equal)

    def _index_of_equal(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> ChunkIndex:
        """The index of shards that have the same columns."""
        decode = partial(type(self).decode, self._options)
        identity = self._identity(shards, inspected)
        return ChunkIndex(shards, inspected, decode, self.noun, identity)

    def _identity(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> bytes:
        """See `ChunkIndex`."""
        return f"{self.name} {self._options.pairs}".encode()


class ArrowFormat(_ColumnFormat):
    """A `Format` that reads the metadata of record batches, and where their rows begin."""

    name, noun, magic = "arrow", "record batch", b"ARROW1\0\0"
    pattern = "*.{arrow,arrows,ipc,feather}"
    scan, decode, seeks = staticmethod(_scan_arrow), staticmethod(_decode_arrow), False

    def index_of(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `ChunkFormat.index_of`: all record batches are decoded, or none."""
        if any(num_rows(scan) and "base" not in scan for scan in inspected):
            pairs = zip(shards, inspected, strict=True)
            inspected = [_as_decoded(shard, scan) for shard, scan in pairs]
        return super().index_of(shards, inspected)

    def _identity(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> bytes:
        stored = [scan for scan in inspected if "base" in scan]
        if stored:
            return b"arrow " + stored[0]["fields"].tobytes()
        return super()._identity(shards, inspected)


class ParquetFormat(_ColumnFormat):
    """A `Format` whose chunks are row groups.

    Files are asked for their footers, and for those columns whose lengths or nulls are
    not known from there.
    """

    name, noun, magic = "parquet", "row group", b"PAR1"
    pattern = "*.{parquet,parq}"
    scan, decode, seeks = staticmethod(_scan_parquet), staticmethod(_decode_parquet), True
