"""The header of an npy file (NEP 1), for arrays of numbers.

Nothing in a header is executed, unpickled or allocated.
"""

import ast
import functools
import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

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
