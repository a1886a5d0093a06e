"""MDS shards that zstd compressed: each is one chunk. Pure.

They are scanned as others are, but for being decompressed before. Which columns are served is
chosen when the dataset is assembled.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays, FieldSpec, array_of
from gyre_daemon.datasets.formats.chunks import Column, StoredChunk, chunk_arrays
from gyre_daemon.datasets.formats.indexes.chunk_index import ChunkIndex
from gyre_daemon.datasets.formats.mds.scan import check_scan, scan_mds
from gyre_daemon.datasets.formats.values import parse_integer, parse_number
from gyre_daemon.datasets.formats.zstd import MAX_FRAME_BYTES, decompress, frames, recognised
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import Shard

_PARSERS: dict[str, Callable[[bytes], float]] = {"integer": parse_integer, "number": parse_number}
_NO_DATA = np.empty(0, np.uint8)


def scan_any(shard: str, file: BinaryIO) -> Arrays:
    """See `scan_mds`; of a compressed shard, the offsets are those in the decompressed one.

    Returns:
        As `scan_mds`; raw_bytes: int64 [1], of a compressed shard the decompressed size.
    """
    with recognised(shard, file) as (opened, is_compressed):
        if not is_compressed:
            return scan_mds(shard, opened)
        data = bytearray()
        try:
            for frame in frames(opened):
                data += frame.data
                if len(data) > MAX_FRAME_BYTES:
                    limit = MAX_FRAME_BYTES >> 30
                    raise ValueError(f"it has more than {limit} GiB; write smaller shards")
        except ConfigError:
            raise
        except ValueError as error:
            facts = {"shard": shard, "reason": str(error)}
            raise CorruptSample(f"shard {shard}: {error}", facts) from error
    return {**scan_mds(shard, io.BytesIO(data)), "raw_bytes": np.array([len(data)], np.int64)}


def check_any(arrays: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    if "raw_bytes" in arrays:
        raw_bytes = array_of(arrays, "raw_bytes", np.int64)
        if raw_bytes.shape != (1,) or not 0 <= raw_bytes[0] <= MAX_FRAME_BYTES:
            raise ValueError("it has no decompressed size")
        file_bytes = int(raw_bytes[0])
    check_scan(arrays, file_bytes)


def any_compressed(shards: Sequence[Shard], inspected: Sequence[Arrays]) -> bool:
    """Whether the shards are compressed.

    Raises:
        ConfigError: only some are.
    """
    pairs = zip(shards, inspected, strict=True)
    compressed = [shard.name for shard, scan in pairs if "raw_bytes" in scan]
    if compressed and len(compressed) < len(shards):
        raise ConfigError(
            f"some shards are compressed with zstd, such as {compressed[0]}, and some are not. "
            "Compress all of them or none, or name the ones you mean."
        )
    return bool(compressed)


def compressed_index(
    shards: Sequence[Shard],
    inspected: Sequence[Arrays],
    specs: Sequence[FieldSpec],
    places: Sequence[int],
    identity: bytes,
) -> ChunkIndex:
    """The index of compressed shards.

    Args:
        shards: of the dataset.
        inspected: from `scan_any`.
        specs: the served fields.
        places: of their columns in the shards.
        identity: see `ChunkIndex`.
    """
    decoder = ShardDecoder(tuple(specs), tuple(places))
    parsed = [replace(spec, codec="bytes") if spec.codec in _PARSERS else spec for spec in specs]
    scans = []
    for shard, scan in zip(shards, inspected, strict=True):
        count = len(scan["size"])
        columns = [
            Column(_NO_DATA, np.cumsum(scan["size"][:, place])) if spec.ragged else None
            for spec, place in zip(specs, places, strict=True)
        ]
        one = int(count > 0)
        pieces = [[(0, shard.size_bytes)]] * one
        scans.append(chunk_arrays(parsed, [count] * one, pieces, [columns] * one))
    return ChunkIndex(shards, scans, decoder, "block of samples", identity)


@dataclass(frozen=True, slots=True)
class ShardDecoder:
    """Decodes shards; a `Decode`.

    Attributes:
        specs: the served fields, with the codecs of the stored columns.
        places: of their columns in the shard.
    """

    specs: tuple[FieldSpec, ...]
    places: tuple[int, ...]

    def __call__(self, chunk: StoredChunk) -> Sequence[Column]:
        """The columns of a shard.

        Raises:
            ValueError: it is damaged.
        """
        data = decompress(chunk.pieces)
        try:
            scan = scan_mds(chunk.shard, io.BytesIO(data))
        except CorruptSample as error:
            raise ValueError(str(error.facts["reason"])) from error
        stops = scan["start"] + scan["size"]
        columns = []
        for spec, place in zip(self.specs, self.places, strict=True):
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
