"""The format `npy`: every row of an array is one sample.

In: npy files as numpy writes them. Out: the place of each row; rows of all files have one shape.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    FieldSpec,
    Probe,
    ProbeRequest,
    ProbeSteps,
    array_of,
)
from gyre_daemon.datasets.formats.indexes.stored import json_of
from gyre_daemon.datasets.formats.indexes.strided import StridedIndex
from gyre_daemon.datasets.formats.names import check_names
from gyre_daemon.datasets.formats.npy import NPY_MAGIC, is_number_type, is_shape, parse_npy_header
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard

# More than any accepted header; `parse_npy_header` needs to see all of it.
_HEAD_BYTES = 10_240
# Shards whose heads are requested together and held in memory.
_SHARDS_PER_REQUEST = 1024


@dataclass(frozen=True, slots=True)
class RowsOptions:
    """The keys of an `npy` dataset.

    Attributes:
        field: the name of the tensor.
    """

    field: str = "array"

    def __post_init__(self) -> None:
        """Refuse a name that no batch can have."""
        check_names([self.field], "field")


class RowsFormat:
    """A `Format` that reads the header of each file."""

    pattern = "*.npy"
    unpacks_gzip = False

    @staticmethod
    def recognises(head: bytes) -> bool:
        """See `FormatEntry.recognises`: numpy's magic."""
        return head.startswith(NPY_MAGIC)

    def __init__(self, options: RowsOptions) -> None:
        self._field = options.field

    @property
    def inspection(self) -> Probe:
        """See `Format.inspection`."""
        return Probe("npy-rows/1", _probe, _check)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> StridedIndex:
        """See `Format.assemble`."""
        found = inspected[0]
        dtype_text, *shape = json.loads(found["row"].tobytes())
        dtype = np.dtype(dtype_text)
        spec = FieldSpec(self._field, dtype, tuple(shape), ragged=False, codec="bytes")
        return StridedIndex(
            spec,
            found["start"].tolist(),
            found["count"],
            stride_bytes=spec.element_bytes,
            identity=f"npy {self._field} {dtype.str} {shape}".encode(),
        )


def _probe(shards: Sequence[Shard]) -> ProbeSteps:
    """The headers of all files.

    Returns:
        start, count: int64, of each file, where its first row begins and how many it has.
        row: JSON of the dtype of all elements and the sizes of a row.

    Raises:
        CorruptSample: a file is no npy file, is cut off, or has rows of another shape.
    """
    starts: list[int] = []
    counts: list[int] = []
    row: list[object] = []
    for begin in range(0, len(shards), _SHARDS_PER_REQUEST):
        some = range(begin, min(begin + _SHARDS_PER_REQUEST, len(shards)))
        response = yield ProbeRequest(some, [0] * len(some), [_HEAD_BYTES] * len(some))
        assert response is not None
        for number, head in zip(some, response.pieces, strict=True):
            shard = shards[number]
            start, count, found = _read_header(shard, head)
            row = row or found
            if found != row:
                raise _corrupt(
                    shard,
                    f"its rows are {_text(found)}, and those of {shards[0].name} {_text(row)}",
                )
            starts.append(start)
            counts.append(count)
    return {
        "start": np.array(starts, np.int64),
        "count": np.array(counts, np.int64),
        "row": np.frombuffer(json.dumps(row).encode(), np.uint8),
    }


def _check(arrays: Arrays, shards: Sequence[Shard]) -> None:
    """See `Probe.check`."""
    start, count = (array_of(arrays, name, np.int64) for name in ("start", "count"))
    row = json_of(arrays, "row")
    if not isinstance(row, list) or not row or not isinstance(row[0], str):
        raise ValueError("its rows have no dtype")
    if not is_number_type(row[0]) or not is_shape(tuple(row[1:])):
        raise ValueError("its rows are no arrays of numbers")
    row_bytes = math.prod(row[1:]) * np.dtype(row[0]).itemsize
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    if start.shape != sizes.shape or count.shape != sizes.shape or not row_bytes:
        raise ValueError("it does not describe these shards")
    if (start < 0).any() or (count < 0).any() or (count > sizes // row_bytes).any():
        raise ValueError("its rows point outside the shards")
    if (start + count * row_bytes != sizes).any():
        raise ValueError("its rows point outside the shards")


def _read_header(shard: Shard, head: bytes) -> tuple[int, int, list[object]]:
    """Where the rows begin, how many there are, and their dtype and sizes."""
    try:
        header = parse_npy_header(head)
    except ValueError as error:
        raise _corrupt(shard, str(error)) from error
    if not header.shape:
        raise _corrupt(shard, "its array has no dim, and so no rows")
    if header.dtype.byteorder == ">":
        raise _corrupt(shard, "its array is big-endian; store it little-endian")
    stop = header.num_bytes + math.prod(header.shape) * header.dtype.itemsize
    if stop != shard.size_bytes:
        raise _corrupt(shard, f"it has {shard.size_bytes} bytes, and {stop} by its header")
    if not math.prod(header.shape[1:]):
        raise _corrupt(shard, f"its rows have no elements: its shape is {list(header.shape)}")
    return header.num_bytes, header.shape[0], [header.dtype.str, *header.shape[1:]]


def _text(row: list[object]) -> str:
    return f"{np.dtype(str(row[0])).name} {row[1:]}"


def _corrupt(shard: Shard, reason: str) -> CorruptSample:
    return CorruptSample(
        f"shard {shard.name} cannot be served: {reason}", {"shard": shard.name, "reason": reason}
    )
