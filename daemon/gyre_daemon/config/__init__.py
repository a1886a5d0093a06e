"""The daemon's configuration: a TOML file, overridden by `GYRE_*` variables, then by flags.

In: a file, the environment, flags. Out: a `DaemonConfig` that was checked before anything starts,
or a `ConfigError` that names the key. Imported by whatever has settings.
"""

from gyre_daemon.config.load import (
    SCALAR_KEYS,
    load,
    mixture_height,
    parse_dataset,
    parse_limits,
    parse_pack,
)
from gyre_daemon.config.schema import (
    MAX_PREFETCH_BATCHES,
    DaemonConfig,
    DatasetConfig,
    LimitsConfig,
    MixtureConfig,
    PackConfig,
    Size,
    UserLimits,
    check_keys,
    parse_options,
    parse_size,
)

__all__ = [
    "MAX_PREFETCH_BATCHES",
    "SCALAR_KEYS",
    "DaemonConfig",
    "DatasetConfig",
    "LimitsConfig",
    "MixtureConfig",
    "PackConfig",
    "Size",
    "UserLimits",
    "check_keys",
    "load",
    "mixture_height",
    "parse_dataset",
    "parse_limits",
    "parse_options",
    "parse_pack",
    "parse_size",
]
