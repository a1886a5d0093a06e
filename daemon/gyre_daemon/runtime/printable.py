"""Text of others, as a terminal may show it.

A terminal obeys control characters: they move the cursor, change the title, or hide what follows.
Names and messages of datasets, storages and clients may hold any. Every line of the log for people
and every output of the commands passes through here.
"""


def printable(text: str, kept: str = "") -> str:
    r"""The text with everything escaped that is no visible character or plain space.

    These are the control characters (C0, DEL and C1), line separators, characters without a width
    or with a direction, lone surrogates, and code points without a meaning. They are shown as
    Python writes them: `\x1b`, `\u202e`.

    Args:
        text: any text.
        kept: characters that stay as they are, such as a line's end.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in kept else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
