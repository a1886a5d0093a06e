"""TOML of users, within bounds: the parser takes the square of the parts of a dotted key.

It also reads integers of any size, which Python then refuses to print.
"""

import re
from typing import Any

# No key of ours has more than six parts. One of 200,000 took the parser 40 s.
MAX_KEY_PARTS = 32
# Text and comments, which may hold any number of dots; one that does not end takes the rest.
_TEXT = re.compile(
    r'"""(?:\\.|[^\\])*?(?:"""|\Z)'
    r"|'''.*?(?:'''|\Z)"
    r'|"(?:\\.|[^"\\\n])*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){{{MAX_KEY_PARTS}}}")

_LONG_INTEGER = re.compile(r"(?<![\w.-])0[xob]\w{128,}")  # 64 bits are the most in TOML


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table that a text says.

    Raises:
        tomllib.TOMLDecodeError: It is not TOML, a key in it has more than `MAX_KEY_PARTS` parts, or
            an integer is far longer than 64 bits.
        RecursionError: Its lists or tables are nested too deep.
    """
    import tomllib  # noqa: PLC0415  # a private daemon reads no file

    bare = _TEXT.sub(_placeholder, text)
    if deep := _DEEP_KEY.search(bare):
        line = bare.count("\n", 0, deep.start()) + 1
        raise tomllib.TOMLDecodeError(
            f"a key has more than {MAX_KEY_PARTS} parts (at line {line}); shorten it, or quote "
            "the part that has dots in it"
        )
    if long := _LONG_INTEGER.search(bare):
        line = bare.count("\n", 0, long.start()) + 1
        raise tomllib.TOMLDecodeError(f"an integer has more than 64 bits (at line {line})")
    return tomllib.loads(text)


def _placeholder(match: re.Match[str]) -> str:
    """A word in place of a text, and the ends of its lines."""
    text = match[0]
    return ("" if text[0] == "#" else "x") + "\n" * text.count("\n")
