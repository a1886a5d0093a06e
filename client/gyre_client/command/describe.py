"""`gyre describe`: what a dataset is, how long its samples are, and what some of them look like."""

import argparse
import sys
from pathlib import Path
from typing import Any

import shtab
from gyre_common.printable import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.command.formatting import CommandOutput, facts, page_width, plain, size, table
from gyre_client.command.histograms import as_text
from gyre_client.command.media import Picture, media_type, shows_pictures, thumbnail
from gyre_client.command.page import page_of
from gyre_client.command.samples import Sample, first_samples
from gyre_client.command.values import words_of
from gyre_client.errors import GyreError, InvalidRequest, NotInstalled
from gyre_client.messages.arguments import whole
from gyre_client.messages.requests import is_location
from gyre_client.transport.connection import Connection

_MAX_SAMPLES = 1000
_MAX_HISTOGRAMS = 4  # in the text for people
_MAX_PICTURE_COLUMNS, _PICTURE_LINES = 60, 16


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    parser.add_argument("--num", type=int, default=3, help="how many samples to show")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle that they come from")
    page = parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with images and sounds, too"
    )
    page.complete = shtab.FILE  # type: ignore[attr-defined]


def describe(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns a dataset's size, fields, lengths and first samples; the daemon opens it."""
    whole("num", args.num, 0, _MAX_SAMPLES)
    dataset = dataset_of(args)
    description = connection.describe(dataset, with_lengths=True)
    pairs = _facts(description, is_path=is_location(args.dataset, args.format))
    samples: list[Sample] = []
    if args.num:
        try:
            samples = first_samples(connection, dataset, description, args.num, args.seed)
        except GyreError as error:  # what is known of the dataset is worth showing
            pairs.append(("shown", f"no sample: {' '.join(str(error).split())}"))
    rows = [(field.name, field.dtype, _shape(field)) for field in description.fields]
    if args.html:
        _write(args.html, page_of(description, pairs, rows, samples))
    text = f"{facts(pairs)}\n\n{table(('FIELD', 'DTYPE', 'SHAPE'), rows)}"
    more: list[str | Picture] = [
        f"\n{as_text(each, page_width())}" for each in description.lengths[:_MAX_HISTOGRAMS]
    ]
    if (num_more := len(description.lengths) - _MAX_HISTOGRAMS) > 0:
        more.append(f"\nlengths of {num_more:,} more fields: --html and --json have them")
    for sample in samples:
        more += _shown(sample)
    value = plain(description) | {"samples": [_to_plain(each) for each in samples]}
    return CommandOutput(value, text, more=more)


def _facts(description: pb.DatasetDescription, *, is_path: bool) -> list[tuple[str, str]]:
    least, greatest = description.least_shard_bytes, description.greatest_shard_bytes
    sizes = f": {size(least)} to {size(greatest)}" if description.num_shards > 1 else ""
    return [
        ("name", "-" if is_path else description.name),
        ("format", description.format),
        ("uri", description.uri),
        ("samples", f"{description.num_samples:,}"),
        ("shards", f"{description.num_shards:,}{sizes}"),
        ("size", size(description.num_bytes)),
        ("fingerprint", description.fingerprint),
    ]


def _shape(field: pb.Field) -> str:
    sizes = (["*"] if field.ragged else []) + [str(length) for length in field.shape]
    return f"[{', '.join(sizes)}]"


def _shown(sample: Sample) -> list[str | Picture]:
    """Returns the text about a sample, with pictures of its images where they can be drawn."""
    parts: list[str | Picture] = [f"\nsample {sample.sample_id}"]
    for name, value in sample.values.items():
        shape = ", ".join(map(str, value.shape))
        parts.append(f"  {printable(name)}  {value.dtype} [{shape}]  {words_of(value)}")
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
