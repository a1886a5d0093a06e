"""From arrays of pyarrow to columns of bytes. Only processes that decode import it.

A missing value becomes zeros, no bytes where the field is ragged, or `null` of JSON.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from gyre_daemon.datasets.formats.base import FieldSpec
from gyre_daemon.datasets.formats.chunks import Column

_Bools = npt.NDArray[np.bool_]


def column_of(chunks: Sequence[Any], spec: FieldSpec) -> Column:
    """A column for arrays of pyarrow that follow each other.

    Raises:
        ValueError: a list has nulls among its elements.
    """
    parts = [_column(array, spec) for array in chunks]
    if len(parts) == 1:
        return parts[0]
    data = np.concatenate([np.empty(0, np.uint8), *(part.data for part in parts)])
    ends = None
    if spec.ragged:
        starts = np.cumsum([0, *(part.data.nbytes for part in parts)])
        shifted = [part.ends + start for part, start in zip(parts, starts, strict=False)]
        ends = np.concatenate([np.empty(0, np.int64), *shifted])
    present = None
    if any(part.present is not None for part in parts):
        pairs = zip(parts, chunks, strict=True)
        present = np.concatenate(
            [np.ones(len(its), np.bool_) if part.present is None else part.present
             for part, its in pairs]
        )  # fmt: skip
    return Column(data, ends, present)


def _column(array: Any, spec: FieldSpec) -> Column:
    if spec.codec == "json":
        return _documents(array)
    array = _plain(array)
    if types.is_struct(array.type):
        array = _plain(array.flatten()[array.type.get_field_index("bytes")])
    present = _valid(array)
    if not spec.ragged and (types.is_list(array.type) or types.is_large_list(array.type)):
        return Column(_nested(array, spec), None, present)
    if not spec.ragged:
        return Column(_as_bytes(_fixed(array)), None, present)
    if types.is_list(array.type) or types.is_large_list(array.type):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        values = _without_nulls(array.flatten())
        data = _as_bytes(_fixed(values))
        return Column(data, np.cumsum(lengths, dtype=np.int64) * spec.element_bytes, present)
    data, ends = _bytes(array, present)
    return Column(data, ends, present)


def _nested(array: Any, spec: FieldSpec) -> npt.NDArray[np.uint8]:
    """Arrays of one shape in lists of lists; zeros where one is missing.

    Raises:
        ValueError: one has another shape, or nulls.
    """
    is_there = np.asarray(array.is_valid())
    values = array.drop_null()
    for size in spec.shape:
        lengths = values.value_lengths().to_numpy(zero_copy_only=False)
        if (lengths != size).any():
            wrong = lengths[lengths != size][0]
            raise ValueError(f"a row has a list of {wrong} elements, and {size} are declared")
        values = _without_nulls(values.flatten())
        if not types.is_list(values.type) and not types.is_large_list(values.type):
            break
    flat = _as_bytes(_fixed(values)).reshape(len(values) and int(is_there.sum()), -1)
    found = np.zeros((len(array), spec.element_bytes), np.uint8)
    if len(flat):
        found[is_there] = flat
    return found.reshape(-1)


def _documents(array: Any) -> Column:
    """The values as JSON, `null` where one is missing."""
    documents = [json.dumps(value, separators=(",", ":")).encode() for value in array.to_pylist()]
    ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
    return Column(np.frombuffer(b"".join(documents), np.uint8), ends, _valid(array))


def _plain(array: Any) -> Any:
    """The same values without an extension type, a dictionary or views."""
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _valid(array: Any) -> _Bools | None:
    """Which values are there; None for all."""
    if not array.null_count:
        return None
    valid: _Bools = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _without_nulls(values: Any) -> Any:
    values = _plain(values)
    if values.null_count:
        raise ValueError("a list has nulls among its elements, which no tensor has")
    return values


def _bytes(
    array: Any, present: _Bools | None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The bytes of strings, and where each ends."""
    if not len(array):
        return np.empty(0, np.uint8), np.empty(0, np.int64)
    is_large = types.is_large_string(array.type) or types.is_large_binary(array.type)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    _, offsets, values = array.buffers()
    begin = array.offset * dtype.itemsize
    ends = np.frombuffer(offsets, dtype, len(array) + 1, begin).astype(np.int64)
    if present is not None and np.diff(ends)[~present].any():
        return _bytes(array.cast(pa.large_binary()).fill_null(b""), None)
    data = np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8)
    return data[ends[0] : ends[-1]], ends[1:] - ends[0]


def _fixed(array: Any) -> npt.NDArray[np.generic]:
    """The values of an array whose values have one size, `[n, ...]`."""
    array = _plain(array)
    valid = _valid(array)
    if types.is_fixed_size_list(array.type):
        flat = _fixed(_without_nulls(array.flatten()))
        some = flat.reshape(-1, array.type.list_size, *flat.shape[1:])
        if valid is None:
            return some
        values = np.zeros((len(array), *some.shape[1:]), some.dtype)
        values[valid] = some
        return values
    values = _primitive(array)
    if valid is not None:
        values = values.copy()
        values[~valid] = 0
    return values


def _primitive(array: Any) -> npt.NDArray[np.generic]:
    if types.is_boolean(array.type):
        bools: npt.NDArray[np.generic] = array.fill_null(False).to_numpy(zero_copy_only=False)
        return bools
    width = array.type.byte_width
    if not len(array):
        return np.empty((0, width), np.uint8)
    data = np.frombuffer(array.buffers()[1], np.uint8, len(array) * width, array.offset * width)
    return data.reshape(len(array), width)


def _as_bytes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
