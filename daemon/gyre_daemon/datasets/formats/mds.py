"""The format `mds`: shards of MosaicML Streaming, with a field for each column.

In: files as its `MDSWriter` writes them; the `index.json` next to them is not needed. Out: the
place of each column of each sample; a shard that zstd compressed is one chunk.

The layout is that of `streaming/base/format/mds/writer.py`: the number of samples n (uint32), the
n + 1 offsets of the samples (uint32), a JSON object that names the columns, and the samples. Each
sample has the sizes (uint32) of its columns without a fixed size, then the columns. All numbers are
little-endian.
"""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    Arrays,
    CodecName,
    FieldSpec,
    SampleIndex,
    Scan,
    array_of,
    corrupt,
    json_of,
)
from gyre_daemon.datasets.formats.chunk_index import (
    ChunkIndex,
    Column,
    DamagedPart,
    ScannedChunk,
    StoredChunk,
    chunk_arrays,
    num_samples,
)
from gyre_daemon.datasets.formats.concat import assemble_union
from gyre_daemon.datasets.formats.lines import MAX_FRAME_BYTES, decompress, frames, recognised
from gyre_daemon.datasets.formats.sample_table import (
    SampleTable,
    SchemaOptions,
    are_compressed,
    check_columns,
    chosen_columns,
    common_schema,
    joined_columns,
)
from gyre_daemon.datasets.formats.values import parse_integer, parse_number
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.shard import Shard

SCAN_VERSION = "mds/1"

_UINT32 = np.dtype("<u4")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SAMPLES = 1 << 30
# Samples in memory at once, unless one is larger.
_GROUP_BYTES = 16 << 20
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]


class MdsColumn(NamedTuple):
    """A column as a shard declares it.

    Attributes:
        name: of the column.
        encoding: as MosaicML Streaming calls it, such as `str` or `ndarray:int32:3,4`.
        size: bytes in every sample; None if samples differ.
    """

    name: str
    encoding: str
    size: _Size | None


class _Config(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[_Size | None]


_CONFIG, _COLUMNS = msgspec.json.Decoder(_Config), msgspec.json.Decoder(list[MdsColumn])


def scan_mds(file: BinaryIO) -> Arrays:
    """The places of the F columns of the N samples of a shard.

    Returns:
        start, size: int64 [N, F], first byte and length of each column.
        columns: JSON of [name, encoding, size] of each column.

    Raises:
        DamagedPart: it is no sound shard.
    """
    offsets, columns = _read_header(file)
    starts, sizes = [], []
    first = 0
    while first < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[first] + _GROUP_BYTES, side="right")) - 1
        stop = max(stop, first + 1)
        group = offsets[first : stop + 1]
        data = _read(file, int(group[-1] - group[0]), int(group[0]))
        start, size = _locate(data, group, columns)
        wrong = np.flatnonzero((start + size)[:, -1] != group[1:])
        if len(wrong):
            number = first + int(wrong[0])
            raise DamagedPart(
                f"the columns of sample {number} do not fill its bytes", int(offsets[number])
            )
        starts.append(start)
        sizes.append(size)
        first = stop
    nothing = np.empty((0, len(columns)), np.int64)
    return {
        "start": np.concatenate([nothing, *starts]),
        "size": np.concatenate([nothing, *sizes]),
        "columns": np.frombuffer(json.dumps(columns).encode(), np.uint8),
    }


def _read_header(file: BinaryIO) -> tuple[npt.NDArray[np.int64], list[MdsColumn]]:
    """The offsets of the samples, and the columns."""
    (num_samples,) = np.frombuffer(_read(file, 4, 0), _UINT32).tolist()
    if num_samples > _MAX_SAMPLES:
        raise DamagedPart(f"it declares {num_samples} samples; is it an MDS shard?", 0)
    begin = 4 * (num_samples + 2)
    offsets = np.frombuffer(_read(file, begin - 4, 4), _UINT32).astype(np.int64)
    num_bytes = int(offsets[0]) - begin
    if not 0 < num_bytes <= _MAX_CONFIG_BYTES or (np.diff(offsets) < 0).any():
        raise DamagedPart("the offsets of its samples make no sense; is it an MDS shard?", 4)
    try:
        its = _CONFIG.decode(_read(file, num_bytes, begin))
        declared = zip(its.column_names, its.column_encodings, its.column_sizes, strict=True)
        columns = [MdsColumn(*each) for each in declared]
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if isinstance(error, DamagedPart):
            raise
        raise DamagedPart("its columns cannot be read", begin) from error
    if not columns:
        raise DamagedPart("its columns cannot be read", begin)
    return offsets, columns


