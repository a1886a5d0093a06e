"""`gyre datasets` and `gyre describe`: which datasets a daemon serves, and what one of them is."""

import argparse

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.command.formatting import CommandOutput, facts, plain, size, table
from gyre_client.messages.requests import is_location
from gyre_client.transport.connection import Connection


def datasets(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the datasets that the daemon serves by name."""
    found = connection.list_datasets().datasets
    rows = [(each.name, each.format, "yes" if each.open else "no", each.uri) for each in found]
    text = table(("NAME", "FORMAT", "OPEN", "URI"), rows)
    if not rows:
        text = "This daemon serves no dataset by name."
    return CommandOutput([plain(each) for each in found], text)


def describe(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns a dataset's size, fingerprint and fields; the daemon opens it."""
    description = connection.describe(dataset_of(args))
    pairs = [
        ("name", "-" if is_location(args.dataset, args.format) else description.name),
        ("format", description.format),
        ("uri", description.uri),
        ("samples", f"{description.num_samples:,}"),
        ("shards", f"{description.num_shards:,}"),
        ("size", size(description.num_bytes)),
        ("fingerprint", description.fingerprint),
    ]
    rows = [(field.name, field.dtype, _shape(field)) for field in description.fields]
    fields = table(("FIELD", "DTYPE", "SHAPE"), rows)
    return CommandOutput(plain(description), f"{facts(pairs)}\n\n{fields}")


def _shape(field: pb.Field) -> str:
    sizes = (["*"] if field.ragged else []) + [str(length) for length in field.shape]
    return f"[{', '.join(sizes)}]"
