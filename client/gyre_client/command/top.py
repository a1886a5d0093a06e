"""`gyre top`: shows a daemon's sessions again and again, until the user leaves."""

import argparse
import sys
import time

from gyre_protos.text import printable

from gyre_client.command.status import summary_lines, to_plain
from gyre_client.display.colour import painted
from gyre_client.display.formatting import cut, emit, page_width, to_json
from gyre_client.display.terminal import live_terminal
from gyre_client.errors import DaemonUnavailable, InvalidRequest
from gyre_client.transport.connection import Connection

_TIMEOUT_S = 2.0  # of one call; a screen that hangs for longer looks dead


def top(connection: Connection, args: argparse.Namespace) -> None:
    """Prints one look per interval: in place on a terminal, else one after the other.

    With --json each look is one document per line; with --once there is only one.

    Raises:
        DaemonUnavailable: There is no daemon; a live screen waits for it instead.
    """
    if not args.interval:
        raise InvalidRequest("--interval is 0; a look takes some time")
    if args.once or args.json or not sys.stdout.isatty():
        _print(connection, args)
    else:
        _show(connection, args.interval)


def _print(connection: Connection, args: argparse.Namespace) -> None:
    while True:
        status = connection.status(_TIMEOUT_S)
        if args.json:
            emit(to_json(to_plain(status)))
        else:
            emit("\n".join([*summary_lines(status, page_width(), None), ""]))
        if args.once:
            return
        time.sleep(args.interval)


def _show(connection: Connection, interval_s: float) -> None:
    """Draws on the terminal; says so while the daemon is away, and waits for it."""
    with live_terminal(sys.stdout) as terminal:
        while True:
            columns, num_lines = terminal.size
            try:
                lines = summary_lines(connection.status(_TIMEOUT_S), columns, num_lines)
            except DaemonUnavailable as failure:
                lines = [
                    cut(" ".join(str(failure).split()), columns),
                    cut("waiting for it; q leaves", columns),
                ][:num_lines]
            terminal.draw([painted(printable(line), sys.stdout) for line in lines])
            if not terminal.pause(interval_s):
                return
