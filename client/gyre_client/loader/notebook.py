"""A loader as a notebook shows it: its dataset, where it stands, and some samples.

All text of the daemon and of the dataset is escaped. Images and sounds are put in as they are
stored, if their first bytes say that they are of a kind that browsers show and that holds no
script.
"""

from typing import TYPE_CHECKING

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.descriptions import facts_of, fields_of
from gyre_client.display.samples import Sample, first_samples
from gyre_client.errors import GyreError
from gyre_client.transport.connection import Connection

if TYPE_CHECKING:
    from gyre_client.loader.loader import Loader
import html
from collections.abc import Iterable, Sequence

from gyre_protos.text import printable

from gyre_client.display.formatting import MediaBudget, media_type
from gyre_client.display.samples import Value, text_of, words_of

_MAX_TEXT_CHARS = 5000
_MAX_MEDIA_BYTES = 4 << 20
_STYLE = """
.gyre table { display: table; margin: .3rem 0; }
.gyre th, .gyre td { text-align: left !important; vertical-align: top; }
.gyre h3 { font-size: 1em; margin: .6rem 0 .2rem; }
.gyre pre { white-space: pre-wrap; max-height: 10rem; overflow: auto; margin: 0; }
.gyre img { max-width: 16rem; max-height: 12rem; }
"""


def cell_of(
    facts: Iterable[tuple[str, str]],
    fields: tuple[Sequence[str], Iterable[Sequence[str]]],
    samples: Iterable[Sample],
) -> str:
    """Returns the HTML of a cell.

    Args:
        facts: Names and values that stand at the top.
        fields: The heads of their table, and the table.
        samples: Those to show.
    """
    media = MediaBudget(_MAX_MEDIA_BYTES)
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts
    )
    heads = "".join(f"<th>{_text(head.lower())}</th>" for head in fields[0])
    columns = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in field)}</tr>" for field in fields[1]
    )
    shown = "".join(_sample(each, media) for each in samples)
    tables = f"<table>{rows}</table><table><tr>{heads}</tr>{columns}</table>"
    return f'<div class="gyre"><style>{_STYLE}</style>{tables}{shown}</div>'


def _sample(sample: Sample, media: MediaBudget) -> str:
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_value(value, media)}</td></tr>"
        for name, value in sample.values.items()
    )
    return f"<article><h3>sample {int(sample.sample_id)}</h3><table>{rows}</table></article>"


def _value(value: Value, media: MediaBudget) -> str:
    if isinstance(value.data, bytes) and (kind := media_type(value.data)):
        source = media.source(kind, value.data)
        if source is None:
            return f"<p>{kind}, too large for this cell</p>"
        if kind.startswith("image/"):
            return f'<img alt="" src="{source}">'
        return f'<audio controls preload="none" src="{source}"></audio>'
    text = text_of(value)
    if text is None:
        return f"<pre>{_text(words_of(value))}</pre>"
    more = " ..." if len(text) > _MAX_TEXT_CHARS else ""
    return f"<pre>{_text(text[:_MAX_TEXT_CHARS], kept=chr(10))}{more}</pre>"


def _text(text: str, kept: str = "") -> str:
    """Returns text for a page: visible characters, and none that HTML gives a meaning."""
    return html.escape(printable(text, kept=kept))


_NUM_SAMPLES = 3
_TIMEOUT_S = 10.0  # a cell that shows no sample is better than one that hangs


def html_of(loader: "Loader") -> str:
    """Returns HTML; the loader stays where it is, and may be closed.

    Samples are as stored, so that a picture is a picture, or as served where they cannot be.
    """
    description, order = loader._description, loader._request.order
    reader = loader._request.reader
    steps = f"{loader.steps_per_epoch:,} steps an epoch"
    facts = [
        *facts_of(description, is_path=not description.name),
        ("batch", f"{loader.local_batch_size:,} of {order.global_batch_size:,} samples"),
        ("rank", f"{reader.rank} of {reader.world_size}"),
        ("next", f"step {loader.step:,}, in epoch {loader.epoch:,}; {steps}"),
    ]
    return cell_of(facts, fields_of(description.fields), _samples(loader))


def _samples(loader: "Loader") -> list[Sample]:
    dataset, seed = loader._request.dataset, loader._request.order.seed
    for transforms in (pb.TransformList(), loader._declared):
        try:
            with Connection(loader._place.target.address) as connection:
                found = connection.describe(dataset, _TIMEOUT_S, transforms=transforms)
                return first_samples(connection, dataset, found, _NUM_SAMPLES, seed, transforms)
        except GyreError:
            continue
    return []
