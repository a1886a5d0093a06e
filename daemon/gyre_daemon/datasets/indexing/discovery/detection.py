"""Which format the files of a location have, by their names or their first bytes. Pure.

Names decide where they can, since they are what people choose on purpose; what the bytes say is
checked when the format inspects the shards.
"""

import glob
import itertools
from collections.abc import Mapping, Sequence

from gyre_daemon.datasets.formats import FORMATS
from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.storage.patterns import matches_any

# Files that lie beside shards and hold no samples.
_BESIDE = "{.*,_*,*.md,*.gyre-*,index.json,*.idx,LICENSE*,README*}"
HEAD_BYTES = 512  # a tar header; other signatures are shorter


def possible_shards(names: Sequence[str]) -> list[str]:
    """The files that may hold samples."""
    return [name for name in names if not matches_any(name, _BESIDE)]


def format_by_name(location: str, names: Sequence[str]) -> str | None:
    """The one format that the names of some of the files have; None if they have none.

    Args:
        location: for messages.
        names: of possible shards, without folders.

    Raises:
        InvalidRequest: several formats fit.
    """
    found = {
        name: its
        for name, entry in FORMATS.items()
        if (its := [shard for shard in names if matches_any(shard, entry.pattern)])
    }
    if len(found) > 1:
        each = ", ".join(f"{its[0]} ({name}, {len(its)} such)" for name, its in found.items())
        raise InvalidRequest(
            f"the files of {location} have several formats: {each}; say which one is meant, as "
            f"`format`, or name the files by a pattern"
        )
    return next(iter(found), None)


def format_by_head(location: str, num_files: int, heads: Mapping[str, bytes]) -> str:
    """The one format whose signature begins all of the files.

    Args:
        location: for messages.
        num_files: how many possible shards there are.
        heads: the first `HEAD_BYTES` of some of them, by name.

    Raises:
        ShardMissing: no known format begins so.
        InvalidRequest: they begin differently.
    """
    found = {
        shard: next((name for name, entry in FORMATS.items() if entry.recognises(head)), "")
        for shard, head in heads.items()
    }
    if not any(found.values()):
        looked_for = ", ".join(
            f"{entry.pattern} ({name})" for name, entry in FORMATS.items() if entry.pattern
        )
        others = f" It has {num_files} other files, such as {next(iter(heads))}." if heads else ""
        raise ShardMissing(
            f"no file of {location} has a name of a known format, or begins like one.{others} "
            f"Looked for {looked_for}; if the files are of one of these, say so as `format`, and "
            "name them by a pattern"
        )
    if len(set(found.values())) > 1:
        each = ", ".join(f"{shard} ({name or 'unknown'})" for shard, name in found.items())
        raise InvalidRequest(
            f"the files of {location} begin differently: {each}; say which are meant, by a pattern "
            "or a list"
        )
    return next(iter(found.values()))


def pattern_of(shards: Sequence[str]) -> str:
    """A pattern of the names of possible shards, for a format that was found by their bytes."""
    pairs = zip(min(shards), max(shards), strict=False)
    prefix = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return glob.escape(prefix) + "*" if prefix and "{" not in prefix else "[!._]*"
