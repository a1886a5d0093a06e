"""Checks of arrays that were stored, which may be forged: could an inspection have found them?"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import Arrays, array_of


def check_extents(arrays: Arrays, file_bytes: int) -> None:
    """Check that `start` and `size` are n ranges of a file, in its order.

    Raises:
        ValueError: they are not.
    """
    check_ranges(
        array_of(arrays, "start", np.int64), array_of(arrays, "size", np.int64), file_bytes
    )


def check_columns(arrays: Arrays, file_bytes: int, num_columns: int) -> None:
    """Check that `start` and `size` are n rows of ranges of a file, a column each, in its order.

    Raises:
        ValueError: they are not.
    """
    start, size = (array_of(arrays, name, np.int64, 2) for name in ("start", "size"))
    if start.shape != size.shape or (len(start) and start.shape[1] != num_columns):
        raise ValueError("its ranges are not those of its columns")
    check_ranges(start.ravel(), size.ravel(), file_bytes)


def check_ranges(
    start: npt.NDArray[np.int64], size: npt.NDArray[np.int64], file_bytes: int
) -> None:
    """Check that ranges are within a file, one after the other.

    Raises:
        ValueError: they do not.
    """
    if start.shape != size.shape:
        raise ValueError("it has other numbers of starts and sizes")
    if not len(start):
        return
    is_inside = start.min() >= 0 and size.min() >= 0 and max(start.max(), size.max()) <= file_bytes
    if (
        not is_inside
        or start[-1] + size[-1] > file_bytes
        or (start[:-1] + size[:-1] > start[1:]).any()
    ):
        raise ValueError("its ranges are not in sequence")


def json_of(arrays: Arrays, name: str) -> Any:
    """A small JSON document among the arrays.

    Raises:
        ValueError: there is no such document.
    """
    text = array_of(arrays, name, np.uint8)
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"its array `{name}` is too long")
    try:
        return json.loads(text.tobytes())
    except RecursionError as error:
        raise ValueError(f"its array `{name}` is nested too deeply") from error


_MAX_JSON_BYTES = 4 << 20
