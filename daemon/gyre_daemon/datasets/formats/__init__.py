"""The storage formats: what the bytes of a dataset mean.

In: the names, sizes and bytes of shards. Out: a `SampleIndex`, which says where each sample lies
and which fields it has. Everything here is pure. `base` defines the interface and shows how to
write a format; `table` has the index that most formats need; each format is a package of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

from gyre_daemon.config import DatasetConfig, parse_options
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
from gyre_daemon.datasets.formats.delimited import DelimitedFormat, DelimitedOptions
from gyre_daemon.datasets.formats.lines import JsonlFormat, LinesOptions, TextFormat
from gyre_daemon.datasets.formats.mds import MdsFormat, MdsOptions
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
    "Extents",
    "FieldSpec",
    "Format",
    "SampleIndex",
    "indexed_fields",
    "make_format",
    "stored_fields",
]

# For each format a function that makes it from the keys of a dataset's configuration. The text
# names the place of the keys, for error messages.
FORMATS: Mapping[str, Callable[[Mapping[str, Any], str], Format]] = {
    "tokens": lambda keys, where: TokensFormat(parse_options(TokensOptions, keys, where)),
    "webdataset": lambda keys, where: WebdatasetFormat(
        parse_options(WebdatasetOptions, keys, where)
    ),
    "text": lambda keys, where: TextFormat(parse_options(LinesOptions, keys, where)),
    "jsonl": lambda keys, where: JsonlFormat(parse_options(LinesOptions, keys, where)),
    "csv": lambda keys, where: DelimitedFormat(
        parse_options(DelimitedOptions, keys, where), extension="csv", delimiter=","
    ),
    "tsv": lambda keys, where: DelimitedFormat(
        parse_options(DelimitedOptions, keys, where), extension="tsv", delimiter="\t"
    ),
    "mds": lambda keys, where: MdsFormat(parse_options(MdsOptions, keys, where)),
    "npy": lambda keys, where: RowsFormat(parse_options(RowsOptions, keys, where)),
    "tfrecord": lambda keys, where: TfrecordFormat(parse_options(TfrecordOptions, keys, where)),
}


def make_format(name: str, config: DatasetConfig) -> Format:
    """The format that a dataset's configuration names, with its options checked.

    Raises:
        ConfigError: the format or an option is unknown, or a value makes no sense.
    """
    make = FORMATS.get(config.format)
    if make is None:
        raise ConfigError(
            f"dataset `{name}` has the unknown format `{config.format}`; known are "
            f"{', '.join(FORMATS)}"
        )
    return make(config.options, f"dataset `{name}` of format {config.format}")
