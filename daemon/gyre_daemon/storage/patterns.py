"""Which files of a folder are shards: one pattern, or a brace list such as `*.{tar,tar.gz}`."""

import fnmatch

from gyre_daemon.storage.braces import expand

_MAX_PATTERNS = 64


def patterns_of(pattern: str) -> list[str]:
    """The patterns of a brace list."""
    return expand(pattern, _MAX_PATTERNS)


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
    return any(fnmatch.fnmatchcase(name, each) for each in patterns_of(pattern))
