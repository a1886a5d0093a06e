"""The storage formats: what the bytes of a dataset mean.

In: the names, sizes and bytes of shards. Out: a `SampleIndex`, which says where each sample lies
and which fields it has. Everything here is pure. `base` defines the interface and shows how to
write a format; `table` has the index that most formats need; each format is a package of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gyre_daemon.config import DatasetConfig, parse_options
from gyre_daemon.datasets.formats.arrow import ArrowFormat, ArrowOptions
from gyre_daemon.datasets.formats.base import (
    MASK,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    Extents,
    FieldSpec,
    Format,
    SampleIndex,
    indexed_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.delimited import CsvFormat, DelimitedOptions, TsvFormat
from gyre_daemon.datasets.formats.files import FilesFormat, FilesOptions
from gyre_daemon.datasets.formats.lines import JsonlFormat, LinesOptions, TextFormat
from gyre_daemon.datasets.formats.mds import MdsFormat, MdsOptions
from gyre_daemon.datasets.formats.parquet import ParquetFormat, ParquetOptions
from gyre_daemon.datasets.formats.rows import RowsFormat, RowsOptions
from gyre_daemon.datasets.formats.tfrecord import TfrecordFormat, TfrecordOptions
from gyre_daemon.datasets.formats.tokens import TokensFormat, TokensOptions
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions
from gyre_daemon.errors import ConfigError

__all__ = [
    "FORMATS",
    "MASK",
    "OFFSETS_SUFFIX",
    "SAMPLE_ID",
    "SINGLE_FILES",
    "Extents",
    "FieldSpec",
    "Format",
    "SampleIndex",
    "indexed_fields",
    "make_format",
    "stored_fields",
]


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A known format.

    Attributes:
        pattern: of the names of its shards.
        make: takes the keys of a dataset's configuration, and the place of the keys for error
            messages.
    """

    pattern: str
    make: Callable[[Mapping[str, Any], str], Format]


def _entry(format_class: type[Any], options: type[Any]) -> FormatEntry:
    return FormatEntry(
        format_class.pattern,
        lambda keys, where: format_class(parse_options(options, keys, where)),
    )


SINGLE_FILES = "files"  # the format of a folder whose files lie in folders
FORMATS: Mapping[str, FormatEntry] = {
    "tokens": _entry(TokensFormat, TokensOptions),
    "webdataset": _entry(WebdatasetFormat, WebdatasetOptions),
    "text": _entry(TextFormat, LinesOptions),
    "jsonl": _entry(JsonlFormat, LinesOptions),
    "csv": _entry(CsvFormat, DelimitedOptions),
    "tsv": _entry(TsvFormat, DelimitedOptions),
    "mds": _entry(MdsFormat, MdsOptions),
    "npy": _entry(RowsFormat, RowsOptions),
    "parquet": _entry(ParquetFormat, ParquetOptions),
    "tfrecord": _entry(TfrecordFormat, TfrecordOptions),
    "arrow": _entry(ArrowFormat, ArrowOptions),
    SINGLE_FILES: _entry(FilesFormat, FilesOptions),
}


def make_format(name: str, config: DatasetConfig) -> Format:
    """The format that a dataset's configuration names, with its options checked.

    Raises:
        ConfigError: the format or an option is unknown, or a value makes no sense.
    """
    entry = FORMATS.get(config.format)
    if entry is None:
        raise ConfigError(
            f"dataset `{name}` has the unknown format `{config.format}`; known are "
            f"{', '.join(FORMATS)}"
        )
    return entry.make(config.options, f"dataset `{name}` of format {config.format}")
