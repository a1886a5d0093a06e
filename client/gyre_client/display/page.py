"""A dataset as HTML: the page of `gyre describe --html`, and the part of a notebook's cell.

A page needs nothing else.
All text of the daemon and of the dataset is escaped, and the page forbids itself scripts and
anything from elsewhere. Images and sounds are put in as they are stored, if their first bytes say
that they are of a kind that browsers show and that holds no script.
"""

import base64
import html
from collections.abc import Iterable, Sequence

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.histograms import as_svg, title
from gyre_client.display.media import media_type
from gyre_client.display.samples import Sample, Value
from gyre_client.display.values import text_of, words_of

_MAX_TEXT_CHARS = 5000
# Bytes of images and sounds: larger ones are named, so that the page opens.
_MAX_MEDIUM_BYTES, _MAX_MEDIA_BYTES, _MAX_CELL_MEDIA_BYTES = 8 << 20, 64 << 20, 4 << 20
_POLICY = "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; }
td { overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
pre { max-height: 20rem; overflow: auto; }
article { border-top: 1px solid #8888; padding: .5rem 0 1rem; }
img { max-width: 100%; max-height: 20rem; }
audio { max-width: 100%; }
svg { width: 100%; max-width: 40rem; font: 12px system-ui, sans-serif; fill: currentColor; }
svg rect { fill: #4a7fb5; }
svg line { stroke: currentColor; }
"""
_CELL_STYLE = """
.gyre table { display: table; margin: .3rem 0; }
.gyre th, .gyre td { text-align: left !important; vertical-align: top; }
.gyre h3 { font-size: 1em; margin: .6rem 0 .2rem; }
.gyre pre { white-space: pre-wrap; max-height: 10rem; overflow: auto; margin: 0; }
.gyre img { max-width: 16rem; max-height: 12rem; }
"""


class _Media:
    """How many bytes of images and sounds the page may still have."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def element(self, data: bytes) -> str | None:
        """Returns the element that shows or plays the bytes; None if they are of no such kind."""
        kind = media_type(data)
        if kind is None:
            return None
        if len(data) > min(_MAX_MEDIUM_BYTES, self._left):
            return f"<p>{kind}, too large for this page</p>"
        self._left -= len(data)
        source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if kind.startswith("image/"):
            return f'<img alt="" src="{source}">'
        return f'<audio controls preload="none" src="{source}"></audio>'


def page_of(
    description: pb.DatasetDescription,
    facts: Iterable[tuple[str, str]],
    fields: tuple[Sequence[str], Iterable[Sequence[str]]],
    samples: Iterable[Sample],
) -> str:
    """Returns the page.

    Args:
        description: The dataset's description.
        facts: Names and values that stand at the top.
        fields: The heads of their table, and the table.
        samples: Those to show.
    """
    name = _text(description.name)
    pictures = "".join(
        f"<h3>{_text(title(each))}</h3>{as_svg(each)}" for each in description.lengths
    )
    head, table, shown = _parts(facts, fields, samples, _MAX_MEDIA_BYTES)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{name}</h1>{head}<h2>Fields</h2>{table}"
        f"{f'<h2>Lengths</h2>{pictures}' if pictures else ''}"
        f"{f'<h2>Samples</h2>{shown}' if shown else ''}"
        "</body></html>\n"
    )


def cell_of(
    facts: Iterable[tuple[str, str]],
    fields: tuple[Sequence[str], Iterable[Sequence[str]]],
    samples: Iterable[Sample],
) -> str:
    """Returns the HTML that a notebook shows below a cell; the arguments are those of `page_of`."""
    parts = _parts(facts, fields, samples, _MAX_CELL_MEDIA_BYTES)
    return f'<div class="gyre"><style>{_CELL_STYLE}</style>{"".join(parts)}</div>'


def _parts(
    facts: Iterable[tuple[str, str]],
    fields: tuple[Sequence[str], Iterable[Sequence[str]]],
    samples: Iterable[Sample],
    max_media_bytes: int,
) -> tuple[str, str, str]:
    """Returns the table of facts, that of fields, and the samples."""
    media = _Media(max_media_bytes)
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts
    )
    heads = "".join(f"<th>{_text(head.lower())}</th>" for head in fields[0])
    columns = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in field)}</tr>" for field in fields[1]
    )
    shown = "".join(_sample(each, media) for each in samples)
    return f"<table>{rows}</table>", f"<table><tr>{heads}</tr>{columns}</table>", shown


def _sample(sample: Sample, media: _Media) -> str:
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_value(value, media)}</td></tr>"
        for name, value in sample.values.items()
    )
    return f"<article><h3>sample {int(sample.sample_id)}</h3><table>{rows}</table></article>"


def _value(value: Value, media: _Media) -> str:
    if isinstance(value.data, bytes) and (element := media.element(value.data)):
        return element
    text = text_of(value)
    if text is None:
        return f"<pre>{_text(words_of(value))}</pre>"
    more = " ..." if len(text) > _MAX_TEXT_CHARS else ""
    return f"<pre>{_text(text[:_MAX_TEXT_CHARS], kept=chr(10))}{more}</pre>"


def _text(text: str, kept: str = "") -> str:
    """Returns text for a page: visible characters, and none that HTML gives a meaning."""
    return html.escape(printable(text, kept=kept))
