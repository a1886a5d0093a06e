"""Frozen dataclasses from TOML tables: every key is known, every value has its field's type."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from gyre_trainer.errors import ConfigError

Section = TypeVar("Section")


def build(cls: type[Section], table: Mapping[str, Any], where: str) -> Section:
    """The dataclass `cls` with the values of `table`; absent keys keep their defaults.

    Args:
        cls: its fields are bool, int, float, str, Literal of str, tuples of numbers, free tables,
            or such dataclasses.
        table: as TOML gives it; a field that is a dataclass takes a table.
        where: the dotted name of the table for errors; "" for the whole file.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named) or missing, a value has the
            wrong type, or the dataclass itself refused the values.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in table:
        if key not in fields:
            raise ConfigError(f"unknown key `{_join(where, key)}`{nearest(key, list(fields))}")
    for name, field in fields.items():
        if _is_required(field) and name not in table:
            raise ConfigError(f"`{_join(where, name)}` is missing")
    values = {key: _convert(value, hints[key], _join(where, key)) for key, value in table.items()}
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"[{where}]: {error}") from error


def nearest(key: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown key: the nearest key, or all known ones."""
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; known are {', '.join(sorted(known))}"


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ConfigError(f"`{where}` must be a table: [{where}]")
        return build(hint, value, where)
    if typing.get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise ConfigError(f"`{where}` must be a table: [{where}]")
        return value
    if typing.get_origin(hint) is Literal:
        return _choose(value, typing.get_args(hint), where)
    if typing.get_origin(hint) is tuple:
        return _convert_tuple(value, typing.get_args(hint), where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"`{where}` must be of type {hint.__name__}, but is {value!r}")
    return value


def _choose(value: Any, choices: tuple[Any, ...], where: str) -> Any:
    if value not in choices:
        raise ConfigError(f"`{where}` must be one of {', '.join(map(repr, choices))}, but is {value!r}")
    return value


def _convert_tuple(value: Any, hints: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or len(value) != len(hints):
        raise ConfigError(f"`{where}` must be a list of {len(hints)}, but is {value!r}")
    return tuple(_convert(item, hint, where) for item, hint in zip(value, hints, strict=True))
