"""Draws docs/images/rotation.svg: three ranks, three slices, one forward and one backward.

Run `python -m benchmarks.rtp.figure`. The schedule is computed here, not drawn by hand.
"""

from pathlib import Path

TARGET = Path(__file__).parents[2] / "docs" / "images" / "rotation.svg"
NUM_RANKS = 3
COLOURS = ("#9db8d9", "#e3a48c", "#b7cf9f")
WIDTH, HEIGHT, GAP_X, GAP_Y = 76, 40, 44, 46
LEFT, TOP = 84, 78
CLOCKWISE, COUNTER_CLOCKWISE = 1, -1


def slice_name(index: int) -> str:
    return "ABC"[index % NUM_RANKS]


def slice_at(rank: int, step: int, direction: int) -> int:
    """The slice that a rank computes with at a step: its own first in forward, last in backward."""
    return (rank - step) % NUM_RANKS if direction == CLOCKWISE else (rank + step + 1) % NUM_RANKS


def corner(left: float, rank: int, step: int) -> tuple[float, float]:
    return left + step * (WIDTH + GAP_X), TOP + rank * (HEIGHT + GAP_Y)


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    anchor: str = "middle",
    weight: str = "normal",
) -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def cell(left: float, rank: int, step: int, direction: int) -> str:
    x, y = corner(left, rank, step)
    index = slice_at(rank, step, direction)
    border = (
        'stroke="#222222" stroke-width="2.5"'
        if index == rank
        else 'stroke="#888888" stroke-width="0.8"'
    )
    place = f'x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5"'
    box = f'<rect {place} fill="{COLOURS[index]}" {border}/>'
    return box + text(x + WIDTH / 2, y + HEIGHT / 2 + 5, slice_name(index), size=16, weight="bold")


def hop(left: float, rank: int, step: int, direction: int, *, gradient: bool) -> str:
    """An arrow from a cell to the next rank's next cell."""
    x, y = corner(left, rank, step)
    to_x, to_y = corner(left, (rank + direction) % NUM_RANKS, step + 1)
    shift = 9 if gradient else -9
    line = (
        'stroke="#c0562f" stroke-dasharray="5 3" marker-end="url(#gradient)"'
        if gradient
        else ('stroke="#1f4e8c" marker-end="url(#weights)"')
    )
    start = f'x1="{x + WIDTH}" y1="{y + HEIGHT / 2 + shift:.0f}"'
    end = f'x2="{to_x - 5}" y2="{to_y + HEIGHT / 2 + shift:.0f}"'
    return f'<line {start} {end} stroke-width="1.6" {line}/>'


def panel(left: float, direction: int, title: str) -> list[str]:
    parts = [text(left, TOP - 44, title, size=15, anchor="start", weight="bold")]
    for step in range(NUM_RANKS):
        parts.append(text(left + step * (WIDTH + GAP_X) + WIDTH / 2, TOP - 14, f"step {step}"))
        for rank in range(NUM_RANKS):
            if step < NUM_RANKS - 1:
                if not (direction == COUNTER_CLOCKWISE and step == NUM_RANKS - 2):
                    parts.append(hop(left, rank, step, direction, gradient=False))
                if direction == COUNTER_CLOCKWISE:
                    parts.append(hop(left, rank, step, direction, gradient=True))
            parts.append(cell(left, rank, step, direction))
    return parts


def marker(name: str, colour: str) -> str:
    head = f'<path d="M0,0 L8,4 L0,8 z" fill="{colour}"/>'
    size = 'markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"'
    return f'<marker id="{name}" {size}>{head}</marker>'


def ahead(left: float) -> list[str]:
    """The first hop of backward leaves from the owners' own slices."""
    parts = []
    for rank in range(NUM_RANKS):
        x, y = corner(left, rank, 0)
        owner = slice_name(rank + 1)
        parts.append(
            f'<line x1="{x - 42}" y1="{y + 11}" x2="{x - 5}" y2="{y + 11}" stroke="#1f4e8c" '
            'stroke-width="1.6" marker-end="url(#weights)"/>'
        )
        parts.append(text(x - 45, y + 16, owner, size=12, anchor="end"))
    return parts


def main() -> None:
    right = LEFT + NUM_RANKS * (WIDTH + GAP_X) + 60
    width, height = right + NUM_RANKS * (WIDTH + GAP_X), TOP + NUM_RANKS * (HEIGHT + GAP_Y) + 26
    parts = [f"<defs>{marker('weights', '#1f4e8c')}{marker('gradient', '#c0562f')}</defs>"]
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    parts += [
        text(LEFT - 16, corner(0, rank, 0)[1] + HEIGHT / 2 + 5, f"rank {rank}", anchor="end")
        for rank in range(NUM_RANKS)
    ]
    parts += panel(LEFT, CLOCKWISE, "forward: own slice first, then clockwise")
    parts += panel(right, COUNTER_CLOCKWISE, "backward: counter-clockwise, own slice last")
    parts += ahead(right)
    key = TOP + NUM_RANKS * (HEIGHT + GAP_Y) + 4
    parts.append(
        text(
            LEFT,
            key,
            "solid: weights.  dashed: a gradient, one step behind them.  "
            "thick border: the own slice, which is only read: copies travel.",
            size=12,
            anchor="start",
        )
    )
    body = "\n".join(parts)
    font = "font-family='Helvetica, Arial, sans-serif' fill='#222222'"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>'
    TARGET.write_text(f"{head}\n{body}\n</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main()
