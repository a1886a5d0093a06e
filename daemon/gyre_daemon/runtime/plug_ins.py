"""The plug-ins that come with the daemon, through the entry points that other packages use."""

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, distribution


@functools.cache
def included(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group in the daemon's own distribution, by name.

    They are enabled for everybody, and go before those of other packages. None is loaded.
    """
    return {entry.name: entry for entry in distribution("gyre-ml").entry_points.select(group=group)}
