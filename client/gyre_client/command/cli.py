"""`gyre`: looks at a daemon and its datasets from the command line.

Each command is a function that asks the daemon and returns its output: text for people or, with
--json, one JSON document. Exit status: 0, or 1 when something failed, or 2 for a request that
cannot be valid.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import shtab

from gyre_client import __version__
from gyre_client.command.datasets import (
    add_bench_arguments,
    add_convert_arguments,
    add_describe_arguments,
    add_index_arguments,
    add_measure_arguments,
    bench,
    cat,
    convert,
    datasets,
    describe,
    index,
    lint,
    measure,
)
from gyre_client.command.job_steps import (
    add_plan_arguments,
    add_rewind_arguments,
    add_why_arguments,
    plan,
    rewind,
    why,
)
from gyre_client.command.options import (
    add_dataset_arguments,
    add_engine_argument,
    interval_s,
)
from gyre_client.command.output import CommandOutput, emit, to_json
from gyre_client.command.status import add_page_arguments, drain, page, status, top
from gyre_client.errors import ConfigError, GyreError, InvalidRequest, NotInstalled, UnknownDataset
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import (
    Target,
    find_target,
    given_address,
    resolve_dataset,
)

Command = Callable[[Connection, argparse.Namespace], CommandOutput | None]
PageCommand = Callable[[argparse.Namespace], None]  # it opens its connections itself

_BAD_INPUT = (InvalidRequest, ConfigError, UnknownDataset, NotInstalled)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; an error is one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        output = _run(args)
        if output is not None:
            emit(*([to_json(output.value)] if args.json else [output.text, *output.more]))
            return output.status
    except GyreError as error:
        print(f"gyre: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, _BAD_INPUT) else 1
    return 0


def _run(args: argparse.Namespace) -> CommandOutput | None:
    """Returns None for a command that prints its output itself."""
    if args.run is page:
        page(args)
        return None
    *others, args.address = args.address or [None]
    if others:
        raise InvalidRequest("--address: several daemons (got a second one). Give it once.")
    if "prepare" in args:
        args.prepare(args)
    target = _target(args)
    try:
        with Connection(target.address) as connection:
            run: Command = args.run
            return run(connection, args)
    except UnknownDataset as error:
        raise _with_hint(error, args) from error
    finally:
        target.release()


def _with_hint(error: UnknownDataset, args: argparse.Namespace) -> UnknownDataset:
    """Adds how to name a path, if there is a file or folder of the unknown name."""
    if "dataset" not in args or args.format or not Path(args.dataset).exists():
        return error
    return UnknownDataset(f"{error}. To read the data at this path, write ./{args.dataset}")


def _target(args: argparse.Namespace) -> Target:
    if "dataset" in args:
        args.dataset, address = resolve_dataset(
            args.dataset, args.format, args.address, args.daemon_user
        )
        return find_target(address, args.daemon_user)
    address = given_address(args.address)
    if address is None:
        raise InvalidRequest(
            "which daemon? Give --address unix:/path.sock, tcp:host:port or tls:host:port, "
            "or set GYRE_ADDRESS"
        )
    return find_target(address, args.daemon_user)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    about = "unix:/path.sock, tcp:host:port or tls:host:port; GYRE_ADDRESS if absent"
    common.add_argument("--address", action="append", help=about)
    about = "also trust the daemon of this user (GYRE_DAEMON_USER)"
    common.add_argument("--daemon-user", metavar="USER", help=about)
    common.add_argument("--json", action="store_true", help="print one JSON document")
    dataset = argparse.ArgumentParser(add_help=False, parents=[common])
    add_dataset_arguments(dataset)
    shuffle = argparse.ArgumentParser(add_help=False, parents=[dataset])
    shuffle.add_argument("--seed", type=int, default=0, help="of the shuffle (0)")

    parser = argparse.ArgumentParser(
        prog="gyre", description="Look at a Gyre daemon and its datasets."
    )
    parser.add_argument("--version", action="version", version=f"gyre {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        run: Command | PageCommand, parent: argparse.ArgumentParser, about: str
    ) -> argparse.ArgumentParser:
        summary = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(
            run.__name__, parents=[parent], help=about, description=summary
        )
        command.set_defaults(run=run)
        return command

    add(datasets, common, "datasets that a daemon serves by name")
    add_describe_arguments(add(describe, dataset, "fields, lengths and some samples of a dataset"))
    about = "build missing parts of a dataset's index, list changes"
    add_index_arguments(add(index, dataset, about))
    add_measure_arguments(add(measure, dataset, "measure transformed samples before the first job"))
    about = "read every shard, check every sample, name corrupt or odd ones"
    add_engine_argument(add(lint, dataset, about))
    about = "only problems, each with its remedy; exit 1 if there is one"
    command = add(status, common, "sessions, memory and storage of a daemon")
    command.add_argument("--check", action="store_true", help=about)
    add(drain, common, "stop a daemon, as its operator: it sends the batches in flight and ends")
    live = add(top, common, "live throughput and bottleneck per session")
    about = "seconds between two looks (1)"
    live.add_argument("--interval", type=interval_s, default=1.0, metavar="S", help=about)
    live.add_argument("--once", action="store_true", help="one look, and end")
    nothing = argparse.ArgumentParser(add_help=False)
    add_page_arguments(add(page, nothing, "show daemons, jobs and samples in a browser"))
    add_plan_arguments(add(plan, shuffle, "samples of a step, or the cost of each order"))
    add_why_arguments(add(why, dataset, "why the batch of a step took as long as it did"))
    about = "the samples behind steps of a run, for a loss that jumped"
    add_rewind_arguments(add(rewind, common, about))
    samples = add(cat, shuffle, "print the first samples of the shuffle")
    samples.add_argument("--num", type=int, default=3, help="how many (3)")
    about = "write a dataset again in another format, with that format's writer"
    add_convert_arguments(add(convert, dataset, about))
    add_bench_arguments(add(bench, shuffle, "compare with the DataLoader on the same data"))
    return parser
