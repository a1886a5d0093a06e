"""Types of arguments of the command line, for argparse."""

import argparse

# Of ranks, and of steps of a trace: more would keep a machine busy for ever.
_MAX_COUNT = 65_536


def positive(text: str) -> int:
    """A count.

    Raises:
        argparse.ArgumentTypeError: it is none, or too large.
    """
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number") from None
    if not 1 <= value <= _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {_MAX_COUNT}")
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
