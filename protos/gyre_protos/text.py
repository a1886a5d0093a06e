"""Text that people read: numbers of things, and names that others chose.

A terminal obeys control characters: they move the cursor, change the title, or hide later text.
Names and messages of datasets, storages, clients and daemons may hold any. Every error, every
output of the commands and every line of the log for people passes through `printable`.
"""

_ES = ("tch", "sh", "s", "x")  # of "epoch", "epochs"


def counted(number: int, noun: str, spec: str = "") -> str:
    """Returns such as "1 batch", "0 batches" or, with the format `,`, "1,200 samples".

    Args:
        number: How many.
        noun: The counted thing, in the singular; its plural ends in "s" or "es".
        spec: The format of the number.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:{spec}} {noun}{'es' if noun.endswith(_ES) else 's'}"


def printable(text: str, kept: str = "") -> str:
    r"""Returns the text with everything escaped but visible characters and plain spaces.

    These are the control characters (C0, DEL and C1), line separators, characters without a width
    or with a direction, lone surrogates, and code points without a meaning. They are shown as
    Python writes them: `\x1b`, `\u202e`.

    Args:
        text: Any text.
        kept: Characters that stay as they are, such as a line's end.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in kept else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
