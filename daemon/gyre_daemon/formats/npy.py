"""The header of an npy file, as far as a tensor can hold it. Pickled objects are refused before anything is allocated."""

import io
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy_format

_KINDS = "biufc"
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
        ValueError: no npy, an array of objects, in Fortran order, or of a size beyond reason.
    """
    stream = io.BytesIO(data)
    version = npy_format.read_magic(stream)
    reader = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(version)
    if reader is None:
        raise ValueError(f"npy version {version} is not known")
    shape, fortran_order, dtype = reader(stream)
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise ValueError(f"an npy array of {dtype} is no tensor")
    if fortran_order and len(shape) > 1:
        raise ValueError("the npy array is in Fortran order; store it in C order")
    if np.prod(shape, dtype=object) * dtype.itemsize > _MAX_ARRAY_BYTES:
        raise ValueError(f"the npy header declares an array of shape {shape}")
    return NpyHeader(dtype, shape, stream.tell())
