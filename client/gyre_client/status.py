"""What a daemon is doing, as lines for people: `gyre status` says all of it, `gyre top` as much as there is room for."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.pace import Pace, pace
from gyre_client.report import cut, duration, facts, fitted, size, stacked
from gyre_client.wire import plain

_UNKNOWN = "-"
_BAR_CELLS = 8
_NUM_KEYS = 2  # job and rank


def to_plain(status: pb.DaemonStatus) -> dict[str, Any]:
    """Returns JSON-ready values: the answer, each session with its pace, or None where that is not known yet."""
    value = plain(status)
    for session, its in zip(status.sessions, value["sessions"], strict=True):
        found = pace(session)
        its["pace"] = found.to_plain() if found else None
    return value


class _Row(NamedTuple):
    session: pb.SessionState
    pace: Pace | None


class _Column(NamedTuple):
    """Of the table of sessions; the greater its `rank`, the sooner it goes where there is no room."""

    name: str
    rank: int
    read: Callable[[_Row], str]


def _of_pace(read: Callable[[Pace], str]) -> Callable[[_Row], str]:
    return lambda row: _UNKNOWN if row.pace is None else read(row.pace)


_COLUMNS = (
    _Column("JOB", 0, lambda row: row.session.reader.job),
    _Column("RANK", 4, lambda row: f"{row.session.reader.rank}/{row.session.reader.world_size}"),
    _Column("DATASET", 8, lambda row: row.session.dataset),
    _Column("BATCHES/S", 1, _of_pace(lambda pace: f"{pace.batches_per_s:,.1f}")),
    _Column("BYTES/S", 6, _of_pace(lambda pace: size(pace.bytes_per_s))),
    _Column("WINDOW", 2, _of_pace(lambda pace: _bar(pace.occupancy))),
    _Column("MEANING", 3, _of_pace(lambda pace: pace.meaning)),
    _Column("STARVED", 5, _of_pace(lambda pace: f"{pace.starved:.0%}")),
    _Column("STEP", 7, lambda row: str(row.session.next_step)),
    _Column("MEMORY", 9, lambda row: size(row.session.memory_bytes)),
    _Column("BY", 10, lambda row: _transport(row.session)),
)
_MORE_COLUMNS = (
    _Column("READY", 0, lambda row: str(row.session.num_ready)),
    _Column("IN FLIGHT", 0, lambda row: str(row.session.num_in_flight)),
    _Column("HELD", 0, lambda row: str(row.session.num_held)),
    _Column("SHARED BY", 0, lambda row: str(row.session.num_sharing)),
    _Column("STORAGE WAIT", 0, lambda row: duration(row.session.wait_storage_s)),
    _Column("PROCESSOR WAIT", 0, lambda row: duration(row.session.wait_processor_s)),
    _Column("TRAINER WAIT", 0, lambda row: duration(row.session.wait_trainer_s)),
)


def full_text(status: pb.DaemonStatus, num_columns: int) -> str:
    """Returns all there is to say, in lines no longer than `num_columns`."""
    pairs = [
        ("version", status.version),
        ("pid", status.pid),
        ("state", "draining" if status.draining else "serving"),
        ("up", duration(status.uptime_s)),
        ("memory", f"{size(status.memory_reserved_bytes)} of {size(status.memory_budget_bytes)} reserved"),
        ("sent", f"{status.num_batches_sent:,} batches, {size(status.num_bytes_sent)}"),
    ]
    if status.memory_abandoned_bytes:
        pairs.insert(5, ("abandoned", f"{size(status.memory_abandoned_bytes)}, kept by clients whose sessions are over"))
    if status.HasField("cache"):
        cache = status.cache
        num_reads = max(1, cache.num_hits + cache.num_joined + cache.num_misses)
        reads = f"{cache.num_hits / num_reads:.0%} hits, {cache.num_joined:,} joined, {cache.num_misses:,} missed"
        blocks = f"{cache.num_evicted:,} blocks evicted, {cache.num_corrupt:,} corrupt"
        pairs.append(("cache", f"{size(cache.memory_bytes)} in memory, {size(cache.disk_bytes)} on disk"))
        pairs.append(("cache reads", f"{reads}, {cache.num_past:,} past it; {blocks}"))
    parts = [facts(pairs, num_columns)]
    if status.sessions:
        columns = (*_COLUMNS, *_MORE_COLUMNS)
        parts.append(stacked([column.name for column in columns], _cells(status, columns), _NUM_KEYS, num_columns))
    if status.storage:
        rows = [
            (s.scheme, s.kind, s.outcome, f"{s.num_requests:,}", size(s.num_bytes), _mean_ms(s.first_byte_s, s.num_requests))
            for s in status.storage
        ]
        header = ("STORAGE", "KIND", "OUTCOME", "REQUESTS", "BYTES", "FIRST BYTE")
        parts.append(stacked(header, rows, 3, num_columns))
    if status.endpoints:
        names = ("ENDPOINT", "LIMIT", "IN FLIGHT", "WAITING", "RETRIES LEFT")
        states = [(e.name, e.limit, e.num_in_flight, e.num_waiting, e.num_retries_left) for e in status.endpoints]
        parts.append(stacked(names, states, 1, num_columns))
    return "\n\n".join(parts)


def _mean_ms(total_s: float, num_requests: int) -> str:
    return f"{total_s / num_requests * 1000:,.1f} ms" if total_s else _UNKNOWN


def screen(status: pb.DaemonStatus, num_columns: int, num_lines: int | None) -> list[str]:
    """Returns the lines of one look, none longer than `num_columns`, at most `num_lines`; None for any number."""
    lines = [cut(line, num_columns) for line in _head(status)]
    if status.sessions:
        ranks = [column.rank for column in _COLUMNS]
        lines += ["", *fitted([column.name for column in _COLUMNS], _cells(status, _COLUMNS), ranks, num_columns)]
    if num_lines is None or len(lines) <= num_lines:
        return lines
    kept = lines[: max(num_lines - 1, 0)]
    return [*kept, cut(f"and {len(lines) - len(kept)} more", num_columns)][:num_lines]


def _head(status: pb.DaemonStatus) -> list[str]:
    state = "draining" if status.draining else "serving"
    batches_per_s = sum(session.lately.batches_per_s for session in status.sessions)
    bytes_per_s = sum(session.lately.bytes_per_s for session in status.sessions)
    memory = f"{size(status.memory_reserved_bytes)} of {size(status.memory_budget_bytes)} reserved"
    return [
        f"gyred {status.version}, process {status.pid}, {state}, up {duration(status.uptime_s)}",
        f"{len(status.sessions)} sessions, {batches_per_s:,.1f} batches/s, {size(bytes_per_s)}/s; {memory}",
    ]


def _cells(status: pb.DaemonStatus, columns: Sequence[_Column]) -> list[list[str]]:
    """Rows in the order of jobs and ranks."""
    sessions = sorted(status.sessions, key=lambda session: (session.reader.job, session.reader.rank))
    rows = [_Row(session, pace(session)) for session in sessions]
    return [[column.read(row) for column in columns] for row in rows]


def _bar(occupancy: float | None) -> str:
    if occupancy is None:
        return _UNKNOWN
    num_full = round(occupancy * _BAR_CELLS)
    return f"{'#' * num_full}{'.' * (_BAR_CELLS - num_full)} {occupancy:4.0%}"


def _transport(session: pb.SessionState) -> str:
    return pb.Transport.Name(session.transport).removeprefix("TRANSPORT_").lower()
