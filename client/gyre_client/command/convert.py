"""`gyre convert`: writes a dataset again in another format, with that format's own writer."""

import argparse
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from gyre_client.command.options import (
    add_engine_argument,
    add_transforms_argument,
    daemons_of,
    dataset_of,
    option,
    transforms_of,
)
from gyre_client.display.formatting import CommandOutput, facts, size
from gyre_client.display.terminal import ProgressBar
from gyre_client.errors import InvalidRequest, NotInstalled
from gyre_client.messages.arguments import MAX_UINT32, transform_list, whole
from gyre_client.transport.connection import Connection

FORMATS = ("webdataset", "mds", "parquet", "tokens")
_DTYPES = ("uint16", "uint32", "int32", "int64")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    target = parser.add_argument("target", metavar="FOLDER", type=Path, help="to make and to fill")
    target.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    parser.add_argument(
        "--to", choices=FORMATS, help="the format to write; the folder's name, if it is one of them"
    )
    parser.add_argument(
        "--transform",
        action="append",
        nargs="+",
        default=[],
        metavar=("NAME", "KEY=VALUE"),
        help="a transform of each sample, such as `tokenize field=json key=text "
        "tokenizer=/models/tokenizer.json`; repeatable",
    )
    add_transforms_argument(parser)
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME",
        help="a field to write; repeatable; all if absent",
    )
    parser.add_argument("--dtype", default="", choices=_DTYPES, help="of the ids in token files")
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=10_000,
        metavar="N",
        help="samples in a file (10000)",
    )
    add_engine_argument(parser, _share_index)


def _share_index(args: argparse.Namespace) -> None:
    """Lets the daemons of all nodes, and the one here, share the index of the dataset."""
    units = importlib.import_module("gyre_client.prepare.conversion")
    os.environ.setdefault("GYRE_INDEX_DIR", str(units.unfinished_folder(args.target) / "index"))


def convert(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Writes the dataset in another format, and returns the number and size of its files.

    Raises:
        InvalidRequest: The folder exists, or the format cannot hold the fields.
        NotInstalled: numpy or the format's writer is missing.
    """
    try:
        # numpy takes a while to import, and few commands need it
        conversion = importlib.import_module("gyre_client.prepare.conversion")
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("gyre convert", error.name, "client") from error
    kind = args.to or args.target.name
    if kind not in FORMATS:
        raise InvalidRequest(f"--to: no format is given. Write one of {', '.join(FORMATS)}.")
    if args.transform and args.transforms:
        raise InvalidRequest("--transform and --transforms: both are given. Leave one out.")
    transforms = transforms_of(args) or transform_list([*map(_table, args.transform)])
    wanted = conversion.Conversion(
        dataset_of(args),
        transforms,
        kind,
        args.column,
        whole("samples-per-shard", args.samples_per_shard, 1, MAX_UINT32),
        args.dtype,
    )
    is_tokens, began_s = kind == "tokens", time.monotonic()
    with ProgressBar("samples") as bar:

        def show(num_done: int, num_all: int, elements_per_s: float) -> None:
            bar.update(num_done, num_all, f"{elements_per_s:,.0f} tokens/s" if is_tokens else "")

        found = conversion.convert_dataset(
            connection, wanted, args.target, args.engine, daemons_of(connection, args), show
        )
    elapsed_s = time.monotonic() - began_s
    value: dict[str, Any] = {
        "folder": str(args.target),
        "format": kind,
        "num_samples": found["samples"],
        "num_files": found["files"],
        "num_bytes": found["bytes"],
        "seconds": elapsed_s,
    }
    pairs = [
        ("folder", args.target),
        ("format", kind),
        ("samples", f"{found['samples']:,}"),
        ("files", f"{found['files']:,}"),
        ("size", size(found["bytes"])),
    ]
    if is_tokens:
        value["num_tokens"] = found["elements"]
        pairs.append(("tokens", f"{found['elements']:,} in {elapsed_s:,.1f} s"))
    return CommandOutput(value, facts(pairs))


def _table(words: Sequence[str]) -> dict[str, object]:
    """Returns the transform that `NAME KEY=VALUE...` means."""
    name, *rest = words
    try:
        return {"name": name, **dict(map(option, rest))}
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"--transform {name}: {error}") from error
