"""Checks of text, JSON and numbers, both when a shard is scanned and when a sample is served."""

import codecs
import itertools
import math
import re
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

MAX_NUMBER_CHARS = 64
# Text is decoded in pieces, so that other threads get their turns and no copy of it is made.
_TEXT_BYTES = 1 << 20
# One document holds the interpreter while its values are skipped: 4 ms for one of this size. With a
# hundred times as much, no other thread of the daemon runs for half a second.
_MAX_JSON_BYTES = 1 << 20
_NOT_FINITE = (b"NaN", b"-Infinity", b"Infinity")  # Python writes them, though JSON has none
_SKIPPING = msgspec.json.Decoder(msgspec.Raw)
# Escapes of JSON text: a backslash, a pair of surrogates, or a lone one, which is the group.
_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_INTEGER = re.compile(rb"\s*[+-]?[0-9]+\s*")
_NUMBER = re.compile(
    rb"\s*[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|nan|(inf(inity)?))\s*", re.I
)


def check_text(data: bytes | memoryview) -> None:
    """Check that the bytes are UTF-8.

    Raises:
        ValueError: they are not.
    """
    if len(data) <= _TEXT_BYTES:
        str(data, "utf-8")
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(data), _TEXT_BYTES):
        decoder.decode(bytes(data[begin : begin + _TEXT_BYTES]))
    decoder.decode(b"", final=True)


def check_json(data: bytes | memoryview) -> None:
    """Check that the bytes are one JSON document in UTF-8, as Python's `json` writes it.

    Of a document of more than 1 MiB only that it is UTF-8.

    Raises:
        ValueError: they are not.
    """
    check_text(data)
    if len(data) > _MAX_JSON_BYTES:
        return
    try:
        try:
            _SKIPPING.decode(data)
        except msgspec.DecodeError:
            _SKIPPING.decode(as_json(bytes(data)))
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no JSON document: {error}") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def lone_surrogate(data: bytes) -> str:
    r"""The first lone surrogate of JSON text, such as `\ud800`; empty if none."""
    return next((each[1].decode() for each in _ESCAPES.finditer(data) if each[1]), "")


def without_surrogates(data: bytes) -> bytes:
    """JSON text of the same size, with U+FFFD for each lone surrogate."""
    if b"\\ud" not in data and b"\\uD" not in data:
        return data
    return _ESCAPES.sub(lambda each: b"\\ufffd" if each[1] else each[0], data)


def as_json(data: bytes) -> bytes:
    """Text of Python's `json` as JSON of the same size, to be parsed for its structure alone.

    An empty array stands for each number that JSON lacks, which is harmless in a string.
    """
    data = without_surrogates(data)
    for word in _NOT_FINITE:
        data = data.replace(word, b"[]".ljust(len(word)))
    return data


def check_texts(data: memoryview, begins: npt.NDArray[np.int64]) -> None:
    """Check that texts stored back to back are UTF-8, as one text where all are.

    Args:
        data: of all of them.
        begins: int64 [n], where each begins.

    Raises:
        ValueError: some text is not.
    """
    check_text(data)
    firsts = np.frombuffer(data, np.uint8)[begins[begins < len(data)]]
    if (firsts & 0xC0 == 0x80).any():
        raise ValueError("a text begins within a letter")


def check_documents(data: memoryview, begins: npt.NDArray[np.int64]) -> None:
    """The same as `check_texts`, of JSON documents; see `check_json`."""
    check_texts(data, begins)
    skip, bounds = _SKIPPING.decode, [*begins.tolist(), len(data)]
    for begin, end in itertools.pairwise(bounds):
        document = data[begin:end]
        if end - begin <= _MAX_JSON_BYTES:
            try:
                skip(document)
            except (msgspec.DecodeError, RecursionError):
                check_json(document)


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
    """A decimal number, perhaps with a fraction and an exponent, or `nan`, `inf` or `infinity`.

    Raises:
        ValueError: the text is no such number, or beyond float64.
    """
    found = None if len(text) > MAX_NUMBER_CHARS else _NUMBER.fullmatch(text)
    if not found:
        raise ValueError(f"{text[: MAX_NUMBER_CHARS + 1]!r} is no decimal number")
    value = float(text)
    if math.isinf(value) and not found[4]:
        raise ValueError(f"{text!r} does not fit into float64")
    return value


def lossless_cast(values: npt.NDArray[Any], dtype: np.dtype[np.generic]) -> npt.NDArray[Any]:
    """Numbers as those of another dtype; a float may lose digits.

    Raises:
        ValueError: this dtype does not hold one of them; says which.
    """
    with np.errstate(all="ignore"):
        cast: npt.NDArray[Any] = values.astype(dtype)
        if dtype.kind in "fc":
            is_lost = np.isinf(cast) & np.isfinite(values)
        else:
            is_lost = (cast.astype(values.dtype) != values) | ((cast < 0) != (values < 0))
    if is_lost.any():
        raise ValueError(f"{values[is_lost][0]} does not fit into {dtype}")
    return cast
