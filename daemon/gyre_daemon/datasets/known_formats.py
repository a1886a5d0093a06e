"""All formats: the daemon's, those of other packages and of scripts; a configuration names one.

Formats of other packages and of `gyre_media` are entry points of the group `gyre.formats`. A name
`MODULE:NAME` is a `FormatEntry` of any module, such as one next to a training script. A path is the
file of a class of that script, see `script_format`. Loading a format runs code of its package. So
it is loaded only when a dataset's configuration names it, and never to find out which format some
files have.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from gyre_daemon.config import DatasetConfig, check_keys
from gyre_daemon.datasets.formats import Format, FormatEntry, ListedFormat
from gyre_daemon.datasets.formats.base import AUDIO, IMAGES, Arrays, NoOptions, Probe, Scan
from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.plug_ins import entry_point, entry_points_of, included, load_script_object

SINGLE_FILES = "files"  # the format of a folder with files in subfolders
# The module of each format, its class, its options, and the pattern of its class.
_FORMATS: Mapping[str, tuple[str, str, str, str]] = {
    "tokens": ("tokens", "TokensFormat", "TokensOptions", "*.bin"),
    "webdataset": ("webdataset", "WebdatasetFormat", "WebdatasetOptions", "*.{tar,tar.gz,tgz}"),
    "text": (
        "lines",
        "TextFormat",
        "NoOptions",
        "*.{txt,text,txt.gz,text.gz,txt.zst,text.zst}",
    ),
    "jsonl": (
        "jsonl",
        "JsonlFormat",
        "JsonlOptions",
        "*.{jsonl,ndjson,jsonl.gz,ndjson.gz,jsonl.zst,ndjson.zst,json.gz,json.zst}",
    ),
    "csv": ("delimited", "CsvFormat", "DelimitedOptions", "*.{csv,csv.gz}"),
    "tsv": ("delimited", "TsvFormat", "DelimitedOptions", "*.{tsv,tsv.gz}"),
    "mds": ("mds", "MdsFormat", "SchemaOptions", "*.{mds,mds.zst,mds.zstd}"),
    "npy": ("npy", "RowsFormat", "RowsOptions", "*.npy"),
    "parquet": ("columnar", "ParquetFormat", "ColumnOptions", "*.{parquet,parq}"),
    "tfrecord": (
        "tfrecord",
        "TfrecordFormat",
        "NoOptions",
        "*.{tfrecord,tfrecords,tfrecord.gz,tfrecords.gz,tfrecord-*-of-*[0-9]}",
    ),
    "arrow": ("columnar", "ArrowFormat", "ColumnOptions", "*.{arrow,arrows,ipc,feather}"),
    "arrayrecord": (
        "arrayrecord",
        "ArrayRecordFormat",
        "NoOptions",
        "*.{array_record,arrayrecord,riegeli,array_record-*-of-*[0-9]}",
    ),
    SINGLE_FILES: (
        "files",
        "FilesFormat",
        "FilesOptions",
        "*.{" + ",".join(f"{name},{name.upper()}" for name in IMAGES + AUDIO) + "}",
    ),
}
PATTERNS: Mapping[str, str] = {name: pattern for name, (*_, pattern) in _FORMATS.items()}


class _KnownFormats(Mapping[str, FormatEntry]):
    """The entries by name; a format is imported when its entry is asked for."""

    def __getitem__(self, name: str) -> FormatEntry:
        return _entry(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FORMATS)

    def __len__(self) -> int:
        return len(_FORMATS)


@functools.cache
def _entry(name: str) -> FormatEntry:
    module, format_class, options, _ = _FORMATS[name]
    imported = importlib.import_module(f"gyre_daemon.datasets.formats.{module}")
    return FormatEntry.of(getattr(imported, format_class), getattr(imported, options))


FORMATS: Mapping[str, FormatEntry] = _KnownFormats()


def make_format(name: str, config: DatasetConfig) -> Format | ListedFormat:
    """The format that a dataset's configuration names, with its options checked.

    Raises:
        ConfigError: the format or an option is unknown, or cannot be loaded, or a value makes no
            sense.
    """
    entry = FORMATS.get(config.format) or installed_format(config.format)
    if entry is None:
        raise ConfigError(
            f"dataset `{name}` has the unknown format `{config.format}`; known are "
            f"{', '.join([*FORMATS, *included_formats(), *installed_names()])}"
        )
    return entry.make(config.options, f"dataset `{name}` of format {shown_format(config.format)}")


def check_keys_of_any(name: str, config: DatasetConfig) -> None:
    """Refuse keys that no format has, of a dataset whose files will tell its format.

    Raises:
        ConfigError: names the key, and the nearest known one.
    """
    of_datasets = {each.name for each in fields(DatasetConfig)} - {"options", "mixture"}
    included = [its for each in included_formats() if (its := installed_format(each))]
    known = of_datasets.union(*(entry.keys for entry in (*FORMATS.values(), *included)))
    check_keys(config.options, sorted(known), f"dataset `{name}`")


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
        if not found[0].pattern.match(name):
            raise ConfigError(f"the format {name:.100} is no `MODULE:NAME` of a class; correct it")
    elif name in included(GROUP):
        found = [included(GROUP)[name]]
    else:
        found = entry_points_of(GROUP, name)
    if not found:
        return None
    packages = sorted({entry.dist.name if entry.dist else entry.module for entry in found})
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

    options = getattr(format_class, "Options", NoOptions)
    return replace(FormatEntry.of(format_class, options), make=make)


@dataclass(frozen=True)
class _RunOfScript:
    """`Scan.run` of a script's format, whose class a process that scans has to load first."""

    path: str
    options: Mapping[str, Any]

    def __call__(self, shard: str, file: BinaryIO) -> Arrays:
        format_class, _ = load_script_object(self.path)
        entry = FormatEntry.of(format_class, getattr(format_class, "Options", NoOptions))
        inspection = getattr(entry.make(self.options, self.path), "inspection", None)
        if not isinstance(inspection, Scan):
            raise TypeError(f"format {shown_format(self.path)} scans no more")
        return inspection.run(shard, file)
