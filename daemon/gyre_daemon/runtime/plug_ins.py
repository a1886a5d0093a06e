"""Code from elsewhere: plug-ins that come with the daemon, and functions of a training script.

Only that client can write into the private daemon's folder, and a shared daemon takes no such path
from a client.
"""

import functools
import hashlib
import linecache
import pickle
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@functools.cache
def included(group: str) -> "Mapping[str, EntryPoint]":
    """The entry points of a group in the daemon's own distribution, by name.

    They are enabled for everybody, and go before those of other packages. None is loaded.
    """
    # most daemons need none of its imports, 10 ms
    from importlib.metadata import distribution  # noqa: PLC0415

    return {entry.name: entry for entry in distribution("gyre-ml").entry_points.select(group=group)}


def entry_points_of(group: str, name: str = "") -> "list[EntryPoint]":
    """The entry points of a group in all distributions; those of one name, if it is given."""
    from importlib.metadata import entry_points  # noqa: PLC0415  # see `included`

    return [each for each in entry_points(group=group) if name in ("", each.name)]


def entry_point(target: str, group: str) -> "EntryPoint":
    """That of a class which no distribution declares; `MODULE:NAME` is its name, too."""
    from importlib.metadata import EntryPoint  # noqa: PLC0415  # see `included`

    return EntryPoint(target, target, group)


class Origin(TypedDict):
    """The first of two pickles in a file; the second is the function or class.

    Attributes:
        path: `sys.path` of the script, for modules next to it.
        lines: the sources of functions, for errors; by file and number of the first line.
        modules: a digest of the source of each module that it names, by file.
    """

    path: list[str]
    lines: dict[str, tuple[int, list[str]]]
    modules: dict[str, str]


_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
# Modules of scripts that were imported here: the file of each, and when it was changed last.
_of_scripts: dict[str, tuple[str, float]] = {}


@functools.lru_cache(maxsize=16)
def load_script_object(path: str) -> tuple[Any, dict[str, tuple[int, list[str]]]]:
    """The function or class of a file, and the lines of `Origin`.

    A file never changes, and is loaded once in a process. It may have more than 1 GB, of which no
    second copy is made: a worker's memory is limited. Modules that were edited since they were
    imported for another file, as for a notebook, are imported again.

    Raises:
        Exception: whatever reading the file or importing the script's modules raises.
    """
    with Path(path).open("rb") as file:
        origin: Origin = pickle.load(file)
        sys.path += [each for each in origin["path"] if each not in sys.path]
        if any(_changed_at(source) != then for source, then in _of_scripts.values()):
            for name in _of_scripts:
                sys.modules.pop(name, None)
            _of_scripts.clear()
        known = set(sys.modules)
        found = pickle.load(file)
    for source, digest in origin["modules"].items():
        linecache.checkcache(source)
        text = "".join(linecache.getlines(source)).encode("utf-8", "surrogateescape")
        if hashlib.blake2b(text).hexdigest() != digest:
            raise RuntimeError(
                f"{source} was edited while the job runs, and a new worker would run other code "
                "than those before. Start the job again, or restore the file"
            )
    for name in sys.modules.keys() - known:
        source = getattr(sys.modules[name], "__file__", None) or ""
        if source.endswith(".py") and not source.startswith(_INSTALLED):
            _of_scripts[name] = source, _changed_at(source)
    return found, origin["lines"]


def _changed_at(source: str) -> float:
    try:
        return Path(source).stat().st_mtime
    except OSError:
        return 0.0
