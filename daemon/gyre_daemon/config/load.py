"""Reads a configuration: a TOML file, overridden by `GYRE_*` variables, then by flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from gyre_daemon.config.file import misspelt_variables, read_toml
from gyre_daemon.config.mixtures import check_sources, parse_mixture
from gyre_daemon.config.paths import dataset_from_folder, from_folder, scalars_from_folder
from gyre_daemon.config.schema import (
    DaemonConfig,
    DatasetConfig,
    JobLimits,
    LimitsConfig,
    PackConfig,
    Positive,
    Text,
    UserLimits,
)
from gyre_daemon.config.tables import build, check_keys, convert, converted
from gyre_daemon.errors import ConfigError

Origin = Literal["default", "file", "environment", "flag"]

ENVIRONMENT_PREFIX = "GYRE_"
_TABLES = ("datasets", "job_weights", "limits", "tokens")
_NO_KEYS = ("options", "mixture")  # of a dataset's table
SCALAR_KEYS = tuple(each.name for each in fields(DaemonConfig) if each.name not in _TABLES)


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A checked configuration.

    Attributes:
        config: the values.
        origins: where the value of each of SCALAR_KEYS comes from.
        tables: those of the file with other keys, as they stand there.
        warnings: advice to the operator about settings with which the daemon can still run.
    """

    config: DaemonConfig
    origins: Mapping[str, Origin]
    tables: Mapping[str, Any] = field(default_factory=dict, repr=False)
    warnings: Sequence[str] = ()


def load(
    path: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> EffectiveConfig:
    """Merge defaults, file, environment and flags; each overrides those before it.

    Args:
        path: a TOML file; None for none. Relative paths in it count from its folder.
        environment: `GYRE_<KEY>` sets the scalar key of that name; lists are comma-separated.
        flags: values by key; None means not given.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has the wrong type.
    """
    table, warnings = read_toml(path) if path else ({}, [])
    tables = {key: table[key] for key in (*_TABLES, "mixtures") if key in table}
    datasets = convert(table.pop("datasets", {}), dict[str, Any], "datasets")
    mixtures = convert(table.pop("mixtures", {}), dict[str, Any], "mixtures")
    weights = convert(table.pop("job_weights", {}), dict[str, Any], "job_weights")
    limits = parse_limits(table.pop("limits", {}))
    tokens = convert(table.pop("tokens", {}), dict[str, Any], "tokens")
    variables = {key: ENVIRONMENT_PREFIX + key.upper() for key in SCALAR_KEYS}
    set_by: list[tuple[Origin, dict[str, Any], dict[str, str]]] = [
        ("file", table, {key: f"{key} in {path}" for key in table}),
        (
            "environment",
            {key: environment[name] for key, name in variables.items() if name in environment},
            variables,
        ),
        (
            "flag",
            {key: value for key, value in flags.items() if value is not None},
            {key: "--" + key.replace("_", "-") for key in flags},
        ),
    ]
    folder = path.absolute().parent if path else Path()
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(SCALAR_KEYS, "default")
    for origin, given, names in set_by:
        found = converted(DaemonConfig, given, str(path), names)
        values |= scalars_from_folder(folder, found) if origin == "file" else found
        origins |= dict.fromkeys(given, origin)
    config = DaemonConfig(
        **values,
        datasets=_parse_datasets(folder, datasets, mixtures),
        job_weights={
            pattern: convert(value, Positive, f"job_weights.{pattern}")
            for pattern, value in weights.items()
        },
        limits=limits,
        tokens={
            name: from_folder(folder, convert(file, Text, f"tokens.{name}"))
            for name, file in tokens.items()
        },
    )
    warnings += misspelt_variables(environment, list(variables.values()))
    return EffectiveConfig(config, origins, tables, warnings)


def _parse_datasets(
    folder: Path, datasets: Mapping[str, Any], mixtures: Mapping[str, Any]
) -> dict[str, DatasetConfig]:
    both = sorted(datasets.keys() & mixtures.keys())
    if both:
        raise ConfigError(f"`{both[0]}` is the name of a dataset and of a mixture; rename one")
    parsed = {
        name: dataset_from_folder(folder, parse_dataset(name, entry))
        for name, entry in datasets.items()
    }
    parsed |= {name: parse_mixture(name, entry) for name, entry in mixtures.items()}
    check_sources(parsed)
    return parsed


def parse_dataset(name: str, table: object) -> DatasetConfig:
    """Check the keys that all datasets share; its format checks the rest when it is opened.

    Raises:
        ConfigError: `uri` is missing, `uri` or `format` is not text, or `storage` is not a table;
            or as `parse_pack`.
    """
    where = f"datasets.{name}"
    rest = dict(convert(table, dict[str, Any], where))
    if rest.get("allow") in ([], ""):
        raise ConfigError(
            f"{where}.allow is empty; name who may read the dataset, or leave the key out for the "
            "daemon's own user and group"
        )
    keys = [each.name for each in fields(DatasetConfig) if each.name not in _NO_KEYS]
    common = {key: rest.pop(key) for key in keys if key in rest}
    packing = common.pop("pack", None)
    config = build(DatasetConfig, common | {"options": rest}, where)
    if packing is None:
        return config
    return replace(config, pack=parse_pack(packing, f"{where}.pack"))


def parse_pack(table: object, where: str) -> PackConfig:
    """Check how documents are packed.

    Raises:
        ConfigError: a key is unknown or missing, or a value is out of range.
    """
    keys = convert(table, dict[str, Any], where)
    if isinstance(lengths := keys.get("length"), list):
        raise ConfigError(
            f"{where}.length is {lengths!r:.100}: all sequences have one length. Give that, such "
            "as 8192."
        )
    return build(PackConfig, keys, where)


def parse_limits(table: object) -> LimitsConfig:
    """Check the table `limits`.

    Raises:
        ConfigError: a key is unknown, or a value is out of range.
    """
    tables = _converted_tables(table)
    user = build(UserLimits, tables.get("user", {}), "limits.user")
    job = build(JobLimits, tables.get("job", {}), "limits.job")
    users = {}
    for pattern, entry in tables.get("users", {}).items():
        where = f"limits.users.{pattern}"
        given = convert(entry, dict[str, Any], where)
        names = {key: f"{where}.{key}" for key in given}
        users[pattern] = replace(user, **converted(UserLimits, given, where, names))
    return LimitsConfig(user, job, users)


def _converted_tables(table: object) -> dict[str, dict[str, Any]]:
    names = {each.name: f"limits.{each.name}" for each in fields(LimitsConfig)}
    given = convert(table, dict[str, Any], "limits")
    check_keys(given, names, "limits")
    return {key: convert(value, dict[str, Any], names[key]) for key, value in given.items()}
