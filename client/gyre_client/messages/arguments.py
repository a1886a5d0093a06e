"""Checks arguments where users hand them in: the error names the argument, the value and the form.

A bool is no number here, and bytes are no text. Numbers of numpy and torch count as numbers.
"""

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypeVar

from gyre_client.errors import InvalidRequest

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_STEP = 1 << 62  # beyond any training
MAX_SECONDS = 1e9
_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_BITS = 256

_Value = TypeVar("_Value")


def whole(name: str, value: object, least: int, most: int) -> int:
    """Returns `value` as an int.

    Raises:
        InvalidRequest: `value` is not a whole number in [least, most].
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # also of a tensor other than a whole number
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a whole number")
    if not least <= number <= most:
        raise InvalidRequest(f"{name} is {shown(number)}; it must be from {least} to {most}")
    return number


def seconds(name: str, value: object) -> float:
    """Returns `value` as a float.

    Raises:
        InvalidRequest: `value` is not a number of seconds in [0, 10^9], which is 30 years.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a number of seconds")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= MAX_SECONDS:
        raise InvalidRequest(
            f"{name} is {shown(value)}; it must be from 0 to {MAX_SECONDS:.0f} seconds"
        )
    return number


def text(name: str, value: object) -> str:
    """Returns `value`, which is a string that UTF-8 can express.

    Raises:
        InvalidRequest: It is not.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{name} is {shown(value)}, which is not UTF-8: it holds half a character"
        ) from None
    return value


def flag(name: str, value: object) -> bool:
    """Returns `value`, which is True or False.

    Raises:
        InvalidRequest: It is neither.
    """
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be True or False")
    return value


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Returns `value`, which is a mapping with strings as keys.

    Raises:
        InvalidRequest: It is not.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a dict")
    for key in value:
        text(f"a key of {name}", key)
    return value


def choice(argument: str, word: object, values: Mapping[str, _Value]) -> _Value:
    """Returns the value of `word`.

    Raises:
        InvalidRequest: `word` is not a key of `values`; the message lists the keys.
    """
    if not isinstance(word, str) or word not in values:
        raise InvalidRequest(
            f"{argument} is {shown(word)}; it can be {', '.join(map(repr, values))}"
        )
    return values[word]


def shown(value: object) -> str:
    """Returns a value as Python writes it, cut if it is long."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        written = repr(value)
    except Exception:
        return f"an object of {type(value).__name__}"
    return written if len(written) <= _MAX_SHOWN_CHARS else written[:_MAX_SHOWN_CHARS] + "..."
