"""The output of `gyred check-config`: the configuration in force, as TOML, with all origins.

It walks over the parsed values, so no key that the daemon reads can be missing.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from gyre_daemon.config.load import KEYS_OF_DATASETS, SCALAR_KEYS, EffectiveConfig
from gyre_daemon.config.schema import DatasetConfig
from gyre_daemon.config.tables import is_secret

_BARE = re.compile(r"[A-Za-z0-9_-]+")
# Fields of a dataset printed in another way than under their names.
_SPREAD = ("uri", "options", "storage", "mixture")


def rendered(effective: EffectiveConfig, redact: Callable[[str], str]) -> str:
    """The configuration in force.

    TOML with the meaning of all sources together. Secrets are left out; only their keys are shown.
    Keys that are not set and have no default stand in comments.

    Args:
        effective: from `load`.
        redact: takes credentials out of a URI.
    """
    config = effective.config
    lines = [
        f"{key} = {_toml(getattr(config, key))}  # {effective.origins[key]}" for key in SCALAR_KEYS
    ]
    given = effective.tables
    limits = given.get("limits", {})
    lines += _table("limits.user", config.limits.user, limits.get("user", {}))
    for pattern, each in config.limits.users.items():
        its = limits["users"][pattern]
        lines += _table(f"limits.users.{_key(pattern)}", each, its, "limits.user")
    for name in ("job_weights", "tokens"):
        if table := getattr(config, name):
            lines += _table(name, table, table)
    for name, dataset in sorted(config.datasets.items()):
        lines += _dataset(name, dataset, given, redact(dataset.uri))
    return "\n".join(lines)


def _dataset(
    name: str, dataset: DatasetConfig, given: Mapping[str, Any], uri: str
) -> Iterator[str]:
    """The table of a dataset or a mixture, then the tables in it."""
    kind = "mixtures" if dataset.mixture else "datasets"
    title, its = f"{kind}.{_key(name)}", given.get(kind, {}).get(name, {})
    values = {each.name: getattr(dataset, each.name) for each in fields(dataset)}
    values = {key: value for key, value in values.items() if key not in _SPREAD}
    if dataset.mixture:
        values = {key: values[key] for key in KEYS_OF_DATASETS} | {
            each.name: getattr(dataset.mixture, each.name) for each in fields(dataset.mixture)
        }
    else:
        values = {"uri": uri} | values
        values |= {key: _hidden(each, key) for key, each in dataset.options.items()}
    values["transforms"] = _hidden(dataset.transforms, "transforms")
    tables = {key: value for key, value in values.items() if is_dataclass(value)}
    yield from _table(title, {key: each for key, each in values.items() if key not in tables}, its)
    if dataset.storage:
        yield f"# storage = {{ {', '.join(sorted(map(_key, dataset.storage)))} }}, values not shown"
    for key, value in tables.items():
        yield from _table(f"{title}.{key}", value, its.get(key, {}))


def _table(title: str, table: Any, given: Any, otherwise: str = "default") -> Iterator[str]:
    """A table and its values.

    Args:
        title: as it stands in the file.
        table: a dataclass or a mapping.
        given: the file's table; has the keys that come from it.
        otherwise: where the others come from.
    """
    if is_dataclass(table):
        table = {each.name: getattr(table, each.name) for each in fields(table)}
    yield f"\n[{title}]"
    for key, value in table.items():
        origin = "file" if key in given else otherwise
        if value is None or (origin == "default" and value in ("", (), [], {})):
            yield f"# {_key(key)} is not set"
        else:
            yield f"{_key(key)} = {_toml(value)}  # {origin}"


def _hidden(value: Any, key: str) -> Any:
    """A value in which those under keys that name secrets are replaced."""
    if is_secret(key):
        return "***"
    if isinstance(value, Mapping):
        return {name: _hidden(each, name) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(each, "") for each in value]
    return value


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """Quoted; control characters are escaped, since a terminal would obey them."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in quoted)


def _toml(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return _text(value)
    return str(value).lower()  # of booleans
