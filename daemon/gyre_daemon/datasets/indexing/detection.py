"""Which format the files of a location have, by their names. Pure.

Names decide, since they are what people choose on purpose; what the bytes say is checked when the
format inspects the shards.
"""

from collections.abc import Sequence

from gyre_daemon.datasets.formats import FORMATS
from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.storage.patterns import matches_any

# Files that lie beside shards and hold no samples.
_BESIDE = "{.*,_*,*.md,*.gyre-*,index.json,*.idx,LICENSE*,README*}"


def detect_format(location: str, names: Sequence[str]) -> str:
    """The one format that some of the files have.

    Args:
        location: for messages.
        names: of all files there, without folders.

    Raises:
        ShardMissing: no file has the name of any known format.
        InvalidRequest: several formats fit.
    """
    shards = [name for name in names if not matches_any(name, _BESIDE)]
    found = {
        name: its
        for name, entry in FORMATS.items()
        if (its := [shard for shard in shards if matches_any(shard, entry.pattern)])
    }
    if len(found) == 1:
        return next(iter(found))
    if found:
        each = ", ".join(f"{its[0]} ({name}, {len(its)} such)" for name, its in found.items())
        raise InvalidRequest(
            f"the files of {location} have several formats: {each}; say which one is meant, as "
            f"`format`, or name the files by a pattern"
        )
    looked_for = ", ".join(f"{entry.pattern} ({name})" for name, entry in FORMATS.items())
    others = f" It has {len(shards)} other files, such as {shards[0]}." if shards else ""
    raise ShardMissing(
        f"no file of {location} has a name of a known format.{others} Looked for {looked_for}; if "
        "the files are of one of these, say so as `format`, and name them by a pattern"
    )
