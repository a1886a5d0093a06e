"""Which files of a folder are shards: one pattern, or a brace list such as `*.{tar,tar.gz}`."""

import fnmatch
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.braces import expand

Named = TypeVar("Named")

_MAX_PATTERNS = 64
_MAX_NAMED = 5  # files in a line of the log
# Files that are next to shards and hold no samples: hidden ones, those of systems that write tables
# (`_SUCCESS`, `_metadata`), checksums, indexes, and notes of libraries and people.
_BESIDE = (
    "{.*,_*,*.crc,*.idx,*.gyre-*,*.md,LICENSE*,README*,[Rr]eadme.*,*md5sum*,*sha[0-9]*sum*,MD5SUM*,"
    "SHA[0-9]*SUM*,checksums.*,index.json,state.json,dataset_dict.json,dataset_info.json,"
    "dataset_infos.json}"
)


@functools.lru_cache(64)  # asked for each file of a folder
def patterns_of(pattern: str) -> tuple[str, ...]:
    """The patterns of a brace list."""
    return tuple(expand(pattern, _MAX_PATTERNS))


def checked_glob(path: str) -> str:
    """The glob of a path, which means the same with every version of Python.

    Where it ends with `**` it names all files below a folder, as it does in object storages.

    Raises:
        ValueError: `**` is only a part of a path component, as in `a**b`.
    """
    components = path.split("/")
    if any("**" in each and each != "**" for each in components):
        raise ValueError("`**` can only be an entire path component")
    return f"{path}/*" if components[-1] == "**" else path


def matches_any(name: str, pattern: str) -> bool:
    """Whether a file name matches any of the patterns."""
    return _matcher(pattern).match(name) is not None


@functools.lru_cache(64)
def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns_of(pattern))))


def is_beside(name: str) -> bool:
    """Whether a file of this name is next to shards and is none."""
    return matches_any(name, _BESIDE)


def without_beside(
    folder: str, files: Sequence[Named], pattern: str, name_of: Callable[[Named], str]
) -> list[Named]:
    """The files of a folder without those that are next to shards; see `is_beside`.

    Hidden ones are left out silently, and one line of the log names others. All files stay if all
    of them are wanted.
    """
    if pattern == "*":
        return list(files)
    left = [name for name in map(name_of, files) if is_beside(name)]
    if shown := [name for name in left if not name.startswith(".")]:
        facts = {"path": folder, "num_files": len(shown), "names": ", ".join(shown[:_MAX_NAMED])}
        log_event("files next to the shards are passed over", facts, logging.WARNING)
    return [file for file in files if not is_beside(name_of(file))]
