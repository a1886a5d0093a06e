"""Makes dataclasses of tables: values of the annotated types, or an error that names the key."""

import difflib
import typing
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

import msgspec

from gyre_daemon.config.secrets import shown
from gyre_daemon.config.sizes import parse_size
from gyre_daemon.errors import ConfigError

Options = TypeVar("Options")


def parse_options(cls: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """Build a frozen dataclass of options from a TOML table.

    Args:
        cls: a dataclass; its annotations may carry msgspec's `Meta`.
        table: values by key, as TOML or text gives them.
        where: the table in words, for the error.

    Raises:
        ConfigError: names the key, and the nearest known one where it is unknown.
    """
    return _built(cls, table, where, {key: f"{key} in {where}" for key in table})


def build(cls: type[Options], table: Mapping[str, Any], where: str) -> Options:
    """As `parse_options`, for a table of the configuration; errors call its keys `where.key`."""
    return _built(cls, table, where, {key: f"{where}.{key}" for key in table})


def _built(
    cls: type[Options], table: Mapping[str, Any], where: str, names: Mapping[str, str]
) -> Options:
    values = converted(cls, table, where, names)
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name not in values and each.default is each.default_factory:  # both are MISSING
            raise ConfigError(f"`{each.name}` is missing in {where}")
    return cls(**values)


def converted(
    cls: type[Any], table: Mapping[str, Any], where: str, names: Mapping[str, str]
) -> dict[str, Any]:
    """A table's values in the types that the dataclass annotates; errors use the keys' `names`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    check_keys(table, [each.name for each in fields(cls)], where)
    return {key: convert(value, hints[key], names[key]) for key, value in table.items()}


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise ConfigError for an unknown key, with the nearest one."""
    for key in table.keys() - set(known):
        close = difflib.get_close_matches(key, known, n=1)
        advice = f"did you mean `{close[0]}`?" if close else f"known are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown key `{key}` in {where}; {advice}")


def convert(value: Any, hint: Any, name: str) -> Any:
    """A value in the annotated type; text is parsed, since the environment holds nothing else."""
    if isinstance(value, str) and typing.get_origin(hint) is tuple:
        value = [part.strip() for part in value.split(",")]
    try:
        return msgspec.convert(value, hint, strict=False, dec_hook=lambda _, size: parse_size(size))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} is {shown(value, name)}: {_explain(error, hint)}") from error


def _explain(error: msgspec.ValidationError, hint: Any) -> str:
    """The expected value, with TOML's names for lists and tables."""
    if typing.get_origin(hint) is Literal:
        return f"expected one of {', '.join(typing.get_args(hint))}"
    text = str(error).partition(", got ")[0].partition(" - at ")[0]
    text = text.replace("`array`", "a list").replace("`object`", "a table")
    return text[0].lower() + text[1:]
