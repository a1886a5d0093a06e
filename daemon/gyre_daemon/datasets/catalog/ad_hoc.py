"""The names of datasets that clients define."""

import json
import os

from gyre_daemon.config import DatasetConfig


def name_of(config: DatasetConfig) -> str:
    """A name, equal for definitions of one dataset, whatever is done to its samples then."""
    # A URI may have a glob, which pathlib does not resolve.
    uri = config.uri if "://" in config.uri else os.path.abspath(config.uri)  # noqa: PTH100
    options = json.dumps(
        [
            config.format,
            dict(config.options),
            dict(config.storage),
            config.follow_links,
            dict(config.rename),
            dict(config.cast),
            config.on_corrupt,
            config.max_corrupt,
            config.append,
            config.filter,
        ],
        sort_keys=True,
        default=str,
    )
    return f"{uri} {options}"
