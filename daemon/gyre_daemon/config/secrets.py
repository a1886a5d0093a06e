"""Finds values of the configuration that may be secrets, and replaces them in messages.

Storage keys and passwords stand in the same file as all else, and a line that was moved by mistake
puts one under any other key.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
