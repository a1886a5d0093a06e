"""What a command prints: tables and sizes for people, JSON for programs."""

import json
from collections.abc import Iterable, Sequence
from typing import Any


def to_json(value: Any) -> str:
    """Returns one JSON document, on one line."""
    return json.dumps(value, ensure_ascii=False)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns the rows under their header, in columns as wide as they need; numbers to the right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    is_number = [_is_number_column([row[column] for row in cells[1:]]) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    )


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
    return bool(cells) and all(cell[:1].isdigit() for cell in cells)
