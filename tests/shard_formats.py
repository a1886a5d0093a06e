"""Formats by their names, with options, as a configuration makes them."""

from typing import Any

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import Format, ListedFormat
from gyre_daemon.datasets.known_formats import make_format


def shard_format(name: str, /, **options: Any) -> Format:
    """The format of this name."""
    made = make_format("set", DatasetConfig("/data", name, options))
    assert not isinstance(made, ListedFormat)
    return made
