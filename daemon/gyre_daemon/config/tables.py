"""Makes dataclasses of tables: values of the annotated types, or an error that names the key.

Storage keys and passwords stand in the same file as all else, and a line that was moved by mistake
puts one under any other key.
"""

import re
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, TypeVar

import msgspec
from gyre_protos.text import bytes_of

from gyre_daemon.errors import ConfigError

_MAX_SIZE = 1 << 60  # an EiB; anything larger is a slip of the unit


class Size(int):
    """A number of bytes.

    In TOML an integer, or text such as "64MiB" (2^20 bytes each) or "64MB" (10^6 bytes each).
    """


def parse_size(text: str | int) -> Size:
    """Bytes from an integer or text such as "1.5GiB" or "1GB", rounded down to whole bytes.

    Raises:
        ValueError: it is neither, or its unit is unknown.
    """
    size = Size(bytes_of(str(text)))
    if size > _MAX_SIZE:
        raise ValueError(f"expected at most {_MAX_SIZE} bytes, an EiB")
    return size


_SECRET_KEY = re.compile(
    r"secret|token(?!_dtype|izer|s$)|passw|credential|signature|private|\bsas\b|_key\b|\bkey\b",
    re.IGNORECASE,
)
# Text to show: a word or a number with its unit. Secrets are longer, or mix both.
_PLAIN = re.compile(r"[A-Za-z]{0,8}|-?[0-9.,]{1,20} ?[A-Za-z]{0,8}")


def shown(value: object, key: str) -> str:
    """A value for a message about its key; only its kind if it may be a secret."""
    if not is_secret(key) and _is_plain(value):
        return f"{value!r:.200}"
    if isinstance(value, str):
        return f"a text of {len(value)} characters"
    kinds = {dict: "a table", list: "a list", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def is_secret(key: str) -> bool:
    """Whether the value of a key, as messages name it, may be a secret."""
    name = key.partition(" in ")[0]
    return ".storage" in name or bool(_SECRET_KEY.search(name.rpartition(".")[2]))


def hide(text: str, settings: Mapping[str, Any]) -> str:
    """A driver's message without the values of its settings."""
    for value in sorted({str(each) for each in _leaves(settings)}, key=len, reverse=True):
        if len(value) > 2:
            text = text.replace(value, "***")
    return text


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return len(value) < 10 and all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, list):
        return len(value) < 10 and all(map(_is_plain, value))
    return not isinstance(value, str) or bool(_PLAIN.fullmatch(value))


def has_secret(settings: object) -> bool:
    """Whether a table, or one in it, has a value under a key that names a secret."""
    if not isinstance(settings, dict):
        return False
    return any(
        has_secret(value) or (value and _SECRET_KEY.search(key)) for key, value in settings.items()
    )


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


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
        import difflib  # noqa: PLC0415  # for an error alone

        close = difflib.get_close_matches(key, known, n=1)
        all_known = f"known are {', '.join(sorted(known))}" if known else "there are none"
        advice = f"did you mean `{close[0]}`?" if close else all_known
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