def _read(file: BinaryIO, num_bytes: int, offset: int) -> bytes:
    """The next bytes, in parts: a damaged shard may claim gigabytes. They begin at an offset."""
    parts, left = [], num_bytes
    while left and (part := file.read(min(left, _GROUP_BYTES))):
        parts.append(part)
        left -= len(part)
    if left:
        raise DamagedPart("the shard is cut off", offset)
    return b"".join(parts)


def _locate(
    data: bytes, offsets: npt.NDArray[np.int64], columns: list[MdsColumn]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Begin and size of the columns of n successive samples, int64 [n, F] each.

    The samples begin at `offsets`, int64 [n + 1]. Where sizes lead beyond a sample, so do these.
    """
    variable = [number for number, column in enumerate(columns) if column.size is None]
    num_head_bytes = 4 * len(variable)
    values = np.frombuffer(data, np.uint8)
    heads = (offsets[:-1] - offsets[0])[:, None] + np.arange(num_head_bytes)
    found = values[np.minimum(heads, max(len(values) - 1, 0))] if len(values) else heads
    size = np.empty((len(offsets) - 1, len(columns)), np.int64)
    size[:] = [column.size or 0 for column in columns]
    size[:, variable] = np.ascontiguousarray(found, np.uint8).view(_UINT32)
    start = offsets[:-1, None] + num_head_bytes + np.cumsum(size, axis=1) - size
    return start, size


_PARSERS: dict[str, Callable[[bytes], float]] = {"integer": parse_integer, "number": parse_number}
_NO_DATA = np.empty(0, np.uint8)


def scan_any(shard: str, file: BinaryIO) -> Arrays:
    """See `scan_mds`; of a compressed shard, the offsets are those in the decompressed one.

    Returns:
        As `scan_mds`; raw_bytes: int64 [1], of a compressed shard the decompressed size.

    Raises:
        CorruptSample: it is no sound shard; with shard and offset.
    """
    try:
        with recognised(shard, file) as (opened, is_compressed):
            if not is_compressed:
                return scan_mds(opened)
            data = bytearray()
            for frame in frames(opened):
                data += frame.data
                if len(data) > MAX_FRAME_BYTES:
                    limit = MAX_FRAME_BYTES >> 30
                    raise ValueError(f"it has more than {limit} GiB; write smaller shards")
        return {**scan_mds(io.BytesIO(data)), "raw_bytes": np.array([len(data)], np.int64)}
    except ConfigError:
        raise
    except ValueError as error:
        raise corrupt(shard, getattr(error, "offset", None), str(error)) from error


def check_any(arrays: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    if "raw_bytes" in arrays:
        raw_bytes = array_of(arrays, "raw_bytes", np.int64)
        if raw_bytes.shape != (1,) or not 0 <= raw_bytes[0] <= MAX_FRAME_BYTES:
            raise ValueError("it has no decompressed size")
        file_bytes = int(raw_bytes[0])
    columns = json_of(arrays, "columns", _COLUMNS, "its columns cannot be read")
    check_columns(arrays, file_bytes, len(columns))


def compressed_index(
    shards: Sequence[Shard],
    inspected: Sequence[Arrays],
    specs: Sequence[FieldSpec],
    places: Sequence[int],
    identity: bytes,
) -> ChunkIndex:
    """The index of compressed shards; `places` are those of the fields' columns in a shard."""
    decode = partial(decode_shard, tuple(zip(specs, places, strict=True)))
    parsed = [replace(spec, codec="bytes") if spec.codec in _PARSERS else spec for spec in specs]
    scans = []
    for shard, scan in zip(shards, inspected, strict=True):
        count = len(scan["size"])
        columns = [
            Column(_NO_DATA, np.cumsum(scan["size"][:, place])) if spec.ragged else None
            for spec, place in zip(specs, places, strict=True)
        ]
        chunk = ScannedChunk(count, [(0, shard.size_bytes)], columns)
        scans.append(chunk_arrays(parsed, [chunk] if count else []))
    return ChunkIndex(shards, scans, decode, "block of samples", identity)


def decode_shard(fields: Sequence[tuple[FieldSpec, int]], chunk: StoredChunk) -> Sequence[Column]:
    """The columns of a shard; a `Decode`, once the served fields and their places are set.

    Raises:
        ValueError: it is damaged.
    """
    data = decompress(chunk.pieces)
    try:
        scan = scan_mds(io.BytesIO(data))
    except DamagedPart as error:  # its offset is none in the stored shard
        raise ValueError(str(error)) from error
    stops = scan["start"] + scan["size"]
    columns = []
    for spec, place in fields:
        ranges = zip(scan["start"][:, place].tolist(), stops[:, place].tolist(), strict=True)
        values = [data[start:stop] for start, stop in ranges]
        ends = np.cumsum(scan["size"][:, place]) if spec.ragged else None
        columns.append(Column(_bytes(spec, values), ends))
    return columns


def _bytes(spec: FieldSpec, values: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    parse = _PARSERS.get(spec.codec)
    if parse is None:
        return np.frombuffer(b"".join(values), np.uint8)
    return np.array([parse(value) for value in values], spec.dtype).view(np.uint8)


_RAGGED: Mapping[str, CodecName] = {
    **dict.fromkeys(("bytes", "jpeg", "png"), "bytes"),
    **dict.fromkeys(("str", "str_decimal"), "text"),
    "json": "json",
}
_NUMBERS: Mapping[str, tuple[str, CodecName]] = {
    "int": ("<i8", "bytes"),
    "str_int": ("<i8", "integer"),
    "str_float": ("<f8", "number"),
}
_SCALARS = frozenset(
    f"{kind}{bits}" for kind in ("uint", "int", "float") for bits in (8, 16, 32, 64)
) - {"float8"}


class MdsFormat:
    """A `Format` that reads each shard once to find the columns of its samples."""

    pattern = "*.{mds,mds.zst,mds.zstd}"
    unpacks_gzip = False
    inspection = Scan(SCAN_VERSION, scan_any, num_samples, check_any)

    def __init__(self, options: SchemaOptions) -> None:
        self._options = options

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        return assemble_union(self._options, shards, inspected, "columns", self._assemble)

    def _assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """The index of shards that have the same columns."""
        declared = [
            _COLUMNS.decode(scan["columns"].tobytes()) if len(scan["size"]) else None
            for scan in inspected
        ]
        columns = common_schema(shards, declared, _describe) or []
        names = [column.name for column in columns]
        chosen = chosen_columns(self._options, names, shards[0].name) if columns else []
        places = [place for _, place in chosen]
        specs = [_spec(field, columns[place]) for field, place in chosen]
        identity = json.dumps([(spec.name, spec.codec, spec.dtype.str) for spec in specs]).encode()
        if are_compressed(shards, ["raw_bytes" in scan for scan in inspected]):
            # decoded, columns of one dtype are alike
            renamed = [(field, names[place]) for field, place in chosen if field != names[place]]
            identity += json.dumps(renamed).encode() * bool(renamed)
            return compressed_index(shards, inspected, specs, places, identity)
        return SampleTable(
            specs,
            [len(scan["size"]) for scan in inspected],
            joined_columns(inspected, "start", places),
            joined_columns(inspected, "size", places),
            identity=identity,
        )


def _describe(columns: Sequence[MdsColumn]) -> str:
    return "the columns " + ", ".join(f"{each.name} ({each.encoding})" for each in columns)


def _spec(field: str, column: MdsColumn) -> FieldSpec:
    encoding = column.encoding
    if encoding in _RAGGED:
        media_type = f"image/{encoding}" if encoding in ("jpeg", "png") else ""
        spec = FieldSpec(field, np.dtype(np.uint8), (), ragged=True, codec=_RAGGED[encoding])
        return replace(spec, media_type=media_type)
    dtype, codec = _NUMBERS.get(encoding, (encoding, "bytes"))
    shape: tuple[int, ...] = ()
    if encoding.startswith("ndarray:") and encoding.count(":") == 2:
        _, dtype, sizes = encoding.split(":")
        shape = tuple(int(size) for size in sizes.split(",") if size.isdecimal())
    elif encoding not in _NUMBERS and encoding not in _SCALARS:
        raise ConfigError(
            f"column {column.name!r:.100} has the encoding {encoding!r:.100}, which is no tensor; "
            "leave it out: name the others in `columns`"
        )
    if dtype not in _SCALARS and encoding not in _NUMBERS:
        raise ConfigError(f"column {column.name!r:.100} has an unknown dtype: {encoding!r:.100}")
    spec = FieldSpec(field, np.dtype(dtype).newbyteorder("<"), shape, ragged=False, codec=codec)
    if codec == "bytes" and column.size != math.prod(shape) * spec.dtype.itemsize:
        raise ConfigError(
            f"column {column.name!r:.100} has {column.size} bytes, which is not {encoding!r:.100}"
        )
    return spec
