"""Tables as Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; all columns but the first to the right."""
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
