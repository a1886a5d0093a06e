"""Checks a stored index of a tar shard: anybody who can write next to the shard may forge it.

An index that passes causes no error of the daemon: all numbers point into the shard,
and the tables fit each other. Whether the bytes there are those samples, only a scan can tell.
"""

from typing import Annotated

import msgspec
import numpy as np

from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.formats.npy import MAX_ARRAY_BYTES, MAX_DIMS, is_number_type
from gyre_daemon.datasets.formats.webdataset.scan import MAX_EXTENSIONS, MAX_META_BYTES, codec_of
from gyre_daemon.order.shuffle.permutation import Int64Array

_BLOCK_BYTES = 512
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _FirstHeader(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Count]


class _Meta(msgspec.Struct, forbid_unknown_fields=True):
    """The meta data that `scan_tar` returns."""

    extensions: list[str]
    npy: dict[str, _FirstHeader]
    names: str
    kinds: list[tuple[list[_Count], _Count, _Count, str]]
    arrays: list[tuple[str, str, _Count, _Count, str]]
    unsound: dict[str, tuple[_Count, str]]


_META = msgspec.json.Decoder(_Meta)  # made by one thread; see `sidecars.file`


def check_scan(scan: Arrays, file_bytes: int) -> None:
    """Refuse arrays that `scan_tar` cannot have returned for a shard of `file_bytes`.

    Raises:
        ValueError: names the problem.
    """
    meta = _read_meta(scan)
    start, size = array_of(scan, "start", np.int64), array_of(scan, "size", np.int64)
    extension = array_of(scan, "extension", np.int32)
    first = array_of(scan, "first", np.int64)
    num_members = len(start)
    _require(len(size) == len(extension) == num_members, "its members are not complete")
    _require(
        not ((size < 0) | (start < _BLOCK_BYTES) | (start > file_bytes - size)).any()
        and not (start[1:] < start[:-1] + size[:-1]).any(),
        "it points outside the shard, or twice to the same bytes",
    )
    _require(
        not ((extension < 0) | (extension >= len(meta.extensions))).any(),
        "it has a member without extension",
    )
    _require(
        len(first) > 0
        and first[0] == 0
        and first[-1] == num_members
        and not (np.diff(first) < 1).any(),
        "its samples do not divide its members",
    )
    _check_kinds(meta, extension, first)
    _check_arrays(scan, meta, size, extension)


def _read_meta(scan: Arrays) -> _Meta:
    text = array_of(scan, "meta", np.uint8)
    _require(len(text) <= MAX_META_BYTES, f"its meta data has {len(text)} bytes")
    try:
        meta = _META.decode(text.tobytes())
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("its meta data is damaged") from error
    names = meta.extensions
    _require(
        len(names) <= MAX_EXTENSIONS and len(set(names)) == len(names) and all(names),
        "its extensions are none",
    )
    return meta


def _check_kinds(meta: _Meta, extension: Int64Array, first: Int64Array) -> None:
    """Each sample has one of the sets of extensions, and none twice."""
    known = {frozenset(kind[0]) for kind in meta.kinds}
    _require(
        all(max(kind, default=0) < len(meta.extensions) for kind in known)
        and all(kind[1] < len(first) - 1 for kind in meta.kinds),
        "its sets of extensions are none",
    )
    lengths = np.diff(first)
    # sorting rows takes most of the time to load the index of a small shard: mostly all are alike
    are_alike = len(lengths) > 0 and (lengths == lengths[0]).all()
    for length in lengths[:1].tolist() if are_alike else np.unique(lengths).tolist():
        members = first[:-1][lengths == length][:, None] + np.arange(length)
        rows = np.sort(extension[members], axis=1)
        rows = rows[:1] if (rows == rows[:1]).all() else np.unique(rows, axis=0)
        sets = {frozenset(row) for row in rows.tolist()}
        _require(
            sets <= known and all(len(each) == length for each in sets),
            "its samples have other extensions than it says",
        )


def _check_arrays(scan: Arrays, meta: _Meta, size: Int64Array, extension: Int64Array) -> None:
    """The shapes are those of all sound npy members, and each array fits into its member."""
    array, dim, shape, itemsize = (
        array_of(scan, name, np.int64) for name in ("array", "dim", "shape", "itemsize")
    )
    names = meta.extensions
    if not (meta.arrays or any(codec_of(name) == "npy" for name in names)):
        # most shards; the checks below take most of the time to load the index of a small one
        _require(
            dim.tolist() == [0] and not len(array) and not len(shape) and not len(itemsize),
            "its arrays are not complete",
        )
        return
    numbers = [number for number, name in enumerate(names) if codec_of(name) == "npy"]
    sound = [number for number in numbers if names[number] not in meta.unsound]
    expected = np.flatnonzero(np.isin(extension, sound))
    found = array[np.isin(extension[array], sound)] if _is_inside(array, len(extension)) else None
    _require(found is not None and np.array_equal(found, expected), "its arrays are not complete")
    _require(len(itemsize) == len(array), "its arrays are not complete")
    num_dims = np.diff(dim)
    _require(
        len(dim) == len(array) + 1
        and dim[0] == 0
        and dim[-1] == len(shape)
        and not ((num_dims < 0) | (num_dims > MAX_DIMS)).any(),
        "its shapes do not divide into arrays",
    )
    _require(
        not ((shape < 0) | (shape > MAX_ARRAY_BYTES)).any()
        and not ((itemsize < 1) | (itemsize > 16)).any(),
        "its shapes are none",
    )
    _check_sizes(dim, shape, itemsize, size[array])
    kinds = {(kind[0], _itemsize(kind[1]), kind[2]) for kind in meta.arrays}
    rows = np.unique(np.stack((extension[array], itemsize, num_dims), axis=1), axis=0).tolist()
    _require(
        {(names[number], width, dims) for number, width, dims in rows} == kinds,
        "its arrays are of other types than it says",
    )


def _check_sizes(
    dim: Int64Array, shape: Int64Array, itemsize: Int64Array, size: Int64Array
) -> None:
    """Each array is smaller than its member."""
    # in floats, as the product of forged sizes overflows
    num_bytes = itemsize.astype(np.float64)
    for which in range(int(np.diff(dim).max(initial=0))):
        has = np.diff(dim) > which
        num_bytes[has] *= shape[dim[:-1][has] + which]
    _require(not (num_bytes > size).any(), "its arrays are larger than their members")


def _is_inside(array: Int64Array, num_members: int) -> bool:
    return not ((array < 0) | (array >= num_members)).any() and not (np.diff(array) < 1).any()


def _itemsize(dtype: str) -> int:
    _require(is_number_type(dtype), "it has an array of an unknown type")
    return np.dtype(dtype).itemsize


def _require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
