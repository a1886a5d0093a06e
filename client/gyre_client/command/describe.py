"""`gyre describe`: the fields of a dataset, the lengths of its samples, and some samples."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shtab
from gyre_protos.text import printable

from gyre_client.command.arguments import dataset_of
from gyre_client.display.descriptions import facts_of, fields_of
from gyre_client.display.formatting import CommandOutput, facts, page_width, plain, table
from gyre_client.display.histograms import as_text
from gyre_client.display.media import Picture, media_type, shows_pictures, thumbnail
from gyre_client.display.page import page_of
from gyre_client.display.samples import Sample, Value, first_samples
from gyre_client.display.values import words_of
from gyre_client.errors import GyreError, InvalidRequest, NotInstalled
from gyre_client.messages.arguments import whole
from gyre_client.messages.requests import is_location
from gyre_client.transport.connection import Connection

_MAX_SAMPLES = 1000
_MAX_HISTOGRAMS = 4  # in the text for people
_MAX_PICTURE_COLUMNS, _PICTURE_LINES = 60, 16


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    parser.add_argument("--num", type=int, default=3, help="how many samples to show (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle of samples (0)")
    page = parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with images and sounds, too"
    )
    page.complete = shtab.FILE  # type: ignore[attr-defined]


def describe(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns a dataset's size, fields, lengths and first samples; the daemon opens it."""
    whole("num", args.num, 0, _MAX_SAMPLES)
    dataset = dataset_of(args)
    description = connection.describe(dataset, with_lengths=True)
    pairs = facts_of(description, is_path=is_location(args.dataset, args.format))
    samples: list[Sample] = []
    if args.num:
        try:
            samples = first_samples(connection, dataset, description, args.num, args.seed)
        except GyreError as error:  # show the description all the same
            pairs.append(("shown", f"no sample: {' '.join(str(error).split())}"))
    heads, rows = fields_of(description.fields)
    if args.html:
        _write(args.html, page_of(description, pairs, (heads, rows), samples))
    text = f"{facts(pairs)}\n\n{table(heads, rows)}"
    more: list[str | Picture] = [
        f"\n{as_text(each, page_width())}" for each in description.lengths[:_MAX_HISTOGRAMS]
    ]
    if (num_more := len(description.lengths) - _MAX_HISTOGRAMS) > 0:
        more.append(f"\nlengths of {num_more:,} more fields: --html and --json have them")
    for sample in samples:
        more += sample_text(sample, f"sample {sample.sample_id}")
    value = plain(description) | {"samples": [_to_plain(each) for each in samples]}
    return CommandOutput(value, text, more=more)


def sample_text(
    sample: Sample, head: str, decode: Callable[[str, Value], str | None] | None = None
) -> list[str | Picture]:
    """Returns the text about a sample, with pictures of its images where they can be drawn.

    Args:
        sample: To show.
        head: The first line.
        decode: Returns the meaning of a field's value in words, if it has any.
    """
    parts: list[str | Picture] = [f"\n{head}"]
    for name, value in sample.values.items():
        shape = ", ".join(map(str, value.shape))
        parts.append(f"  {printable(name)}  {value.dtype} [{shape}]  {words_of(value)}")
        if decode and (text := decode(name, value)):
            parts.append(f"    {words_of(Value('uint8', [len(text)], text.encode()))}")
        if not isinstance(value.data, bytes) or not shows_pictures(sys.stdout):
            continue
        if (media_type(value.data) or "").startswith("image/"):
            try:
                columns = min(_MAX_PICTURE_COLUMNS, page_width())
                picture = thumbnail(value.data, columns, _PICTURE_LINES)
                parts.append(picture or "  (this image cannot be drawn)")
            except NotInstalled as error:
                parts.append(f"  ({error})")
    return parts


def _to_plain(sample: Sample) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "fields": {name: words_of(value) for name, value in sample.values.items()},
    }


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from error
