"""What the bytes of a dataset mean: where each sample lies and of which fields it consists. Pure: bytes in, arrays out.

A `Format` scans a shard once, if it must, and assembles the scans of all shards to a `SampleIndex`: the only thing that the
rest of the daemon knows of it.
"""

from gyre_daemon.config import DatasetConfig, parse_options
from gyre_daemon.datasets.formats.base import (
    MASK,
    OFFSETS_SUFFIX,
    SAMPLE_ID,
    Extents,
    FieldSpec,
    Format,
    Found,
    Probe,
    SampleIndex,
    Wanted,
    known_fields,
    stored_fields,
)
from gyre_daemon.datasets.formats.tokens import TokensFormat, TokensOptions
from gyre_daemon.datasets.formats.webdataset import WebdatasetFormat, WebdatasetOptions
from gyre_daemon.errors import ConfigError

__all__ = [
    "MASK",
    "OFFSETS_SUFFIX",
    "SAMPLE_ID",
    "Extents",
    "FieldSpec",
    "Format",
    "Found",
    "Probe",
    "SampleIndex",
    "Wanted",
    "known_fields",
    "make_format",
    "stored_fields",
]


def make_format(name: str, config: DatasetConfig) -> Format:
    """The format that a dataset's configuration names, with its options checked.

    Raises:
        ConfigError: an unknown format, an unknown option, or a value that makes no sense.
    """
    where = f"dataset `{name}` of format {config.format}"
    match config.format:
        case "tokens":
            return TokensFormat(parse_options(TokensOptions, config.options, where))
        case "webdataset":
            return WebdatasetFormat(parse_options(WebdatasetOptions, config.options, where))
    raise ConfigError(f"dataset `{name}` has the unknown format `{config.format}`; known are tokens, webdataset")
