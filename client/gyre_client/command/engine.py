"""`--engine`: who does the units of a command, the daemon here or the nodes of a Ray cluster."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.display.progress import Bar
from gyre_client.messages.requests import is_location
from gyre_client.prepare.shards import Work, run_on_shards
from gyre_client.prepare.units import LOCAL, Daemons, check_engine
from gyre_client.transport.connection import Connection

# Of a private daemon on a node of the cluster, in bytes: units read once, so that a cache is of no
# use to them.
_CACHE_BYTES = str(64 << 20)


def add_engine_argument(
    parser: argparse.ArgumentParser, prepare: Callable[[argparse.Namespace], None] | None = None
) -> None:
    """Adds --engine.

    Args:
        parser: Of the command.
        prepare: Called before a daemon is started, unless the engine is `local`.
    """
    parser.add_argument(
        "--engine",
        default=LOCAL,
        metavar="local|ray|ray://HOST:PORT",
        help="who does the work: the daemon here, or tasks of Ray, on this machine or a cluster",
    )

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
    bar: Bar,
) -> Mapping[int, Any]:
    """Has the shards of the dataset worked on by the engine; see `run_on_shards`."""
    daemons, dataset = daemons_of(connection, args), dataset_of(args)
    return run_on_shards(works, connection, dataset, transforms, args.engine, daemons, bar.update)
