"""Which files of a folder are shards: one pattern, or a brace list of several such as `*.{tar,tar.gz}`."""

import fnmatch

from gyre_daemon.storage.braces import expand

_MAX_PATTERNS = 16


def patterns_of(pattern: str) -> list[str]:
    """The single patterns."""
    return expand(pattern, _MAX_PATTERNS)


def matches_any(name: str, pattern: str) -> bool:
    """Whether a file of this name is meant."""
    return any(fnmatch.fnmatchcase(name, each) for each in patterns_of(pattern))
