"""A value of a sample in a few words: text as text, numbers summarised, images by their type."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from gyre_protos.text import printable

from gyre_client.display.formatting import size
from gyre_client.display.media import media_type
from gyre_client.display.samples import Value

_MAX_CHARS, _MAX_NUMBERS = 300, 8
_SHOWN_BYTES = 16


def text_of(value: Value) -> str | None:
    """Returns the text in a value; None if it is not text."""
    if not isinstance(value.data, bytes) or media_type(value.data):
        return None
    try:
        return value.data.decode()
    except UnicodeDecodeError:
        return None


def words_of(value: Value) -> str:
    """Returns one line about a value, without any control character."""
    text = text_of(value)
    if text is not None:
        more = " ..." if len(text) > _MAX_CHARS else ""
        return printable(text[:_MAX_CHARS]) + more
    if isinstance(value.data, bytes):
        kind = media_type(value.data)
        shown = kind or f"bytes {value.data[:_SHOWN_BYTES].hex(' ')}"
        more = " ..." if kind is None and len(value.data) > _SHOWN_BYTES else ""
        return f"{shown}{more}, {size(len(value.data))}"
    return _numbers(value.data)


def _numbers(data: Any) -> str:
    """Returns a number, or the first of several with their range and mean."""
    if not isinstance(data, list):
        return _number(data)
    flat = list(_flat(data))
    first = ", ".join(map(_number, flat[:_MAX_NUMBERS]))
    if len(flat) <= _MAX_NUMBERS:
        return f"[{first}]"
    known = [each for each in flat if isinstance(each, bool | int | float) and math.isfinite(each)]
    if not known:
        return f"[{first}, ...]"
    mean = math.fsum(known) / len(known)
    return f"[{first}, ...], {_number(min(known))} to {_number(max(known))}, mean {mean:.6g}"


def _flat(data: Any) -> Iterator[Any]:
    """Yields the numbers of nested lists."""
    if isinstance(data, list):
        return itertools.chain.from_iterable(map(_flat, data))
    return iter((data,))


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
