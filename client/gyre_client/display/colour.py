"""Colours for people on a terminal. The text is the same without them."""

import os
import re
from typing import IO

from gyre_client.display.rates import PROCESSOR_BOUND, STORAGE_BOUND, TRAINER_BOUND

_BOLD, _RED, _GREEN, _YELLOW, _MAGENTA, _PLAIN = (
    f"\x1b[{code}m" for code in (1, 31, 32, 33, 35, 0)
)
_OF_WORDS = {
    STORAGE_BOUND: _YELLOW,
    PROCESSOR_BOUND: _MAGENTA,
    TRAINER_BOUND: _GREEN,
    "draining": _RED,
}
_WORD = re.compile("|".join(_OF_WORDS))
_HEADER = re.compile(r"^[A-Z][A-Z/ ]+$", re.MULTILINE)


def painted(text: str, output: IO[str]) -> str:
    """Returns the text with coloured headers and bottlenecks if `output` is a terminal.

    Users who want no colours set NO_COLOR (https://no-color.org).
    """
    if not output.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    text = _HEADER.sub(lambda found: f"{_BOLD}{found[0]}{_PLAIN}", text)
    return _WORD.sub(lambda found: f"{_OF_WORDS[found[0]]}{found[0]}{_PLAIN}", text)
