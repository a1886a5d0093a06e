"""Draws overview.svg (the front page) and one-batch.svg (the page of that name) beside this file.

`python docs/images/draw.py`
"""

from pathlib import Path

FOLDER = Path(__file__).parent
INK, GREY = "#222222", "#666666"
BLUE, LIGHT_BLUE, ORANGE, GREEN, YELLOW = "#9db8d9", "#e8eff7", "#e3a48c", "#b7cf9f", "#f0dfa8"


class Drawing:
    """An SVG that is put together shape by shape. Lengths are in pixels."""

    def __init__(self, width: int, height: int) -> None:
        self._size = f'width="{width}" height="{height}"'
        self._box = f'viewBox="0 0 {width} {height}"'
        self._shapes = [f'<rect {self._size} fill="white"/>']

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        anchor: str = "middle",
        weight: str = "normal",
        fill: str = INK,
    ) -> None:
        """Writes one line; y is its baseline."""
        style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
        self._shapes.append(f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: tuple[str, ...] = (),
        *,
        fill: str = "white",
        dashed: bool = False,
    ) -> None:
        """Draws a box. The first line of text is bold; all are centred."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._shapes.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" '
            f'fill="{fill}" stroke="{GREY}" stroke-width="1.2"{dash}/>'
        )
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 4.5
        for row, line in enumerate(lines):
            weight, size = ("bold", 13) if row == 0 else ("normal", 12)
            self.text(x + width / 2, top + 17 * row, line, size=size, weight=weight)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draws a line through the points, with a head at the last."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.6"{dash} '
            'marker-end="url(#head)"/>'
        )

    def save(self, name: str) -> None:
        """Writes the file."""
        head = (
            '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" '
            f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>'
        )
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} {self._box} '
            "font-family='Helvetica, Arial, DejaVu Sans, sans-serif'>"
        )
        (FOLDER / name).write_text("\n".join([opening, head, *self._shapes, "</svg>", ""]))


def overview() -> Drawing:
    """One node: storage, the daemon, two jobs, and what goes into a checkpoint."""
    picture = Drawing(900, 380)
    picture.box(20, 96, 150, 62, ("local disk", "tokens, tar shards"), fill=YELLOW)
    picture.box(20, 190, 150, 62, ("object storage", "s3, gs, az, http"), fill=YELLOW)

    picture.box(210, 16, 670, 276, dashed=True)
    picture.text(226, 36, "one node", anchor="start", fill=GREY)

    picture.box(230, 52, 330, 224, fill=LIGHT_BLUE)
    picture.text(395, 74, "gyred, one daemon", weight="bold", size=14)
    picture.box(246, 92, 132, 58, ("order", "step → sample ids"), fill=BLUE)
    picture.box(246, 190, 132, 62, ("fetching", "many samples", "at a time"), fill=BLUE)
    picture.box(
        414, 92, 130, 160, ("shared memory", "whole batches,", "shared by jobs", "of one order")
    )
    picture.arrow((312, 150), (312, 190))
    picture.arrow((378, 221), (414, 221))
    picture.arrow((170, 127), (208, 127), (208, 208), (246, 208))
    picture.arrow((170, 232), (246, 232))

    for row, job in enumerate(("job A", "job B")):
        top = 60 + 116 * row
        picture.text(660, top + 6, f"{job}: training processes", anchor="start", fill=GREY)
        for rank in range(2):
            left = 660 + 110 * rank
            picture.box(left, top + 16, 84, 56, (f"rank {rank}", "gyre_client"), fill=GREEN)
        picture.arrow((544, top + 58), (660, top + 58))
        picture.text(610, top + 50, "no copy", size=12)
    picture.arrow((744, 92), (770, 92))
    picture.arrow((770, 118), (744, 118))
    picture.text(757, 152, "gyre-train: parameter shards go round", size=12)

    picture.box(
        636, 316, 244, 48, ("checkpoint of the job", "model, optimizer, cursor"), fill=ORANGE
    )
    picture.arrow((702, 248), (702, 316))
    picture.text(708, 288, "save", anchor="start", size=12)
    picture.arrow((812, 316), (812, 248), dashed=True)
    picture.text(818, 288, "resume", anchor="start", size=12)
    picture.text(624, 345, "The cursor (250 bytes) says where the data goes on.", anchor="end")
    return picture


def one_batch() -> Drawing:
    """The eight steps of a batch, the daemon's above and the trainer's below."""
    picture = Drawing(900, 420)
    picture.box(16, 16, 868, 262, dashed=True)
    picture.text(30, 36, "gyred", anchor="start", weight="bold")
    picture.box(16, 316, 868, 92, dashed=True)
    picture.text(870, 336, "training process", anchor="end", weight="bold")

    width, gap, left = 190, 26, 32
    upper = (
        ("1 plan", "step → sample ids", "order"),
        ("2 lay out", "ids → byte ranges, offsets", "datasets, fetching"),
        ("3 take a slot", "offsets → addresses", "memory"),
        ("4 read", "bytes to their addresses", "storage, workers"),
    )
    lower = (
        ("7 send", "slot → message", "service"),
        ("6 deliver", "in order, on credit", "sessions"),
        ("5 finish", "check and decode", "fetching"),
    )
    for column, lines in enumerate(upper):
        picture.box(left + column * (width + gap), 52, width, 80, lines, fill=BLUE)
        if column:
            x = left + column * (width + gap)
            picture.arrow((x - gap, 92), (x, 92))
    for column, lines in enumerate(lower, 1):
        x = left + column * (width + gap)
        picture.box(x, 178, width, 80, lines, fill=BLUE)
        if column < len(lower):
            picture.arrow((x + width + gap, 218), (x + width, 218))
    last = left + 3 * (width + gap) + width / 2
    picture.arrow((last, 132), (last, 178))

    x = left + width + gap
    picture.box(
        x,
        330,
        2 * width + gap,
        64,
        ("8 view", "message → tensors over the slot", "gyre_client"),
        fill=GREEN,
    )
    picture.arrow((x + 60, 258), (x + 60, 330))
    picture.text(x + 70, 303, "descriptor, a few hundred bytes", anchor="start", size=12)
    picture.arrow(
        (x, 362),
        (left + 60, 362),
        (left + 60, 160),
        (left + 2.35 * (width + gap), 160),
        (left + 2.35 * (width + gap), 132),
        dashed=True,
    )
    picture.text(left + 70, 300, "release, credit", anchor="start", size=12)
    return picture


if __name__ == "__main__":
    overview().save("overview.svg")
    one_batch().save("one-batch.svg")
