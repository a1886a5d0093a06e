"""Indexes one MDS shard in one pass.

The layout is that of `streaming/base/format/mds/writer.py`: the number of samples n (uint32), the
n + 1 offsets of the samples (uint32), a JSON object that names the columns, and the samples. Each
sample has the sizes (uint32) of its columns without a fixed size, then the columns. All numbers are
little-endian.
"""

import json
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.indexes.stored import check_columns, json_of
from gyre_daemon.errors import CorruptSample

SCAN_VERSION = "mds/1"

_UINT32 = np.dtype("<u4")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SAMPLES = 1 << 30
# Samples in memory at once, unless one is larger.
_GROUP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class MdsColumn:
    """A column as a shard declares it.

    Attributes:
        name: of the column.
        encoding: as MosaicML Streaming calls it, such as `str` or `ndarray:int32:3,4`.
        size: bytes in every sample; None if samples differ.
    """

    name: str
    encoding: str
    size: int | None


def scan_mds(shard: str, file: BinaryIO) -> Arrays:
    """The places of the F columns of the N samples of a shard.

    Returns:
        start, size: int64 [N, F], first byte and length of each column.
        columns: JSON of [name, encoding, size] of each column.

    Raises:
        CorruptSample: it is no sound shard; with shard and offset.
    """
    reader = _ShardReader(shard, file)
    offsets, columns = reader.read_header()
    starts, sizes = [], []
    first = 0
    while first < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[first] + _GROUP_BYTES, side="right")) - 1
        stop = max(stop, first + 1)
        group = offsets[first : stop + 1]
        start, size = _locate(reader.read(int(group[-1] - group[0])), group, columns)
        wrong = np.flatnonzero((start + size)[:, -1] != group[1:])
        if len(wrong):
            number = first + int(wrong[0])
            raise reader.corrupt(
                int(offsets[number]), f"the columns of sample {number} do not fill its bytes"
            )
        starts.append(start)
        sizes.append(size)
        first = stop
    nothing = np.empty((0, len(columns)), np.int64)
    declared = [(column.name, column.encoding, column.size) for column in columns]
    return {
        "start": np.concatenate([nothing, *starts]),
        "size": np.concatenate([nothing, *sizes]),
        "columns": np.frombuffer(json.dumps(declared).encode(), np.uint8),
    }


def check_scan(arrays: Arrays, file_bytes: int) -> None:
    """See `Scan.check`."""
    declared = json_of(arrays, "columns")
    if not isinstance(declared, list) or not all(map(_is_column, declared)):
        raise ValueError("its columns cannot be read")
    check_columns(arrays, file_bytes, len(declared))


def _is_column(declared: Any) -> bool:
    if not isinstance(declared, list) or len(declared) != 3:
        return False
    name, encoding, size = declared
    has_size = size is None or (type(size) is int and size >= 0)
    return isinstance(name, str) and isinstance(encoding, str) and has_size


class _ShardReader:
    """Reads a shard from its beginning to its end."""

    def __init__(self, shard: str, file: BinaryIO) -> None:
        self._shard = shard
        self._file = file
        self._offset = 0

    def read(self, num_bytes: int) -> bytes:
        """The next bytes.

        Raises:
            CorruptSample: the file ends before.
        """
        parts, left = [], num_bytes
        while left and (part := self._file.read(min(left, _GROUP_BYTES))):
            parts.append(part)
            left -= len(part)
        if left:
            raise self.corrupt(self._offset, "the shard is cut off")
        self._offset += num_bytes
        return b"".join(parts)

    def read_header(self) -> tuple[npt.NDArray[np.int64], list[MdsColumn]]:
        """The offsets of the samples, and the columns."""
        (num_samples,) = np.frombuffer(self.read(4), _UINT32).tolist()
        if num_samples > _MAX_SAMPLES:
            raise self.corrupt(0, f"it declares {num_samples} samples; is it an MDS shard?")
        offsets = np.frombuffer(self.read(4 * (num_samples + 1)), _UINT32).astype(np.int64)
        num_config_bytes = int(offsets[0]) - self._offset
        if not 0 < num_config_bytes <= _MAX_CONFIG_BYTES or (np.diff(offsets) < 0).any():
            raise self.corrupt(4, "the offsets of its samples make no sense; is it an MDS shard?")
        return offsets, self._parse(self.read(num_config_bytes))

    def _parse(self, text: bytes) -> list[MdsColumn]:
        try:
            config: Any = json.loads(text)
            names, encodings = config["column_names"], config["column_encodings"]
            sizes = config["column_sizes"]
            declared = [list(each) for each in zip(names, encodings, sizes, strict=True)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.corrupt(self._offset - len(text), "its columns cannot be read") from error
        if not declared or not all(map(_is_column, declared)):
            raise self.corrupt(self._offset - len(text), "its columns cannot be read")
        return [MdsColumn(*each) for each in declared]

    def corrupt(self, offset: int, reason: str) -> CorruptSample:
        """The error for a shard that cannot be served."""
        return CorruptSample(
            f"shard {self._shard} at byte {offset}: {reason}",
            {"shard": self._shard, "offset": offset, "reason": reason},
        )


def _locate(
    data: bytes, offsets: npt.NDArray[np.int64], columns: list[MdsColumn]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Begin and size of the columns of n successive samples.

    Args:
        data: their bytes.
        offsets: int64 [n + 1], where each begins in the shard, and the end of the last.
        columns: F.

    Returns:
        int64 [n, F] each. Where the sizes in a sample lead beyond it, so do these.
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
