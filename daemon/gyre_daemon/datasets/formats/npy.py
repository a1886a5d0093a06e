"""The header of an npy file, as far as a tensor can hold it (NEP 1). Nothing in it is ever executed, unpickled or allocated."""

import ast
import functools
import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

NPY_MAGIC = b"\x93NUMPY"
_PREFIXES = {
    NPY_MAGIC + b"\x01\x00": struct.Struct("<H"),
    NPY_MAGIC + b"\x02\x00": struct.Struct("<I"),
    NPY_MAGIC + b"\x03\x00": struct.Struct("<I"),  # as 2.0, with names in UTF-8, which no tensor has
}
_MAGIC_BYTES = 8
_TENSOR_TYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16)")
_USUAL_HEADER_BYTES = 128  # as numpy writes it
_MAX_HEADER_BYTES = 10_000
_MAX_DIMS = 32
_MAX_ARRAY_BYTES = 1 << 40


class NpyHeader(NamedTuple):
    """What an npy file declares.

    Attributes:
        dtype: of its elements.
        shape: of the array, in C order.
        num_bytes: of the header; the array follows.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    num_bytes: int


def parse_npy_header(data: bytes | memoryview) -> NpyHeader:
    """Read the header at the beginning of `data`.

    Raises:
        ValueError: no npy, an array of anything but numbers, in Fortran order, or of a size beyond reason.
    """
    length_format = _PREFIXES.get(bytes(data[:_MAGIC_BYTES]))
    if length_format is None:
        raise ValueError("it is no npy file of version 1.0, 2.0 or 3.0")
    begin = _MAGIC_BYTES + length_format.size
    length = length_format.unpack(data[_MAGIC_BYTES:begin])[0] if len(data) >= begin else _MAX_HEADER_BYTES + 1
    if length > _MAX_HEADER_BYTES or len(data) < begin + length:
        raise ValueError("the npy header is truncated or far too long")
    dtype, shape = _parse(bytes(data[begin : begin + length]))
    return NpyHeader(dtype, shape, begin + length)


def read_npy_header(read: Callable[[int], bytes]) -> NpyHeader:
    """As `parse_npy_header`, of a file that is read no further than its header: `read` gives the next bytes."""
    data = read(_USUAL_HEADER_BYTES)
    length_format = _PREFIXES.get(data[:_MAGIC_BYTES])
    if length_format and len(data) == _USUAL_HEADER_BYTES:
        num_bytes = _MAGIC_BYTES + length_format.size + length_format.unpack_from(data, _MAGIC_BYTES)[0]
        if len(data) < num_bytes <= _MAGIC_BYTES + length_format.size + _MAX_HEADER_BYTES:
            data += read(num_bytes - len(data))
    return parse_npy_header(data)


@functools.lru_cache(maxsize=4096)  # the headers of a dataset are all the same, or differ in one length
def _parse(text: bytes) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    try:
        fields = ast.literal_eval(text.decode("latin-1").strip())
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("the npy header is no Python literal") from error
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("the npy header lacks what it must have, or has more")
    descr, fortran_order, shape = fields["descr"], fields["fortran_order"], fields["shape"]
    if not isinstance(descr, str) or not _TENSOR_TYPE.fullmatch(descr):
        raise ValueError(f"an npy array of {descr!r:.100} is no tensor")
    if not _is_shape(shape):
        raise ValueError(f"the npy header declares an array of shape {shape!r:.200}")
    if fortran_order is not False and len(shape) > 1:
        raise ValueError("the npy array is in Fortran order; store it in C order")
    dtype = np.dtype(descr)
    if math.prod(shape) * dtype.itemsize > _MAX_ARRAY_BYTES:
        raise ValueError(f"the npy header declares an array of shape {shape!r:.200}")
    return dtype, shape


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMS:
        return False
    return all(type(size) is int and 0 <= size <= _MAX_ARRAY_BYTES for size in shape)
