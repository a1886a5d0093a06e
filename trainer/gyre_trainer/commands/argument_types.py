"""Types of arguments of the command line, for argparse."""

import argparse

# Of ranks, and of steps of a trace: more would keep a machine busy for ever.
_MAX_COUNT = 65_536
# Of tokens of a sample, which a plan only counts: the longest contexts of models have a million.
_MAX_LENGTH = 2**20


def positive(text: str) -> int:
    """A count.

    Raises:
        argparse.ArgumentTypeError: it is none, or too large.
    """
    return _count(text, _MAX_COUNT)


def length(text: str) -> int:
    """A number of tokens.

    Raises:
        argparse.ArgumentTypeError: it is none, or too large.
    """
    return _count(text, _MAX_LENGTH)


def _count(text: str, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number") from None
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {most}")
    return value


def rate(text: str) -> float:
    """A positive number.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:20]} is not a positive number")
    return value
