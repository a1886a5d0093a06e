"""`gyre`: looks at a daemon and its datasets from the command line.

Each command is one function below: it asks the daemon and prints, a table for people or, with --json, one JSON document. Exit
status: 0, 1 when something failed, 2 when what was asked for cannot be meant.
"""

import argparse
import importlib
import math
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import shtab
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client import __version__, why
from gyre_client.arguments import MAX_UINT32, whole
from gyre_client.cat import read_samples, show
from gyre_client.colour import painted
from gyre_client.connection import Connection
from gyre_client.endpoint import Endpoint, endpoint_of_dataset, find_endpoint, given_address
from gyre_client.errors import ConfigError, GyreError, InvalidRequest, NotInstalled, UnknownDataset
from gyre_client.indexing import Indexed, add_index_arguments
from gyre_client.planning import add_plan_arguments, cost_of_orders, plan_of_steps
from gyre_client.report import facts, page_width, size, table, to_json
from gyre_client.status import full_text, to_plain
from gyre_client.top import top
from gyre_client.wire import dataset_ref, plain

_MAX_INTERVAL_S = 3600
_BAD_INPUT = (InvalidRequest, ConfigError, UnknownDataset, NotInstalled)


class Answer(NamedTuple):
    """What a command found out.

    Attributes:
        value: For programs; ready for JSON.
        text: For people.
    """

    value: Any
    text: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; errors are one line on standard error."""
    args = _parser().parse_args(arguments)
    try:
        answer = _answer(args)
        if answer is not None:
            print(to_json(answer.value) if args.json else answer.text, flush=True)
    except GyreError as error:
        print(f"gyre: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, _BAD_INPUT) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _answer(args: argparse.Namespace) -> Answer | None:
    """None of a command that has printed what there was to say."""
    endpoint = _endpoint(args)
    try:
        with Connection(endpoint.address) as connection:
            answer: Answer | None = args.run(connection, args)
            return answer
    except UnknownDataset as error:
        raise _with_hint(error, args) from error
    finally:
        endpoint.release()


def _with_hint(error: UnknownDataset, args: argparse.Namespace) -> UnknownDataset:
    """What a path lacks to be read as one."""
    if "dataset" not in args or args.format or not ("://" in args.dataset or Path(args.dataset).exists()):
        return error
    return UnknownDataset(f"{error}. To read the data at this path, say what it is: --format tokens or --format webdataset")


def _endpoint(args: argparse.Namespace) -> Endpoint:
    if "dataset" in args:
        return endpoint_of_dataset(args.address, args.dataset, args.format)
    address = given_address(args.address)
    if address is None:
        raise InvalidRequest("which daemon? Give --address unix:/path.sock or tcp:host:port, or set GYRE_ADDRESS")
    return find_endpoint(address)


def _datasets(connection: Connection, args: argparse.Namespace) -> Answer:
    datasets = connection.list_datasets().datasets
    rows = [(dataset.name, dataset.format, "yes" if dataset.open else "no", dataset.uri) for dataset in datasets]
    text = table(("NAME", "FORMAT", "OPEN", "URI"), rows) if rows else "This daemon serves no dataset by name."
    return Answer([plain(dataset) for dataset in datasets], text)


def _describe(connection: Connection, args: argparse.Namespace) -> Answer:
    description = connection.describe(_ref(args))
    pairs = [
        ("name", "-" if args.format else description.name),
        ("format", description.format),
        ("uri", description.uri),
        ("samples", f"{description.num_samples:,}"),
        ("shards", f"{description.num_shards:,}"),
        ("size", size(description.num_bytes)),
        ("fingerprint", description.fingerprint),
    ]
    rows = [(field.name, field.dtype, _shape(field)) for field in description.fields]
    return Answer(plain(description), facts(pairs) + "\n\n" + table(("FIELD", "DTYPE", "SHAPE"), rows))


def _shape(field: pb.Field) -> str:
    sizes = (["*"] if field.ragged else []) + [str(length) for length in field.shape]
    return f"[{', '.join(sizes)}]"


def _plan(connection: Connection, args: argparse.Namespace) -> Answer:
    if args.cost == (args.step is not None):
        raise InvalidRequest("what is to be planned? Give --step S, --step A:B or --cost")
    answer = cost_of_orders(connection, _ref(args), args) if args.cost else plan_of_steps(connection, _ref(args), args)
    return Answer(*answer)


def _index(connection: Connection, args: argparse.Namespace) -> Answer:
    indexed = Indexed.of(connection.index(_ref(args), with_checksums=args.checksums), _show_progress)
    return Answer(indexed.to_plain(), indexed.to_text())


def _show_progress(line: str) -> None:
    """`line` stands in the terminal's last line, if there is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _status(connection: Connection, args: argparse.Namespace) -> Answer:
    status = connection.status()
    return Answer(to_plain(status), painted(full_text(status, page_width()), sys.stdout))


