"""`gyre bench`: how fast Gyre reads the user's own data, compared with other loaders."""

import argparse
import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.options import dataset_of
from gyre_client.display.formatting import CommandOutput, size, table
from gyre_client.display.terminal import ProgressBar
from gyre_client.errors import InvalidRequest, NotInstalled
from gyre_client.messages.arguments import MAX_UINT32, MAX_UINT64, is_location, whole
from gyre_client.transport.connection import Connection

if TYPE_CHECKING:
    from gyre_client.bench.comparison import Comparison

MAX_SECONDS = 600.0
BAR_CHARS = 30
NOTES = """\
A DataLoader reads samples by their numbers, in a full shuffle, as Gyre does; the others shuffle
files and 1,000 samples. In process: the training thread itself reads; with workers, or with Gyre,
it goes on meanwhile. THREAD CPU is the processor time that this thread spends on 1000 samples.
Fields are as stored. This measures loading alone: a trainer that is slower than its loader gains
nothing from a faster one."""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only this command has."""
    parser.add_argument("--batch-size", type=int, default=256, help="samples per batch (256)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        help="how long each loader reads in each of two rounds",
    )


def bench(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the measurements.

    Raises:
        InvalidRequest: This user cannot read the dataset's files as the daemon reads them, or they
            have fewer samples than a batch.
        NotInstalled: torch or numpy is missing.
    """
    try:
        # numpy and torch take a while to import, and only this command needs them
        comparison = importlib.import_module("gyre_client.bench.comparison")
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("gyre bench", error.name, "client") from error
    options = dict(args.option)
    batch_size = whole("batch-size", args.batch_size, 1, MAX_UINT32)
    if not 0 < args.seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"--seconds must be more than 0 and at most {MAX_SECONDS:.0f}, but is {args.seconds}"
        )
    description = connection.describe(dataset_of(args))
    if batch_size > description.num_samples:
        raise InvalidRequest(
            f"--batch-size is {batch_size}, but the dataset has only "
            f"{counted(description.num_samples, 'sample')}"
        )
    is_local_path = is_location(args.dataset, args.format) and "://" not in args.dataset
    task = {
        "dataset": str(Path(args.dataset).expanduser().absolute())
        if is_local_path
        else args.dataset,
        "batch_size": batch_size,
        "seconds": args.seconds,
        "seed": whole("seed", args.seed, 0, MAX_UINT64),
        "address": connection.address.text,
        "daemon_user": args.daemon_user,
        "is_location": is_location(args.dataset, args.format),
        "options": options or None,
    }
    with ProgressBar("measurements") as bar:
        found = comparison.compare(description, task, bar.update)
    value = {
        "num_samples": description.num_samples,
        "num_bytes": description.num_bytes,
        "batch_size": batch_size,
        "seconds": args.seconds,
        "files_were_cached": found.files_were_cached,
        "missing": list(found.missing),
        "loaders": [
            dataclasses.asdict(contender) | results for contender, results in found.medians.items()
        ],
    }
    return CommandOutput(value, _text(description, args, found))


def _text(description: pb.DatasetDescription, args: argparse.Namespace, found: "Comparison") -> str:
    cache = "read once before" if found.files_were_cached else "larger than the page cache"
    about = (
        f"{printable(description.uri)}: {counted(description.num_samples, 'sample', ',')}, "
        f"{size(description.num_bytes)}, {printable(description.format)}; "
        f"batches of {args.batch_size}."
    )
    lines = [about, f"Files {cache}. Each loader ran alone, twice {args.seconds:g} s; medians."]
    if found.missing:
        lines.append(f"Not installed, so not measured: {', '.join(found.missing)}.")
    if len(found.medians) == 1:
        lines.append(f"No other loader here reads {printable(description.format)}.")
    fastest = max(results["samples_per_s"] for results in found.medians.values())
    rows = [
        (
            contender.label,
            f"{results['samples_per_s']:,.0f}",
            f"{size(results['bytes_per_s'])}/s",
            f"{results['first_batch_s']:.3f} s",
            f"{results['cpu_s_per_1000'] * 1e3:.2f} ms",
            "█" * max(1, round(BAR_CHARS * results["samples_per_s"] / fastest)),
        )
        for contender, results in found.medians.items()
    ]
    columns = table(("LOADER", "SAMPLES/S", "DATA", "FIRST BATCH", "THREAD CPU", ""), rows)
    return "\n\n".join(["\n".join(lines), columns, NOTES])
