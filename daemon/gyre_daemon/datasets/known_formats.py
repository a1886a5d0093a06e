"""The formats of the daemon itself; how a dataset's configuration chooses one of all formats."""

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields

from gyre_daemon.config import DatasetConfig, check_keys
from gyre_daemon.datasets.formats import Format, FormatEntry, ListedFormat
from gyre_daemon.datasets.formats.base import AUDIO, IMAGES
from gyre_daemon.datasets.formats.installed import (
    included_formats,
    installed_format,
    installed_names,
    shown_format,
)
from gyre_daemon.errors import ConfigError

SINGLE_FILES = "files"  # the format of a folder with files in subfolders
# The module of each format, its class, its options, and the pattern of its class.
_FORMATS: Mapping[str, tuple[str, str, str, str]] = {
    "tokens": ("tokens", "TokensFormat", "TokensOptions", "*.bin"),
    "webdataset": ("webdataset", "WebdatasetFormat", "WebdatasetOptions", "*.{tar,tar.gz,tgz}"),
    "text": (
        "lines",
        "TextFormat",
        "LinesOptions",
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
    "parquet": ("parquet", "ParquetFormat", "ColumnOptions", "*.{parquet,parq}"),
    "tfrecord": (
        "tfrecord",
        "TfrecordFormat",
        "TfrecordOptions",
        "*.{tfrecord,tfrecords,tfrecord.gz,tfrecords.gz,tfrecord-*-of-*[0-9]}",
    ),
    "arrow": ("arrow", "ArrowFormat", "ColumnOptions", "*.{arrow,arrows,ipc,feather}"),
    "arrayrecord": (
        "arrayrecord",
        "ArrayRecordFormat",
        "ArrayRecordOptions",
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
