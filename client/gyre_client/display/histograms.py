"""Histograms of lengths, for terminals and as pictures of a page."""

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.formatting import cut

_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"
_MAX_CELLS = 40
# Of the picture, in pixels.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 200, 10, 40


def title(histogram: pb.LengthHistogram) -> str:
    """Returns the title of a histogram."""
    return (
        f"lengths of {printable(histogram.field)}: {histogram.least:,} to {histogram.greatest:,}, "
        f"mean {histogram.mean:,.1f}, of {counted(histogram.num_samples, 'sample', ',')}"
    )


def as_text(histogram: pb.LengthHistogram, num_columns: int) -> str:
    """Returns a bar for each bin, no wider than a terminal."""
    labels = [_label(histogram, number) for number in range(len(histogram.counts))]
    width = max(map(len, labels))
    counts = [f"{count:,}" for count in histogram.counts]
    room = max(8, min(_MAX_CELLS, num_columns - width - max(map(len, counts)) - 4))
    most = max(*histogram.counts, 1)
    lines = [
        f"{label.rjust(width)}  {_bar(count / most * room).ljust(room)}  {shown}".rstrip()
        for label, count, shown in zip(labels, histogram.counts, counts, strict=True)
    ]
    return "\n".join(cut(line, num_columns) for line in [title(histogram), *lines])


def as_svg(histogram: pb.LengthHistogram) -> str:
    """Returns the picture of a histogram; it has numbers and no text of a dataset."""
    counts = list(histogram.counts)
    most, step = max(*counts, 1), (_WIDTH - 2 * _LEFT) / len(counts)
    bars, room = [], _HEIGHT - _BOTTOM - 20
    for number, count in enumerate(counts):
        height = count / most * room
        left, top = _LEFT + number * step, _HEIGHT - _BOTTOM - height
        about = f"{_label(histogram, number)}: {count:,}"
        bars.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{step - 2:.1f}" height="{height:.1f}">'
            f"<title>{about}</title></rect>"
        )
    base = _HEIGHT - _BOTTOM
    ends = (
        f'<text x="{_LEFT}" y="{base + 18}">{histogram.least:,}</text>'
        f'<text x="{_WIDTH - _LEFT}" y="{base + 18}" text-anchor="end">{histogram.greatest:,}'
        f'</text><text x="{_LEFT}" y="12">{most:,}</text>'
    )
    line = f'<line x1="{_LEFT}" y1="{base}" x2="{_WIDTH - _LEFT}" y2="{base}"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="histogram of lengths">'
        f"{''.join(bars)}{line}{ends}</svg>"
    )


def _label(histogram: pb.LengthHistogram, number: int) -> str:
    first, last = histogram.bounds[number], histogram.bounds[number + 1] - 1
    return f"{first:,}" if first >= last else f"{first:,} to {last:,}"


def _bar(cells: float) -> str:
    whole, part = divmod(round(cells * 8), 8)
    return _FULL * whole + (_EIGHTHS[part] if part else "")
