"""`gyre datasets`, `describe` and `cat`: a daemon's datasets, the fields and samples of one."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from gyre_protos.text import printable

from gyre_client.command.arguments import dataset_of
from gyre_client.display.descriptions import as_text, facts_of, fields_of
from gyre_client.display.formatting import CommandOutput, facts, page_width, plain, table
from gyre_client.display.media import Picture, media_type, shows_pictures, thumbnail
from gyre_client.display.samples import Sample, Value, first_samples, words_of
from gyre_client.errors import GyreError, NotInstalled
from gyre_client.messages.arguments import MAX_UINT32, whole
from gyre_client.messages.requests import is_location
from gyre_client.transport.connection import Connection

_MAX_SAMPLES = 1000
_MAX_HISTOGRAMS = 4  # in the text for people
_MAX_PICTURE_COLUMNS, _PICTURE_LINES = 60, 16


def add_describe_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    parser.add_argument("--num", type=int, default=3, help="how many samples to show (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle of samples (0)")


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
    text = f"{facts(pairs)}\n\n{table(heads, rows)}"
    more: list[str | Picture] = [
        f"\n{as_text(each, page_width())}" for each in description.lengths[:_MAX_HISTOGRAMS]
    ]
    if (num_more := len(description.lengths) - _MAX_HISTOGRAMS) > 0:
        more.append(f"\nlengths of {num_more:,} more fields: --json has them")
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


def cat(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the first `args.num` samples of the shuffle by `args.seed`.

    Each is its sample_id and, by field, dtype, shape and value. The value of ragged bytes is text
    if they are UTF-8, else hexadecimal; all other values are (nested) lists.
    """
    whole("num", args.num, 1, MAX_UINT32)
    dataset = dataset_of(args)
    description = connection.describe(dataset)
    found = first_samples(connection, dataset, description, args.num, args.seed)
    samples = [
        {
            "sample_id": each.sample_id,
            "fields": {name: _plain(value) for name, value in each.values.items()},
        }
        for each in found
    ]
    parts = [part for each in found for part in sample_text(each, f"sample {each.sample_id}")]
    return CommandOutput(samples, "\n".join(each for each in parts if isinstance(each, str))[1:])


def _plain(value: Value) -> dict[str, Any]:
    data = decoded(value.data) if isinstance(value.data, bytes) else value.data
    return {"dtype": value.dtype, "shape": list(value.shape), "value": data}


def decoded(data: bytes) -> str:
    """Returns bytes as text if they are UTF-8, else in hexadecimal."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def datasets(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the datasets that the daemon serves by name."""
    found = connection.list_datasets().datasets
    rows = [(each.name, each.format, "yes" if each.open else "no", each.uri) for each in found]
    text = table(("NAME", "FORMAT", "OPEN", "URI"), rows)
    if not rows:
        text = "This daemon serves no dataset by name."
    return CommandOutput([plain(each) for each in found], text)
