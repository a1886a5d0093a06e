"""`gyre page`: daemons, jobs and their samples in a browser of this machine."""

import argparse
import importlib
from pathlib import Path

import shtab

from gyre_client.display.formatting import emit
from gyre_client.errors import InvalidRequest, NotInstalled
from gyre_client.page.sample_views import decoder
from gyre_client.page.training_run import TrainingRun
from gyre_client.page.watch import Watch, WatchedDaemon
from gyre_client.targets.target import find_target, given_address

_MAX_PORT = 65535


def add_page_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the daemons and runs to show."""
    about = "unix:/path.sock, tcp:host:port or tls:host:port; GYRE_ADDRESS if absent; repeatable"
    parser.add_argument("--daemon", action="append", default=[], metavar="ADDRESS", help=about)
    about = "also trust the daemons of this user (GYRE_DAEMON_USER)"
    parser.add_argument("--daemon-user", metavar="USER", help=about)
    about = "the folder of a run of gyre-train (its run.out); repeatable"
    run = parser.add_argument(
        "--run", action="append", default=[], type=Path, metavar="FOLDER", dest="runs", help=about
    )
    run.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    about = "show token ids as text: a file of the library tokenizers, or bytes"
    tokenizer = parser.add_argument("--tokenizer", metavar="FILE", help=about)
    tokenizer.complete = shtab.FILE  # type: ignore[attr-defined]
    about = "of 127.0.0.1; any free one if absent"
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help=about)


def page(args: argparse.Namespace) -> None:
    """Serves the page until the user ends it; it prints its address once.

    Raises:
        InvalidRequest: There is neither a daemon nor a run to show; or a flag makes no sense.
        NotInstalled: The extra `page` is missing.
    """
    try:
        server = importlib.import_module("gyre_client.page.server")
    except ModuleNotFoundError as error:
        raise NotInstalled.needs("gyre page", error.name, "page") from error
    if not 0 <= args.port <= _MAX_PORT:
        raise InvalidRequest(f"--port is {args.port}; it must be 0 to {_MAX_PORT}")
    decode = decoder(args.tokenizer)
    runs = [TrainingRun(number, path) for number, path in enumerate(args.runs)]
    addresses = args.daemon or [each for each in [given_address(None)] if each]
    if not addresses and not runs:
        raise InvalidRequest(
            "which daemon? Give --daemon unix:/path.sock, tcp:host:port or tls:host:port, or set "
            "GYRE_ADDRESS; or show a run of gyre-train with --run FOLDER"
        )
    # a run alone is shown with the samples that a private daemon reads
    wanted: list[str | None] = [*addresses] or [None]
    daemons = [
        WatchedDaemon(number, find_target(each, args.daemon_user))
        for number, each in enumerate(wanted)
    ]
    watch = Watch(daemons, runs)
    try:
        server.serve_page(watch, decode, args.port, emit)
    finally:
        watch.close()
