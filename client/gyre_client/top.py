"""`gyre top`: what the sessions of a daemon do, again and again until the user has seen enough."""

import sys
import time
from collections.abc import Callable, Iterator

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.connection import Connection
from gyre_client.errors import DaemonUnavailable
from gyre_client.report import cut, to_json
from gyre_client.status import Snapshot, screen
from gyre_client.terminal import on_terminal

_PLAIN_COLUMNS = 200  # of a line that no terminal cuts
_PATIENCE_S = 2.0  # of one look

Pause = Callable[[float], bool]


def top(connection: Connection, interval_s: float, *, once: bool, as_json: bool) -> None:
    """Shows one snapshot per interval: on a terminal in place, elsewhere and as JSON one after the other.

    Args:
        connection: To the daemon.
        interval_s: Between two looks; rates are means over it.
        once: Show one, and end.
        as_json: One document per line.

    Raises:
        DaemonUnavailable: There is no daemon; a live screen waits for it instead.
    """
    if once or as_json or not sys.stdout.isatty():
        _print(connection, interval_s, once=once, as_json=as_json)
    else:
        _show(connection, interval_s)


def look(connection: Connection, interval_s: float, pause: Pause) -> Iterator[Snapshot]:
    """Yields a snapshot after each pause, for as long as `pause` says so."""
    before = connection.status(_PATIENCE_S)
    while pause(interval_s):
        after = connection.status(_PATIENCE_S)
        yield Snapshot.between(before, after)
        before = after


def _print(connection: Connection, interval_s: float, *, once: bool, as_json: bool) -> None:
    for snapshot in look(connection, interval_s, _sleep):
        text = to_json(snapshot.to_plain()) if as_json else "\n".join([*screen(snapshot, _PLAIN_COLUMNS, None), ""])
        print(text, flush=True)
        if once:
            return


def _show(connection: Connection, interval_s: float) -> None:
    """A daemon that goes away may come back: the screen says that it is waited for."""
    with on_terminal(sys.stdout) as terminal:
        before: pb.DaemonStatus | None = None
        while True:
            columns, num_lines = terminal.size
            try:
                after = connection.status(_PATIENCE_S)
                lines = screen(Snapshot.between(before or after, after), columns, num_lines)
                before = after
            except DaemonUnavailable as failure:
                lines = [cut(" ".join(str(failure).split()), columns), cut("waiting for it; q leaves", columns)][:num_lines]
            terminal.draw(lines)
            if not terminal.pause(interval_s):
                return


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True
