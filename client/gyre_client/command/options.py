"""Arguments that several commands have, such as `--transforms` and `--engine`, and their types."""

import argparse
import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shtab
from gyre_protos.text import bytes_of, parse_toml
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.units import LOCAL, Daemons, Work, check_engine, run_on_shards
from gyre_client.display import ProgressBar
from gyre_client.errors import InvalidRequest
from gyre_client.transport.arguments import dataset_ref, is_location, transform_list
from gyre_client.transport.connection import Connection

_MAX_INTERVAL_S = 3600


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds DATASET, --format, --option and --pack."""
    dataset = parser.add_argument("dataset", metavar="DATASET", help="a name, a path or a URI")
    dataset.complete = shtab.FILE  # type: ignore[attr-defined]
    add_definition_arguments(parser)


def add_definition_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --format, --option and --pack."""
    add = parser.add_argument
    add("--format", help="of the data at a path or URI; found by the names of the files if absent")
    about = "of the format; repeatable"
    add("--option", action="append", default=[], type=option, metavar="KEY=VALUE", help=about)
    about = "pack samples into sequences: field=NAME and length=TOKENS at least; repeatable"
    add("--pack", action="append", default=[], type=option, metavar="KEY=VALUE", help=about)


def dataset_of(args: argparse.Namespace) -> pb.DatasetRef:
    """Returns the dataset that the arguments name."""
    return dataset_ref(args.dataset, args.format, dict(args.option), dict(args.pack) or None)


def option(text: str) -> tuple[str, object]:
    """Parses KEY=VALUE; a value other than valid TOML is a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def interval_s(text: str) -> float:
    """Parses a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds from 0 to {_MAX_INTERVAL_S}"
        )
    return seconds


def size_bytes(text: str) -> int:
    """Parses a size such as 1048576, 1MiB or 1MB, to bytes."""
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: {error}") from error


def stages(text: str) -> list[pb.Stage]:
    """Parses EPOCH:SAMPLES,EPOCH:SAMPLES,... to the stages of a job."""
    found = []
    for each in text.split(","):
        epoch, _, samples = each.partition(":")
        try:
            found.append(pb.Stage(first_epoch=int(epoch), num_samples=int(samples)))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{each!r} is not EPOCH:SAMPLES, such as 3:80000 for 80,000 from epoch 3 on"
            ) from None
    return found


def steps(text: str) -> tuple[int, int | None]:
    """Parses S to (S, None), and the half-open range A:B to (A, B)."""
    first, colon, stop = text.partition(":")
    try:
        return int(first), int(stop) if colon else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range A:B") from None


_KEY = "transforms"
_MAX_BYTES = 1 << 20  # a chain has some hundred; a request of this size is refused


def add_transforms_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds --transforms to a parser, or to a group of its arguments."""
    about = (
        "a script's Loader(transform=...): a JSON list, or the key `transforms` of a "
        "file that ends in .toml; those of the dataset's definition if absent"
    )
    option = parser.add_argument("--transforms", type=Path, metavar="FILE", help=about)
    option.complete = shtab.FILE  # type: ignore[attr-defined]


def transforms_of(args: argparse.Namespace) -> pb.TransformList | None:
    """Returns the chain in the file that the arguments name; None where they name none.

    Raises:
        InvalidRequest: The file cannot be read, or has no list of transforms.
    """
    path: Path | None = args.transforms
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"--transforms {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise InvalidRequest(f"--transforms {path} has more than {_MAX_BYTES} bytes; name a chain")
    found = _of_toml(path, data) if path.suffix == ".toml" else _of_json(path, data)
    try:
        return transform_list(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def _of_json(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"--transforms {path} is no JSON ({error}); it must be the list that "
            "Loader(transform=...) takes, or TOML in a file that ends in .toml"
        ) from error


def _of_toml(path: Path, data: bytes) -> Any:
    try:
        table = parse_toml(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--transforms {path} is no TOML: {error}") from error
    if table.keys() != {_KEY}:
        keys = ", ".join(map(repr, table)) or "none"
        raise InvalidRequest(
            f"--transforms {path} must have the key {_KEY!r} and no other, and has {keys}. Write "
            f"each transform as a table [[{_KEY}]]."
        )
    return table[_KEY]


# Of a private daemon on a node of the cluster, in bytes: units read once, so that a cache is of no
# use to them.
_CACHE_BYTES = str(64 << 20)


def add_engine_argument(
    parser: argparse.ArgumentParser, prepare: Callable[[argparse.Namespace], None] | None = None
) -> None:
    """Adds --engine.

    `prepare` is called before a daemon is started, unless the engine is `local`.
    """
    about = "who does the work: the daemon here, or tasks of Ray, on this machine or a cluster"
    names = "local|ray|ray://HOST:PORT"
    parser.add_argument("--engine", default=LOCAL, metavar=names, help=about)

    def check(args: argparse.Namespace) -> None:
        if args.engine != LOCAL:
            check_engine(args.engine)
            if prepare:
                prepare(args)

    parser.set_defaults(prepare=check)


def daemons_of(connection: Connection, args: argparse.Namespace) -> Daemons:
    """Returns how nodes of a cluster find the daemon that this command means."""
    if args.address or not is_location(args.dataset, args.format):
        return Daemons(connection.address.text, args.daemon_user)
    ours = {name: os.environ[name] for name in os.environ if name.startswith("GYRE_")}
    return Daemons("", None, {"GYRE_CACHE_MEMORY": _CACHE_BYTES, **ours})


def on_shards(
    works: Sequence[Work],
    connection: Connection,
    args: argparse.Namespace,
    transforms: pb.TransformList | None,
    bar: ProgressBar,
) -> Mapping[int, Any]:
    """Has the shards of the dataset worked on by the engine; see `run_on_shards`."""
    daemons, dataset = daemons_of(connection, args), dataset_of(args)
    return run_on_shards(works, connection, dataset, transforms, args.engine, daemons, bar.update)
