"""The format `tfrecord`: every record of a TFRecord file is one sample, as bytes.

In: files as TensorFlow writes them. Out: the place of each record. The checksums of the file are
compared when it is indexed.

The layout is that of TensorFlow's `tsl/lib/io/record_writer.h`: for each record its length as
uint64, a checksum of that, the bytes, and their checksum. The checksums are CRC-32C, rotated and
offset ("masked") so that a checksum of checksums is no constant. All numbers are little-endian.
"""

import io
import struct
from collections.abc import Sequence
from typing import BinaryIO, cast

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    DamagedSample,
    FieldSpec,
    NoOptions,
    Scan,
    array_of,
    corrupt,
    require_library,
)
from gyre_daemon.datasets.formats.chunk_index import num_samples
from gyre_daemon.datasets.formats.sample_table import SampleTable, check_extents
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_MASK = 0xA282EAD8
_PIECE_BYTES = 1 << 20
_FIELD = FieldSpec("record", np.dtype(np.uint8), (), ragged=True, codec="bytes")


class TfrecordFormat:
    """A `Format` that reads each file once and compares all checksums."""

    pattern = "*.{tfrecord,tfrecords,tfrecord.gz,tfrecords.gz,tfrecord-*-of-*[0-9]}"
    unpacks_gzip = True

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: a length and its checksum."""
        return len(head) >= _HEAD.size and _is_head(head)

    def __init__(self, options: NoOptions) -> None:
        """Refuse to start without the library that computes the checksums.

        Raises:
            ConfigError: google-crc32c is not installed.
        """
        reader = "the format tfrecord needs"
        require_library("google_crc32c", reader, "records", "google-crc32c")

    @property
    def inspection(self) -> Scan:
        return Scan("tfrecord/2", scan_records, num_samples, _check)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleTable:
        index, damaged = self.assemble_tolerantly(shards, inspected)
        for first in damaged[:1]:
            reason = f"{first.reason}; restore the shard"
            raise corrupt(shards[first.shard].name, first.offset, reason)
        return index

    def assemble_tolerantly(
        self, shards: Sequence[Shard], inspected: Sequence[Arrays]
    ) -> tuple[SampleTable, Sequence[DamagedSample]]:
        """See `TolerantFormat`: the records whose bytes have another checksum."""
        damaged: list[DamagedSample] = []
        first = 0
        for number, scan in enumerate(inspected):
            for record in scan["damaged"].tolist():
                offset = int(scan["start"][record]) - _HEAD.size
                reason = f"record {record} has bytes whose checksum differs"
                damaged.append(DamagedSample(number, first + record, offset, reason))
            first += len(scan["size"])
        return SampleTable.of_ranges(_FIELD, inspected, b"tfrecord"), damaged


def scan_records(shard: str, file: BinaryIO) -> Arrays:
    """The places of the N records of a file.

    Returns:
        start, size: int64 [N], first byte and length of each record's data.
        damaged: int64 [D], the records whose data have another checksum.

    Raises:
        CorruptSample: the file is cut off, or the checksum of a length differs; with shard and
            offset.
    """
    from google_crc32c import extend, value  # noqa: PLC0415  # only this format needs it

    def damage(reason: str) -> CorruptSample:
        return corrupt(shard, offset, f"record {len(starts)} {reason}")

    starts: list[int] = []
    sizes: list[int] = []
    damaged: list[int] = []
    offset = 0
    file = io.BufferedReader(cast("io.RawIOBase", file), _PIECE_BYTES)
    while head := file.read(_HEAD.size):
        if len(head) < _HEAD.size:
            raise damage("is cut off in its length")
        size, checksum = _HEAD.unpack(head)
        if checksum != _masked(value(head[:8])):
            raise damage("has a length whose checksum differs; is this a TFRecord file?")
        crc, left = 0, size
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            crc, left = extend(crc, piece), left - len(piece)
        foot = file.read(_CHECKSUM.size)
        if left or len(foot) < _CHECKSUM.size:
            raise damage(f"is cut off; its length is {size}")
        if _CHECKSUM.unpack(foot)[0] != _masked(crc):
            damaged.append(len(starts))
        starts.append(offset + _HEAD.size)
        sizes.append(size)
        offset += _HEAD.size + size + _CHECKSUM.size
    return {
        "start": np.array(starts, np.int64),
        "size": np.array(sizes, np.int64),
        "damaged": np.array(damaged, np.int64),
    }


def _check(arrays: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    check_extents(arrays, file_bytes)
    damaged, num_records = array_of(arrays, "damaged", np.int64), len(arrays["size"])
    if len(damaged) and (
        damaged[0] < 0 or damaged[-1] >= num_records or (np.diff(damaged) <= 0).any()
    ):
        raise ValueError("its damaged records are none of the shard's")


def _is_head(head: bytes) -> bool:
    length, checksum = _HEAD.unpack_from(head)
    crc = 0xFFFFFFFF  # of so few bytes that no library is needed
    for byte in struct.pack("<Q", length):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return bool(checksum == _masked(crc ^ 0xFFFFFFFF))


def _masked(crc: int) -> int:
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
