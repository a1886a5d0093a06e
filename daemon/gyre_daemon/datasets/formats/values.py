"""What the bytes of text, JSON and numbers must be: one check, for the scan of a shard and for every sample that is served."""

import json
import re

_INTEGER = re.compile(rb"\s*[+-]?[0-9]+\s*")
MAX_INTEGER_CHARS = 64


def check_text(data: bytes | memoryview) -> None:
    """See that it is UTF-8.

    Raises:
        ValueError: it is not.
    """
    str(data, "utf-8")


def check_json(data: bytes | memoryview) -> None:
    """See that it is a JSON document in UTF-8.

    Raises:
        ValueError: it is not.
    """
    try:
        json.loads(str(data, "utf-8"))  # of bytes, it would take UTF-16 too
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def parse_integer(text: bytes) -> int:
    """A decimal number that fits into int64.

    Raises:
        ValueError: it is none.
    """
    if len(text) > MAX_INTEGER_CHARS or not _INTEGER.fullmatch(text):
        raise ValueError(f"{text[: MAX_INTEGER_CHARS + 1]!r} is no decimal number")
    value = int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} does not fit into int64")
    return value
