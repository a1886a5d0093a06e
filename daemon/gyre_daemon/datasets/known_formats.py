"""The formats of the daemon itself; how a dataset's configuration chooses one of all formats."""

from collections.abc import Mapping
from dataclasses import fields

from gyre_daemon.config import DatasetConfig, check_keys
from gyre_daemon.datasets.formats import Format, FormatEntry, ListedFormat
from gyre_daemon.datasets.formats.arrayrecord import ArrayRecordFormat, ArrayRecordOptions
from gyre_daemon.datasets.formats.arrow import ArrowFormat
from gyre_daemon.datasets.formats.delimited import CsvFormat, DelimitedOptions, TsvFormat
from gyre_daemon.datasets.formats.files import FilesFormat, FilesOptions
from gyre_daemon.datasets.formats.installed import (
    included_formats,
    installed_format,
    installed_names,
    shown_format,
)
from gyre_daemon.datasets.formats.jsonl import JsonlFormat, JsonlOptions
from gyre_daemon.datasets.formats.lines import LinesOptions, TextFormat
from gyre_daemon.datasets.formats.mds import MdsFormat
from gyre_daemon.datasets.formats.npy import RowsFormat, RowsOptions
from gyre_daemon.datasets.formats.parquet import ParquetFormat
from gyre_daemon.datasets.formats.schemas import ColumnOptions, SchemaOptions
from gyre_daemon.datasets.formats.tfrecord import TfrecordFormat, TfrecordOptions
from gyre_daemon.datasets.formats.tokens import TokensFormat, TokensOptions
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions
from gyre_daemon.errors import ConfigError

SINGLE_FILES = "files"  # the format of a folder with files in subfolders
FORMATS: Mapping[str, FormatEntry] = {
    "tokens": FormatEntry.of(TokensFormat, TokensOptions),
    "webdataset": FormatEntry.of(WebdatasetFormat, WebdatasetOptions),
    "text": FormatEntry.of(TextFormat, LinesOptions),
    "jsonl": FormatEntry.of(JsonlFormat, JsonlOptions),
    "csv": FormatEntry.of(CsvFormat, DelimitedOptions),
    "tsv": FormatEntry.of(TsvFormat, DelimitedOptions),
    "mds": FormatEntry.of(MdsFormat, SchemaOptions),
    "npy": FormatEntry.of(RowsFormat, RowsOptions),
    "parquet": FormatEntry.of(ParquetFormat, ColumnOptions),
    "tfrecord": FormatEntry.of(TfrecordFormat, TfrecordOptions),
    "arrow": FormatEntry.of(ArrowFormat, ColumnOptions),
    "arrayrecord": FormatEntry.of(ArrayRecordFormat, ArrayRecordOptions),
    SINGLE_FILES: FormatEntry.of(FilesFormat, FilesOptions),
}


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
