"""`gyre status`, `top`, `page` and `drain`: the sessions and loads of a daemon, and its end."""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import shtab
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.output import (
    CommandOutput,
    cut,
    duration,
    emit,
    facts,
    live_terminal,
    mount_line,
    page_width,
    painted,
    stacked,
    to_json,
)
from gyre_client.display import decoder, measuring_line, plain, size
from gyre_client.errors import DaemonUnavailable, InvalidRequest, NotAllowed, NotInstalled
from gyre_client.page.training_run import TrainingRun
from gyre_client.page.watch import SessionRates, Watch, WatchedDaemon, session_rates
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import find_target, given_address

_UNKNOWN = "-"
_BAR_CELLS = 8
_TRANSPORTS = {pb.TRANSPORT_ARENA: "arena", pb.TRANSPORT_INLINE: "inline"}
_NUM_KEYS = 2  # the columns JOB and RANK


def status(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the state of the daemon, or its problems."""
    found = connection.status(check=args.check)
    if args.check:
        return _checkup(found)
    return CommandOutput(to_plain(found), full_text(found, page_width()))


def _checkup(status: pb.DaemonStatus) -> CommandOutput:
    """Returns the problems; the exit status is 1 if there are some."""
    if not status.HasField("checkup"):
        raise NotAllowed(
            "the daemon shows its problems to operators alone, or is older than this command. "
            "Ask an operator (`admin`)."
        )
    problems = list(status.checkup.problems)
    return CommandOutput(
        {"problems": problems}, "\n".join(problems) or "nothing to change", bool(problems)
    )


def to_plain(status: pb.DaemonStatus) -> dict[str, Any]:
    """Returns JSON-ready values; each session has its `rates`, None while they are not known."""
    value = plain(status)
    for session, plain_session in zip(status.sessions, value["sessions"], strict=True):
        rates = session_rates(session)
        plain_session["rates"] = rates.to_plain() if rates else None
    return value


_Cell = Callable[[pb.SessionState], str]


def _rate(read: Callable[[SessionRates], str]) -> _Cell:
    def cell(session: pb.SessionState) -> str:
        rates = session_rates(session)
        return _UNKNOWN if rates is None else read(rates)

    return cell


# The columns of the table of sessions, the important ones first: `top` leaves out the last ones if
# there is no room.
_COLUMNS: Mapping[str, _Cell] = {
    "JOB": lambda session: session.reader.job,
    "RANK": lambda session: f"{session.reader.rank}/{session.reader.world_size}",
    "BATCHES/S": _rate(lambda rates: f"{rates.batches_per_s:,.1f}"),
    "WINDOW": _rate(lambda rates: _bar(rates.occupancy)),
    "MEANING": _rate(lambda rates: rates.meaning),
    "STARVED": _rate(lambda rates: f"{rates.starved:.0%}"),
    "BYTES/S": _rate(lambda rates: size(rates.bytes_per_s)),
    "STEP": lambda session: str(session.resume_step),
    "DATASET": lambda session: session.dataset,
    "MEMORY": lambda session: size(session.memory_bytes),
    "BY": lambda session: _TRANSPORTS.get(session.transport, _UNKNOWN),
}
_MORE_COLUMNS: Mapping[str, _Cell] = {
    "USER": lambda session: session.user,
    "IN FLIGHT": lambda session: str(session.num_in_flight),
    "TRANSFORMS": lambda session: ", ".join(session.transforms) or _UNKNOWN,
    "SHARED BY": lambda session: str(session.num_sharing),
}
_STORAGE = ("STORAGE", "KIND", "OUTCOME", "REQUESTS", "BYTES", "FIRST BYTE")
_ENDPOINTS = ("ENDPOINT", "LIMIT", "IN FLIGHT", "WAITING", "RETRIES LEFT")
_MOUNTS = ("MOUNT", "FILE SYSTEM", "GUESS", "MEDIAN READ", "NOW")


def _metric_columns(sessions: Iterable[pb.SessionState]) -> dict[str, _Cell]:
    """Returns a column for each metric, unless it is 0 in all sessions.

    Integrals in batch-seconds are left out: the column WINDOW has the ratio of their growths.
    """
    names = {name for its in sessions for name, value in its.metrics.items() if value}
    return dict(
        _metric_column(name) for name in sorted(names) if not name.endswith("_batch_seconds_total")
    )


def _metric_column(name: str) -> tuple[str, _Cell]:
    """Returns the head and the cells of a metric, whose name ends in its unit."""
    head = name.removeprefix("gyre_job_").removesuffix("_total")
    form: Callable[[float], str] = _number
    for unit, of_unit in (("_seconds", duration), ("_bytes", size)):
        if head.endswith(unit):
            head, form = head.removesuffix(unit), of_unit
    return head.replace("_", " ").upper(), lambda session: form(session.metrics.get(name, 0.0))


def _number(value: float) -> str:
    return f"{value:,.15g}"


def _share(session: pb.SessionState, name: Literal["filled", "spread"]) -> str:
    return f"{getattr(session, name):.2%}" if session.HasField(name) else _UNKNOWN


def _samples(session: pb.SessionState) -> str:
    """Returns how many samples the epochs of a job have, if its dataset grows."""
    first, *later = session.stages or [pb.Stage()]
    more = [f", {each.num_samples:,} from epoch {each.first_epoch:,}" for each in later]
    return f"{first.num_samples:,}{''.join(more)}" if session.stages else _UNKNOWN


# Shown where a session has a value.
_OPTIONAL_COLUMNS: Mapping[str, _Cell] = {
    "PEER": lambda session: (
        str(session.reader.peer) if session.reader.HasField("peer") else _UNKNOWN
    ),
    "SAMPLES": _samples,
    "FILLED": lambda session: _share(session, "filled"),
    "SPREAD": lambda session: _share(session, "spread"),
}


def full_text(status: pb.DaemonStatus, num_columns: int) -> str:
    """Returns the whole status, in lines no longer than `num_columns`."""
    parts = [facts(_daemon_facts(status), num_columns)]
    if status.sessions:
        # a metric may have the name of a column, and then takes its place
        columns = {**_COLUMNS, **_MORE_COLUMNS, **_metric_columns(status.sessions)} | {
            name: read
            for name, read in _OPTIONAL_COLUMNS.items()
            if any(read(session) != _UNKNOWN for session in status.sessions)
        }
        parts += stacked(*_sessions_table(status, columns), _NUM_KEYS, num_columns)
    endpoints = [
        (each.name, each.limit, each.num_in_flight, each.num_waiting, each.num_retries_left)
        for each in status.endpoints
    ]
    series = [(_number(each.value), each.name) for each in status.metrics if each.value]
    tables: tuple[tuple[Sequence[str], Sequence[Sequence[object]], int], ...] = (
        (_STORAGE, [*map(_storage_row, status.storage)], 3),
        (_ENDPOINTS, endpoints, 1),
        (_MOUNTS, [*map(_mount_row, status.mounts)], 1),
        (("VALUE", "METRIC"), series, 1),
    )
    for each in tables:
        if each[1]:
            parts += stacked(*each, num_columns)
    return "\n\n".join(parts)


def _daemon_facts(status: pb.DaemonStatus) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = [
        ("version", status.version),
        ("pid", status.pid),
        ("state", _state(status)),
        ("up", duration(status.uptime_s)),
        ("memory", _memory(status)),
    ]
    if status.memory_abandoned_bytes:
        abandoned = size(status.memory_abandoned_bytes)
        pairs.append(("abandoned", f"{abandoned}, kept by clients whose sessions are over"))
    if status.num_hidden_sessions:
        pairs.append(("sessions", _sessions(status)))
    sent = f"{counted(status.num_batches_sent, 'batch', ',')}, {size(status.num_bytes_sent)}"
    pairs.append(("sent", sent))
    if status.num_substitutes_sent:
        samples = counted(status.num_substitutes_sent, "sample", ",")
        replaced = f"{samples} sent in place of corrupt ones"
        pairs.append(("substitutes", replaced))
    if status.num_samples_transformed:
        num_replaced = status.num_transform_workers_replaced
        work = (
            f"{counted(status.num_samples_transformed, 'sample', ',')} in "
            f"{duration(status.transform_cpu_s)} of processor time"
        )
        if num_replaced:
            work += f"; {counted(num_replaced, 'worker')} replaced"
        pairs.append(("transformed", work))
    pairs += [("measuring", measuring_line(each)) for each in status.measurings]
    pairs += [
        ("hangs", mount_line(each)) for each in status.mounts if each.HasField("hangs_since_s")
    ]
    if status.HasField("cache"):
        cache = status.cache
        num_reads = max(1, cache.num_hits + cache.num_joined + cache.num_misses)
        sizes = f"{size(cache.memory_bytes)} in memory, {size(cache.disk_bytes)} on disk"
        reads = (
            f"{cache.num_hits / num_reads:.0%} hits, {cache.num_joined:,} joined, "
            f"{cache.num_misses:,} missed, {cache.num_past:,} past it; "
            f"{counted(cache.num_evicted, 'block', ',')} evicted, {cache.num_corrupt:,} corrupt"
        )
        pairs += [("cache", sizes), ("cache reads", reads)]
    return pairs


def _storage_row(count: pb.StorageCount) -> tuple[str, ...]:
    first_byte = _UNKNOWN
    if count.first_byte_s:
        first_byte = f"{count.first_byte_s / max(1, count.num_requests) * 1000:,.1f} ms"
    num_requests, num_bytes = f"{count.num_requests:,}", size(count.num_bytes)
    return count.scheme, count.kind, count.outcome, num_requests, num_bytes, first_byte


def _mount_row(mount: pb.Mount) -> tuple[str, ...]:
    guess, now = ("slow" if slow else "fast" for slow in (mount.guessed_slow, mount.slow))
    read = f"{mount.read_s * 1000:,.1f} ms" if mount.HasField("read_s") else _UNKNOWN
    return printable(mount.path), printable(mount.file_system), guess, read, now


def summary_lines(status: pb.DaemonStatus, num_columns: int, num_lines: int | None) -> list[str]:
    """Returns the lines of one look at the sessions.

    They are at most `num_lines`, of at most `num_columns`.
    """
    batches_per_s = sum(session.lately.batches_per_s for session in status.sessions)
    bytes_per_s = sum(session.lately.bytes_per_s for session in status.sessions)
    daemon = f"gyred {status.version}, process {status.pid}, {_state(status)}"
    rates = f"{batches_per_s:,.1f} batches/s, {size(bytes_per_s)}/s"
    lines = [
        cut(f"{daemon}, up {duration(status.uptime_s)}", num_columns),
        cut(f"{_sessions(status)}, {rates}; {_memory(status)}", num_columns),
    ]
    if status.sessions:
        first, *_ = stacked(*_sessions_table(status, _COLUMNS), _NUM_KEYS, num_columns)
        lines += ["", *first.split("\n")]
    if num_lines is None or len(lines) <= num_lines:
        return lines
    kept = lines[: max(num_lines - 1, 0)]
    return [*kept, cut(f"and {len(lines) - len(kept)} more", num_columns)][:num_lines]


def _sessions(status: pb.DaemonStatus) -> str:
    text = counted(len(status.sessions), "session")
    hidden = status.num_hidden_sessions
    return f"{text} and {hidden} of other users" if hidden else text


def _state(status: pb.DaemonStatus) -> str:
    return "draining" if status.draining else "serving"


def _memory(status: pb.DaemonStatus) -> str:
    return f"{size(status.memory_reserved_bytes)} of {size(status.memory_budget_bytes)} reserved"


def _sessions_table(
    status: pb.DaemonStatus, columns: Mapping[str, _Cell]
) -> tuple[Sequence[str], list[list[str]]]:
    """Returns the heads, and one row per session, ordered by job, rank and peer."""
    sessions = sorted(
        status.sessions, key=lambda each: (each.reader.job, each.reader.rank, each.reader.peer)
    )
    return [*columns], [[read(session) for read in columns.values()] for session in sessions]


def _bar(occupancy: float | None) -> str:
    if occupancy is None:
        return _UNKNOWN
    num_full = round(occupancy * _BAR_CELLS)
    return f"{'#' * num_full}{'.' * (_BAR_CELLS - num_full)} {occupancy:4.0%}"


_TIMEOUT_S = 2.0  # of one call; a screen that hangs for longer looks dead


def top(connection: Connection, args: argparse.Namespace) -> None:
    """Prints one look per interval: in place on a terminal with keys, else one after the other.

    With --json each look is one document per line; with --once there is only one.

    Raises:
        DaemonUnavailable: There is no daemon; a live screen waits for it instead.
    """
    if not args.interval:
        raise InvalidRequest("--interval is 0; a look takes some time")
    if args.once or args.json or not (sys.stdin.isatty() and sys.stdout.isatty()):
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


def drain(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Lets the daemon stop: it sends the batches in flight, and opens no more sessions."""
    answer = connection.drain()
    text = (
        f"The daemon at {connection.address.text} drains {answer.num_sessions} open sessions and "
        f"ends, after {duration(answer.timeout_s)} at the latest."
    )
    return CommandOutput(plain(answer), text)


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
        server = importlib.import_module("gyre_client.page.web")
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
