"""Formats of other packages, which declare them as entry points of the group `gyre.formats`.

A name `MODULE:NAME` is a `FormatEntry` of any module, such as one next to a training script.
Loading a format runs code of its package. So it is loaded only when a dataset's configuration names
it, and never to find out which format some files have.
"""

from importlib.metadata import EntryPoint, entry_points

from gyre_daemon.datasets.formats.entry import FormatEntry
from gyre_daemon.errors import ConfigError

GROUP = "gyre.formats"


def installed_names() -> list[str]:
    """The names of all formats that other packages declare; none of them is loaded."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def installed_format(name: str) -> FormatEntry | None:
    """The format of this name, or `MODULE:NAME`; None if no package declares it.

    Raises:
        ConfigError: several packages declare it, or it cannot be loaded.
    """
    if ":" in name:
        found = [EntryPoint(name, name, GROUP)]
    else:
        found = list(entry_points(group=GROUP, name=name))
    if not found:
        return None
    packages = sorted({_package(entry) for entry in found})
    if len({entry.value for entry in found}) > 1:
        raise ConfigError(
            f"the format {name:.100} is declared by several packages: {', '.join(packages)}; "
            "uninstall all but one"
        )
    try:
        loaded = found[0].load()
    except Exception as error:
        raise ConfigError(
            f"the format {name:.100} of the package {packages[0]} cannot be loaded: "
            f"{type(error).__name__}: {error!s:.300}"
        ) from error
    if not isinstance(loaded, FormatEntry):
        raise ConfigError(
            f"the entry point {found[0].value} of the package {packages[0]} is no FormatEntry, "
            f"but {type(loaded).__name__}"
        )
    return loaded


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.module
