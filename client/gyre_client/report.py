"""What a command prints: tables and sizes for people, JSON for programs."""

import json
import shutil
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_ELLIPSIS = "\u2026"
_GAP = 2  # between the columns of a table
_WIDTH = 80  # of a page that is no terminal's
_MIN_WIDTH = 20  # of a value, however narrow the terminal


def to_json(value: Any) -> str:
    """Returns one JSON document, on one line."""
    return json.dumps(value, ensure_ascii=False)


def page_width() -> int:
    """Returns the columns of the terminal that standard output is, or of a page (COLUMNS in the environment is stronger)."""
    return shutil.get_terminal_size((_WIDTH, 24)).columns


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
    lines = table([header[column] for column in kept], _chosen(cells[1:], kept)).split("\n")
    return [cut(line, num_columns) for line in lines]


def stacked(header: Sequence[str], rows: Iterable[Sequence[object]], num_keys: int, num_columns: int) -> str:
    """Returns a table that is no wider than a page: what has no room stands in a further table below, with the same keys.

    Args:
        header: Names of the table's columns.
        rows: Their cells.
        num_keys: So many columns come first in each of the tables.
        num_columns: Of the page.
    """
    cells = [list(header), *([printable(str(cell)) for cell in row] for row in rows)]
    keys, others = list(range(num_keys)), list(range(num_keys, len(header)))
    if _table_width(cells, [*keys, *others]) > num_columns:
        cells = [[cut(cell, num_columns // 4) for cell in row[:num_keys]] + row[num_keys:] for row in cells]
    groups = [list(keys)]
    for column in others:
        if len(groups[-1]) > num_keys and _table_width(cells, [*groups[-1], column]) > num_columns:
            groups.append(list(keys))
        groups[-1].append(column)
    tables = [table([header[column] for column in group], _chosen(cells[1:], group)) for group in groups]
    return "\n\n".join("\n".join(cut(line, num_columns) for line in each.split("\n")) for each in tables)


def _chosen(rows: Iterable[Sequence[str]], columns: Sequence[int]) -> list[list[str]]:
    return [[row[column] for column in columns] for row in rows]


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


def facts(pairs: Iterable[tuple[str, object]], num_columns: int | None = None) -> str:
    """Returns one line per name and value, the values aligned; longer ones go on below, where there are so many columns."""
    named = [(name, str(value)) for name, value in pairs]
    name_width = max(len(name) for name, _ in named)
    if num_columns is None:
        return "\n".join(f"{name.ljust(name_width)}  {value}" for name, value in named)
    room = max(num_columns - name_width - _GAP, _MIN_WIDTH)
    lines = []
    for name, value in named:
        first, *rest = textwrap.wrap(value, room, break_on_hyphens=False) or [""]
        lines += [f"{name.ljust(name_width)}  {first}", *(f"{' ' * name_width}  {part}" for part in rest)]
    return "\n".join(lines)


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
