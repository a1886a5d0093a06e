"""One row of the table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

# Stands in configurations, URIs and requests as a password would; no message may repeat it.
SECRET = "hunter2-do-not-print"
UNPRINTABLE = "\x1b[2J\x1b]0;owned\x07\x9b31m"


@dataclass(frozen=True)
class Row:
    """One bad input.

    Attributes:
        id: The surface and a few words, unique in the table.
        sent: What the surface's runner sends; each module of `table` says what it is there.
        status: The gRPC code, or the exit status of a command; empty where neither exists.
        reason: The class of the error, as clients see it; empty where no error has one.
        text: A regular expression that the message contains.
    """

    id: str
    sent: Any
    status: str
    reason: str
    text: str


def cases(rows: Iterable[Row]) -> Sequence[Any]:
    """Returns the rows as parameters of a test."""
    return [pytest.param(row, id=row.id) for row in rows]
