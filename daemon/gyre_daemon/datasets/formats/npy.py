"""The format `npy`: every row of an array is one sample; and the header of an npy file (NEP 1).

In: npy files as numpy writes them, with arrays of numbers. Out: the place of each row; rows of all
files have one shape. Nothing in a header is executed, unpickled or allocated.
"""

import ast
import functools
import json
import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gyre_daemon.datasets.formats.base import (
    Arrays,
    FieldSpec,
    Probe,
    ProbeSteps,
    array_of,
    check_names,
    json_of,
    probe_heads,
    require,
)
from gyre_daemon.datasets.formats.sample_table import StridedIndex, common_schema
from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard

NPY_MAGIC = b"\x93NUMPY"
_LENGTH_FORMATS = {
    NPY_MAGIC + b"\x01\x00": struct.Struct("<H"),
    NPY_MAGIC + b"\x02\x00": struct.Struct("<I"),
    NPY_MAGIC + b"\x03\x00": struct.Struct("<I"),  # as 2.0, with field names in UTF-8
}
_MAGIC_BYTES = 8
_NUMBER_TYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)")
_USUAL_HEADER_BYTES = 128  # of numpy's files
# Limits on the claims of a damaged or hostile header. They bound the memory of the parser, and
# keep the product of a shape within int64.
_MAX_HEADER_BYTES = 10_000
MAX_DIMS = 32
MAX_ARRAY_BYTES = 1 << 40


class NpyHeader(NamedTuple):
    """The declarations of an npy file.

    Attributes:
        dtype: of the elements.
        shape: of the array, in C order.
        num_bytes: length of the header; the array follows.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    num_bytes: int


def parse_npy_header(data: bytes | memoryview) -> NpyHeader:
    """Parse the header at the beginning of `data`.

    Raises:
        ValueError: `data` is no npy file, or its array is not of numbers, is in Fortran order, or
            is larger than any real one.
    """
    length_format = _LENGTH_FORMATS.get(bytes(data[:_MAGIC_BYTES]))
    if length_format is None:
        raise ValueError("it is no npy file of version 1.0, 2.0 or 3.0")
    begin = _MAGIC_BYTES + length_format.size
    length = _MAX_HEADER_BYTES + 1
    if len(data) >= begin:
        (length,) = length_format.unpack(data[_MAGIC_BYTES:begin])
    if length > _MAX_HEADER_BYTES or len(data) < begin + length:
        raise ValueError("the npy header is truncated or far too long")
    dtype, shape = _parse(bytes(data[begin : begin + length]).strip())
    return NpyHeader(dtype, shape, begin + length)


def read_npy_header(read: Callable[[int], bytes]) -> NpyHeader:
    """As `parse_npy_header`, reading no further than the header.

    Args:
        read: returns the next bytes of the file, as many as it is asked for.
    """
    data = read(_USUAL_HEADER_BYTES)
    length_format = _LENGTH_FORMATS.get(data[:_MAGIC_BYTES])
    if length_format and len(data) == _USUAL_HEADER_BYTES:
        begin = _MAGIC_BYTES + length_format.size
        num_bytes = begin + length_format.unpack_from(data, _MAGIC_BYTES)[0]
        if len(data) < num_bytes <= begin + _MAX_HEADER_BYTES:
            data += read(num_bytes - len(data))
    return parse_npy_header(data)


# The headers of a dataset are all the same, or differ in one length.
@functools.lru_cache(maxsize=4096)
def _parse(text: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    try:
        fields = ast.literal_eval(text.decode("latin-1"))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("the npy header is no Python literal") from error
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("the npy header must have the keys descr, fortran_order and shape")
    descr, fortran_order, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    if not isinstance(descr, str) or not is_number_type(descr):
        raise ValueError(f"an npy array of {descr!r:.100} is no tensor")
    if not is_shape(shape):
        raise ValueError(f"the npy header declares an array of shape {shape!r:.200}")
    if fortran_order is not False and len(shape) > 1:
        raise ValueError("the npy array is in Fortran order; store it in C order")
    dtype = np.dtype(descr)
    if math.prod(shape) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise ValueError(f"the npy header declares an array of shape {shape!r:.200}")
    return dtype, shape


def is_number_type(descr: str) -> bool:
    """Whether this is the type of an array of numbers, as an npy header has it."""
    return _NUMBER_TYPE.fullmatch(descr) is not None


def is_shape(shape: Any) -> bool:
    """Whether this is a shape, as an npy header has it."""
    if not isinstance(shape, tuple) or len(shape) > MAX_DIMS:
        return False
    return all(type(size) is int and 0 <= size <= MAX_ARRAY_BYTES for size in shape)


# More than any accepted header; `parse_npy_header` needs to see all of it.
_HEAD_BYTES = 10_240
_ROW = msgspec.json.Decoder(list[Any])


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
        return Probe("npy-rows/1", _probe, _check)

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> StridedIndex:
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
    headers = yield from probe_heads(shards, _HEAD_BYTES, _read_header)
    starts, counts, rows = zip(*headers, strict=True)
    row = common_schema(shards, rows, _described)
    return {
        "start": np.array(starts, np.int64),
        "count": np.array(counts, np.int64),
        "row": np.frombuffer(json.dumps(row).encode(), np.uint8),
    }


def _check(arrays: Arrays, shards: Sequence[Shard]) -> None:
    """See `Probe.check`."""
    start, count = (array_of(arrays, name, np.int64) for name in ("start", "count"))
    row = json_of(arrays, "row", _ROW, "its rows have no dtype")
    require(row and isinstance(row[0], str), "its rows have no dtype")
    are_numbers = is_number_type(row[0]) and is_shape(tuple(row[1:]))
    require(are_numbers, "its rows are no arrays of numbers")
    row_bytes = math.prod(row[1:]) * np.dtype(row[0]).itemsize
    sizes = np.array([shard.size_bytes for shard in shards], np.int64)
    are_theirs = start.shape == sizes.shape == count.shape and row_bytes
    require(are_theirs, "it does not describe these shards")
    is_inside = (start >= 0) & (count >= 0) & (count <= sizes // row_bytes)
    is_inside &= start + count * row_bytes == sizes
    require(is_inside.all(), "its rows point outside the shards")


def _read_header(shard: Shard, head: bytes, _file_bytes: int) -> tuple[int, int, list[object]]:
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


def _described(row: list[object]) -> str:
    return f"rows of {np.dtype(str(row[0])).name} {row[1:]}"


def _corrupt(shard: Shard, reason: str) -> CorruptSample:
    return CorruptSample(
        f"shard {shard.name} cannot be served: {reason}", {"shard": shard.name, "reason": reason}
    )
