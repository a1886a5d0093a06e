"""Tables of text for a terminal."""

from collections.abc import Sequence


def table(lines: Sequence[Sequence[str]], *, num_texts: int) -> str:
    """Aligned columns; the first ``num_texts`` are aligned to the left, all others to the right."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
