"""Text that people read and write: numbers of things, sizes, TOML, and names that others chose.

A terminal obeys control characters: they move the cursor, change the title, or hide later text.
Names and messages of datasets, storages, clients and daemons may hold any. Every error, every
output of the commands and every line of the log for people passes through `printable`.

TOML of users is read within bounds: the parser takes the square of the parts of a dotted key. It
also reads integers of any size, which Python then refuses to print.
"""

import re
from typing import Any

_SIZE = re.compile(r"(\d{1,20})(?:\.(\d{1,20}))?\s*([A-Za-z]{0,3})", re.ASCII)
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES = {"": 1, "B": 1} | _BINARY_UNITS | _DECIMAL_UNITS
_ES = ("tch", "sh", "s", "x")  # of "epoch", "epochs"


def counted(number: int, noun: str, spec: str = "") -> str:
    """Returns such as "1 batch", "0 batches" or, with the format `,`, "1,200 samples".

    The noun is singular; its plural ends in "s" or "es".
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:{spec}} {noun}{'es' if noun.endswith(_ES) else 's'}"


def bytes_of(size: str) -> int:
    """Returns the bytes that such as "1048576", "1.5GiB" or "1GB" means, rounded down.

    Raises:
        ValueError: It is no size, or its unit is unknown.
    """
    match = _SIZE.fullmatch(size.strip())
    whole, part, unit = match.groups("") if match else ("", "", "none")
    if unit not in _UNIT_BYTES or (part and unit in ("", "B")):
        raise ValueError(
            'expected a number of bytes such as 1073741824, "512MiB" (binary) or "1GB" (decimal)'
        )
    return int(whole + part) * _UNIT_BYTES[unit] // int(10 ** len(part))


def printable(text: str, kept: str = "") -> str:
    r"""Returns the text with everything escaped but visible characters and plain spaces.

    These are the control characters (C0, DEL and C1), line separators, characters without a width
    or with a direction, lone surrogates, and code points without a meaning. They are shown as
    Python writes them: `\x1b`, `\u202e`. Those `kept`, such as a line's end, stay.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in kept else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


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
