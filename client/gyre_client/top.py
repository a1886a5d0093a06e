"""`gyre top`: what the sessions of a daemon do, again and again until the user has seen enough."""

import sys
import time

from gyre_client.colour import painted
from gyre_client.connection import Connection
from gyre_client.errors import DaemonUnavailable
from gyre_client.report import cut, page_width, to_json
from gyre_client.status import screen, to_plain
from gyre_client.terminal import on_terminal

_PATIENCE_S = 2.0  # of one look


def top(connection: Connection, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Shows one look per interval: on a terminal in place, elsewhere and as JSON one after the other.

    Args:
        connection: To the daemon.
        interval_s: Between two looks.
        once: Look once, and end.
        as_json: One document per line.

    Raises:
        DaemonUnavailable: There is no daemon; a live screen waits for it instead.
    """
    if once or as_json or not sys.stdout.isatty():
        _print(connection, interval_s, once=once, as_json=as_json)
    else:
        _show(connection, interval_s)


def _print(connection: Connection, interval_s: float, *, once: bool, as_json: bool) -> None:
    while True:
        status = connection.status(_PATIENCE_S)
        text = to_json(to_plain(status)) if as_json else "\n".join([*screen(status, page_width(), None), ""])
        print(text if as_json else painted(text, sys.stdout), flush=True)
        if once:
            return
        time.sleep(interval_s)


def _show(connection: Connection, interval_s: float) -> None:
    """A daemon that goes away may come back: the screen says that it is waited for."""
    with on_terminal(sys.stdout) as terminal:
        while True:
            columns, num_lines = terminal.size
            try:
                lines = screen(connection.status(_PATIENCE_S), columns, num_lines)
            except DaemonUnavailable as failure:
                lines = [cut(" ".join(str(failure).split()), columns), cut("waiting for it; q leaves", columns)][:num_lines]
            terminal.draw([painted(line, sys.stdout) for line in lines])
            if not terminal.pause(interval_s):
                return
