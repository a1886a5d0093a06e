"""`gyre convert`: writes a dataset again in another format, with that format's own writer."""

import argparse
import importlib
from pathlib import Path

import shtab

from gyre_client.command.arguments import dataset_of
from gyre_client.display.formatting import CommandOutput, facts, size
from gyre_client.display.progress import progress_bar
from gyre_client.errors import NotInstalled
from gyre_client.messages.arguments import MAX_UINT32, whole
from gyre_client.messages.requests import is_location, transform_list
from gyre_client.transport.connection import Connection

FORMATS = ("webdataset", "mds", "parquet", "tokens")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    target = parser.add_argument("target", metavar="FOLDER", type=Path, help="to make and to fill")
    target.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format to write")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME",
        help="a field to write; repeatable; all if absent",
    )
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=10_000,
        metavar="N",
        help="samples in a file (10000); MDS shards are bounded by bytes instead",
    )


def convert(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Writes the dataset in another format, and returns the number and size of its files.

    Raises:
        InvalidRequest: The folder exists, or the format cannot hold the fields.
        NotInstalled: torch, numpy or the format's writer is missing.
    """
    try:
        # numpy and torch take a while to import, and few commands need them
        conversion = importlib.import_module("gyre_client.convert.conversion")
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("gyre convert", error.name, "client") from error
    num_samples = whole("samples-per-shard", args.samples_per_shard, 1, MAX_UINT32)
    as_stored = transform_list([])
    description = connection.describe(dataset_of(args), transforms=as_stored)
    is_path = is_location(args.dataset, args.format)
    source = {
        "dataset": args.dataset,
        "address": connection.address.text,
        "daemon_user": args.daemon_user,
        "format": description.format if is_path else None,
        "options": dict(args.option) or None,
        "transform": [],
    }
    with progress_bar("samples") as bar:
        num_written = conversion.convert_dataset(
            description, source, args.target, args.to, args.column, num_samples, bar.update
        )
    files = [path for path in args.target.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    value = {
        "folder": str(args.target),
        "format": args.to,
        "num_samples": num_written,
        "num_files": len(files),
        "num_bytes": num_bytes,
    }
    pairs = [
        ("folder", args.target),
        ("format", args.to),
        ("samples", f"{num_written:,}"),
        ("files", f"{len(files):,}"),
        ("size", size(num_bytes)),
    ]
    return CommandOutput(value, facts(pairs))
