"""What a command prints: tables and sizes for people, JSON for programs."""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_ELLIPSIS = "\u2026"
_GAP = 2  # between the columns of a table


def to_json(value: Any) -> str:
    """Returns one JSON document, on one line."""
    return json.dumps(value, ensure_ascii=False)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns the rows under their header, in columns as wide as they need; numbers to the right."""
    cells = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(width, column)) for column in zip(*cells, strict=True)]
    is_number = [_is_number_column(column[1:]) for column in zip(*cells, strict=True)]
    return "\n".join(_row(row, widths, is_number) for row in cells)


def fitted(header: Sequence[str], rows: Iterable[Sequence[str]], ranks: Sequence[int], num_columns: int) -> list[str]:
    """Returns the lines of a table that is no wider than a terminal.

    Args:
        header: Names of the table's columns.
        rows: Their cells.
        ranks: Of each column, how soon it goes where there is no room: the greatest first. What still does not fit is cut.
        num_columns: Of the terminal.
    """
    cells = [list(header), *(list(map(printable, row)) for row in rows)]
    kept = list(range(len(header)))
    while len(kept) > 1 and _table_width(cells, kept) > num_columns:
        kept.remove(max(kept, key=lambda column: ranks[column]))
    lines = table([header[column] for column in kept], ([row[column] for column in kept] for row in cells[1:])).split("\n")
    return [cut(line, num_columns) for line in lines]


def cut(line: str, num_columns: int) -> str:
    """Returns the line, or as much of its beginning as a terminal has room for and a mark that there was more."""
    if width(line) <= num_columns:
        return line
    while line and width(line) >= num_columns:
        line = line[:-1]
    return line + _ELLIPSIS if num_columns > 0 else ""


def printable(text: str) -> str:
    """Returns text that a terminal shows and does not obey: clients choose the names of their jobs."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def width(text: str) -> int:
    """Returns how many of a terminal's columns the text takes."""
    return sum(_columns_of(character) for character in text)


def _columns_of(character: str) -> int:
    if character.isascii():
        return 1
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _table_width(cells: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    return sum(max(width(row[column]) for row in cells) for column in columns) + _GAP * (len(columns) - 1)


def _row(row: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = []
    for cell, wanted, right in zip(row, widths, is_number, strict=True):
        padding = " " * (wanted - width(cell))
        padded.append(padding + cell if right else cell + padding)
    return (" " * _GAP).join(padded).rstrip()


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Returns one line per name and value, the values aligned."""
    named = [(name, str(value)) for name, value in pairs]
    width = max(len(name) for name, _ in named)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in named)


def size(num_bytes: float) -> str:
    """Returns a size as people say it: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} PiB"


def duration(seconds: float) -> str:
    """Returns a duration as people say it: 3700 is "1 h 1 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _is_number_column(cells: Sequence[str]) -> bool:
    """Where a value is not known yet, a dash stands for it."""
    return any(cell[:1].isdigit() for cell in cells) and all(cell[:1].isdigit() or cell == "-" for cell in cells)
