"""Formats of other packages and of `gyre_media`: entry points of the group `gyre.formats`.

A name `MODULE:NAME` is a `FormatEntry` of any module, such as one next to a training script. A path
is the file of a class of that script, see `script_format`. Loading a format runs code of its
package. So it is loaded only when a dataset's configuration names it, and never to find out which
format some files have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gyre_daemon.config import parse_options
from gyre_daemon.datasets.formats.base import Arrays, Format, ListedFormat, Probe, Scan
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.plug_ins import entry_point, entry_points_of, included, load_script_object

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def _never(_head: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A known format.

    Attributes:
        pattern: of the names of its shards; empty if no name says that this is the format.
        make: takes the keys of a dataset's configuration, and the place of the keys for error
            messages.
        recognises: takes up to 512 first bytes of a file, and says whether only this format begins
            so. Never, if its files have no signature.
        keys: that `make` knows.
        ambiguous_pattern: of names that other files have, too; such files are shards only where
            a folder has none of the pattern.
    """

    pattern: str
    make: Callable[[Mapping[str, Any], str], Format | ListedFormat]
    recognises: Callable[[bytes], bool] = _never
    keys: frozenset[str] = frozenset()
    ambiguous_pattern: str = ""

    @classmethod
    def of(cls, format_class: type[Any], options: type[Any]) -> "FormatEntry":
        """The entry of a class of formats.

        Args:
            format_class: has a `pattern`, and is made from its options. It may have `recognises`
                and an `ambiguous_pattern`.
            options: a dataclass with the keys of a dataset, and their defaults.
        """
        return cls(
            format_class.pattern,
            lambda keys, where: format_class(parse_options(options, keys, where)),
            getattr(format_class, "recognises", _never),
            frozenset(each.name for each in fields(options)),
            getattr(format_class, "ambiguous_pattern", ""),
        )


GROUP = "gyre.formats"
_MEMBERS = ("pattern", "unpacks_gzip", "inspection", "assemble")


def included_formats() -> list[str]:
    """The names of the formats that `gyre_media` declares; none of them is loaded."""
    return sorted(included(GROUP))


def installed_names() -> list[str]:
    """The names of all formats that other packages declare; none of them is loaded."""
    return sorted({entry.name for entry in entry_points_of(GROUP)} - included(GROUP).keys())


def installed_format(name: str) -> FormatEntry | None:
    """The format of this name, `MODULE:NAME` or path; None if no package declares it.

    Raises:
        ConfigError: several packages declare it, or it cannot be loaded.
    """
    if name.startswith("/"):
        return script_format(name)
    if ":" in name:
        found = [entry_point(name, GROUP)]
    elif name in included(GROUP):
        found = [included(GROUP)[name]]
    else:
        found = entry_points_of(GROUP, name)
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


def shown_format(name: str) -> str:
    """The name of a format as clients see it: of a class of a script, that of the class."""
    return Path(name).name.partition("-")[0] if name.startswith("/") else name


def script_format(path: str) -> FormatEntry:
    """The format whose class a script has handed over.

    The class is made from its options, an instance of its dataclass `Options`; without one, of
    nothing. Findings of other code of it are not used again.

    Args:
        path: of the file; its name changes with the code.

    Raises:
        ConfigError: it cannot be loaded, or is no format.
    """
    try:
        format_class, _ = load_script_object(path)
    except Exception as error:
        raise ConfigError(
            f"format {shown_format(path)}: it cannot be loaded: {type(error).__name__}: "
            f"{error!s:.300}"
        ) from error
    missing = [name for name in _MEMBERS if not hasattr(format_class, name)]
    if missing:
        raise ConfigError(
            f"format {shown_format(path)}: the class has no `{missing[0]}`. Write the members of "
            "gyre_daemon.datasets.formats.base.Format"
        )

    def make(keys: Mapping[str, Any], where: str) -> Any:
        def inspection(self: Any) -> Scan | Probe | None:
            found: Scan | Probe | None = super(loaded, self).inspection  # type: ignore[arg-type]
            if found is None:
                return None
            version = f"{found.version} {Path(path).stem}"
            if isinstance(found, Probe):
                return replace(found, version=version)
            return replace(found, version=version, run=_RunOfScript(path, keys))

        loaded = type(format_class.__name__, (format_class,), {"inspection": property(inspection)})
        return FormatEntry.of(loaded, options).make(keys, where)

    options = getattr(format_class, "Options", _NoOptions)
    return replace(FormatEntry.of(format_class, options), make=make)


@dataclass(frozen=True)
class _NoOptions:
    """Of a format that takes none."""


@dataclass(frozen=True)
class _RunOfScript:
    """`Scan.run` of a script's format, whose class a process that scans has to load first."""

    path: str
    options: Mapping[str, Any]

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        format_class, _ = load_script_object(self.path)
        entry = FormatEntry.of(format_class, getattr(format_class, "Options", _NoOptions))
        inspection = getattr(entry.make(self.options, self.path), "inspection", None)
        if not isinstance(inspection, Scan):
            raise TypeError(f"format {shown_format(self.path)} scans no more")
        return inspection.run(shard, file)


def _package(entry: "EntryPoint") -> str:
    return entry.dist.name if entry.dist else entry.module
