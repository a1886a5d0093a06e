"""Checks of text, JSON and numbers, both when a shard is scanned and when a sample is served."""

import json
import math
import re

MAX_NUMBER_CHARS = 64
_INTEGER = re.compile(rb"\s*[+-]?[0-9]+\s*")
_NUMBER = re.compile(rb"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*|\s*nan\s*", re.I)


def check_text(data: bytes | memoryview) -> None:
    """Check that the bytes are UTF-8.

    Raises:
        ValueError: they are not.
    """
    str(data, "utf-8")


def check_json(data: bytes | memoryview) -> None:
    """Check that the bytes are one JSON document in UTF-8.

    Raises:
        ValueError: they are not.
    """
    try:
        json.loads(str(data, "utf-8"))  # given bytes, it would accept UTF-16 too
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def parse_integer(text: bytes) -> int:
    """A decimal number that fits into int64.

    Raises:
        ValueError: the text is no such number.
    """
    if len(text) > MAX_NUMBER_CHARS or not _INTEGER.fullmatch(text):
        raise ValueError(f"{text[: MAX_NUMBER_CHARS + 1]!r} is no decimal number")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} does not fit into int64")
    return value


def parse_number(text: bytes) -> float:
    """A decimal number, perhaps with a fraction and an exponent.

    Raises:
        ValueError: the text is no such number, or is none that float64 holds.
    """
    if len(text) > MAX_NUMBER_CHARS or not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[: MAX_NUMBER_CHARS + 1]!r} is no decimal number")
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text!r} does not fit into float64")
    return value