def _top(connection: Connection, args: argparse.Namespace) -> None:
    if not args.interval:
        raise InvalidRequest("--interval is 0; a look takes some time")
    top(connection, args.interval, once=args.once, as_json=args.json)


def _why(connection: Connection, args: argparse.Namespace) -> Answer:
    response = why.why(connection, _ref(args), args)
    return Answer([plain(account) for account in response.accounts], why.text(response, page_width()))


def _cat(connection: Connection, args: argparse.Namespace) -> Answer:
    whole("num", args.num, 1, MAX_UINT32)
    samples = read_samples(connection, _ref(args), connection.describe(_ref(args)), args)
    return Answer(samples, show(samples))


def _bench(connection: Connection, args: argparse.Namespace) -> Answer:
    try:
        bench = importlib.import_module("gyre_client.bench")  # numpy takes a while to import; only this command needs it
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("gyre bench", error.name, "client") from error
    return Answer(*bench.compare(connection, args))


def _ref(args: argparse.Namespace) -> pb.DatasetRef:
    return dataset_ref(args.dataset, args.format, dict(args.option))


def _option(text: str) -> tuple[str, object]:
    """KEY=VALUE, the value in TOML's syntax or, where it is none, plain text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to {_MAX_INTERVAL_S}")
    return seconds


def _add_dataset(parser: argparse.ArgumentParser) -> None:
    """Which dataset: the same words for every command."""
    dataset = parser.add_argument("dataset", metavar="DATASET", help="a name, or with --format a path or URI")
    dataset.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument("--format", help="tokens or webdataset: DATASET is a path or URI, read by a private daemon")
    parser.add_argument(
        "--option", action="append", default=[], type=_option, metavar="KEY=VALUE", help="with --format; repeatable"
    )


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--address", help="unix:/path.sock or tcp:host:port; GYRE_ADDRESS if absent")
    common.add_argument("--json", action="store_true", help="print one JSON document")
    dataset = argparse.ArgumentParser(add_help=False, parents=[common])
    _add_dataset(dataset)
    shuffle = argparse.ArgumentParser(add_help=False, parents=[dataset])
    shuffle.add_argument("--seed", type=int, default=0, help="of the shuffle")

    parser = argparse.ArgumentParser(prog="gyre", description="Look at a Gyre daemon and its datasets.")
    parser.add_argument("--version", action="version", version=f"gyre {__version__}")
    shtab.add_argument_to(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("datasets", parents=[common], help="what a daemon serves by name").set_defaults(run=_datasets)
    commands.add_parser("describe", parents=[dataset], help="what a dataset is").set_defaults(run=_describe)
    index = commands.add_parser("index", parents=[dataset], help="build what is missing of a dataset's index, say what changed")
    index.set_defaults(run=_index)
    add_index_arguments(index)
    commands.add_parser("status", parents=[common], help="what a daemon is doing").set_defaults(run=_status)
    live = commands.add_parser("top", parents=[common], help="what its sessions do, live: how fast, and what holds them up")
    live.set_defaults(run=_top)
    live.add_argument("--interval", type=_interval, default=1.0, metavar="S", help="seconds between two looks")
    live.add_argument("--once", action="store_true", help="one look, and end")
    plan = commands.add_parser("plan", parents=[shuffle], help="which samples make a step, or what each order costs")
    plan.set_defaults(run=_plan)
    add_plan_arguments(plan)
    reasons = commands.add_parser("why", parents=[dataset], help="why the batch of a step took as long as it did")
    reasons.set_defaults(run=_why)
    why.add_why_arguments(reasons)
    cat = commands.add_parser("cat", parents=[shuffle], help="print the first samples of the shuffle")
    cat.set_defaults(run=_cat)
    cat.add_argument("--num", type=int, default=3, help="how many")
    bench = commands.add_parser("bench", parents=[shuffle], help="compare with the DataLoader on the same data")
    bench.set_defaults(run=_bench)
    bench.add_argument("--batch-size", type=int, default=256, help="samples per batch")
    bench.add_argument("--seconds", type=float, default=2.0, help="that each loader reads in each of two rounds")
    return parser
