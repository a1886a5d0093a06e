"""The class of a file: the name of a folder on the way to it."""

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.file_table import Texts

# The names of classes are part of a dataset's description, which is one message.
_MAX_CHARS = 1 << 20
_SLASH = ord("/")


def class_numbers(paths: Texts, *, is_last: bool) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """The names of all classes, sorted, and the class of each of n files.

    Args:
        paths: of the n files.
        is_last: whether the class is the folder of the file itself, and not the first folder of
            its path.

    Returns:
        The names, and int32 [n], an index into them.

    Raises:
        ConfigError: a file is in no folder, or the names are too many.
    """
    letters = np.frombuffer(paths.data, np.uint8)
    slashes = np.flatnonzero(letters == _SLASH)
    first = np.searchsorted(slashes, paths.ends[:-1])
    stop = np.searchsorted(slashes, paths.ends[1:])
    if (first == stop).any():
        path = paths[int(np.argmax(first == stop))].decode()
        raise ConfigError(
            f"the file {path} is in no folder, so it has no class; move it, or leave `class` out "
            'of `fields`: fields = ["file"]'
        )
    end = slashes[stop - 1] if is_last else slashes[first]
    begin = paths.ends[:-1].copy()
    if is_last:
        inner = stop - first > 1
        begin[inner] = slashes[stop[inner] - 2] + 1
    data = paths.data
    names: dict[bytes, int] = {}
    numbers = np.array(
        [
            names.setdefault(data[here:there], len(names))
            for here, there in zip(begin.tolist(), end.tolist(), strict=True)
        ],
        np.int32,
    )
    ordered = sorted(names)
    if sum(map(len, ordered)) > _MAX_CHARS:
        raise ConfigError(
            f"the files have {len(names)} classes, whose names are longer than {_MAX_CHARS} "
            'characters together. Leave `class` out of `fields`: fields = ["file", "path"].'
        )
    place = np.empty(len(names), np.int32)
    place[[names[name] for name in ordered]] = np.arange(len(names), dtype=np.int32)
    return tuple(name.decode() for name in ordered), place[numbers]
