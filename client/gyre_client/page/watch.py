"""Looks at daemons once a second: jobs with a verdict each, and how fast storage answered."""

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TypeVar

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display import measuring_line, plain
from gyre_client.errors import GyreError, InvalidRequest
from gyre_client.page.training_run import TrainingRun
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import Target

_Shown = TypeVar("_Shown")
LOOK_S = 1.0
_STATUS_TIMEOUT_S = 2.0
_DATASETS_EVERY_S = 10.0
# The heat map: five minutes. Narrower columns have too few requests of a quiet storage, and more of
# them do not fit a narrow window.
_COLUMN_S, _NUM_COLUMNS = 5.0, 60
_MAX_ROWS = 64  # endpoints and mounts of a daemon
# The strip of a job: each look asks for this many new reads at most, a call each.
_CALLS_PER_LOOK, _MAX_READS = 24, 160


STORAGE_BOUND, PROCESSOR_BOUND = "storage-bound", "processor-bound"
TRAINER_BOUND, BALANCED, IDLE = "trainer-bound", "balanced", "idle"
# Window occupancies that count as empty and as full. Credits and reads come in quarters of a
# window, so a window is hardly ever quite empty or quite full.
_EMPTY, _NEARLY_FULL = (0.25, 0.75)
# A trainer that lacks a batch for less of its time than this loses nothing worth a search.
STARVED = 0.05
_MIN_ELAPSED_S = 0.1  # a shorter time says nothing about a rate


@dataclass(frozen=True, slots=True)
class SessionRates:
    """One session over its last ten seconds, or since it began.

    Attributes:
        batches_per_s: Batches that the trainer took.
        bytes_per_s: Payload of those batches.
        occupancy: The mean share of the prefetch window that was ready, in [0, 1]; None if there
            was no window.
        starved: The share of the time that the trainer had no batch to go on with, in [0, 1], as
            its client reports.
        wait_storage: The share of the time that the client had credit and no batch was ready
            because storage had not answered.
        wait_processor: The same, because no processor was free to copy or decode the batch.
        wait_trainer: The share of the time that a batch was ready and the client had no credit.
    """

    batches_per_s: float
    bytes_per_s: float
    occupancy: float | None
    starved: float
    wait_storage: float
    wait_processor: float
    wait_trainer: float

    @property
    def meaning(self) -> str:
        """The bottleneck of the session.

        An empty window waits for storage or for a processor, a full one for its trainer. So does an
        empty one whose trainer never waits: it has its batches already, or asks for no more yet.
        Without a window, a trainer that takes batches has them all: these are the last ones.
        """
        if self.occupancy is None:
            return TRAINER_BOUND if self.batches_per_s else IDLE
        if self.occupancy <= _EMPTY and self.starved >= STARVED:
            return PROCESSOR_BOUND if self.wait_processor > self.wait_storage else STORAGE_BOUND
        return BALANCED if _EMPTY < self.occupancy < _NEARLY_FULL else TRAINER_BOUND

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {**asdict(self), "meaning": self.meaning}


def session_rates(session: pb.SessionState) -> SessionRates | None:
    """Returns the rates of a session; None if it has just begun."""
    lately = session.lately
    elapsed_s = lately.elapsed_s
    if elapsed_s < _MIN_ELAPSED_S:
        return None
    size_s = lately.window_size_batch_s
    return SessionRates(
        batches_per_s=lately.batches_per_s,
        bytes_per_s=lately.bytes_per_s,
        occupancy=_share(lately.window_ready_batch_s, size_s) if size_s > 0 else None,
        starved=_share(lately.trainer_waited_s, elapsed_s),
        wait_storage=_share(lately.wait_storage_s, elapsed_s),
        wait_processor=_share(lately.wait_processor_s, elapsed_s),
        wait_trainer=_share(lately.wait_trainer_s, elapsed_s),
    )


def _share(part: float, whole: float) -> float:
    """Returns a share in [0, 1]: a wait is reported when it ends, so it may exceed the interval."""
    return min(max(part / whole, 0.0), 1.0)


class LatencyMap:
    """Mean times to the first byte, by endpoint or mount and by column of five seconds."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, float]] = {}
        self._rows: dict[str, tuple[str, deque[float | None]]] = {}
        self._sums: dict[str, list[float]] = {}
        self._began_s: float | None = None

    def add(self, status: pb.DaemonStatus, now_s: float) -> None:
        """Counts one look at the daemon."""
        for each in status.endpoints[:_MAX_ROWS]:
            num, sum_s = self._before.get(each.name, (each.num_answered, each.first_byte_s))
            if each.num_answered > num:  # it falls where the daemon was started again
                found = self._sums.setdefault(each.name, [0.0, 0.0])
                found[0] += each.num_answered - num
                found[1] += each.first_byte_s - sum_s
            self._before[each.name] = each.num_answered, each.first_byte_s
            self._row(each.name, "object storage or slow mount")
        there = {each.name for each in status.endpoints}
        for mount in status.mounts[:_MAX_ROWS]:
            if mount.path not in there and mount.HasField("read_s"):
                self._row(mount.path, mount.file_system)
                self._sums[mount.path] = [1, mount.read_s]
        self._began_s = now_s if self._began_s is None else self._began_s
        while now_s - self._began_s >= _COLUMN_S:
            self._began_s += _COLUMN_S
            for name, (_, cells) in self._rows.items():
                count, total_s = self._sums.pop(name, (0.0, 0.0))
                cells.append(total_s / count if count else None)

    def _row(self, name: str, kind: str) -> None:
        if name not in self._rows and len(self._rows) < _MAX_ROWS:
            length = max((len(cells) for _, cells in self._rows.values()), default=0)
            self._rows[name] = (kind, deque([None] * length, maxlen=_NUM_COLUMNS))

    def plain(self) -> dict[str, Any]:
        """Returns the rows, each with its newest column last; a cell is in seconds, or None."""
        rows = [
            {"name": printable(name), "kind": printable(kind), "cells": [*cells]}
            for name, (kind, cells) in sorted(self._rows.items())
        ]
        return {"column_s": _COLUMN_S, "num_columns": _NUM_COLUMNS, "rows": rows}


class WatchedDaemon:
    """One daemon: its calls, and its last answers.

    Attributes:
        number: On the page.
        connection: Its calls, safe from any thread.
        jobs: As the page shows them, after the last look.
    """

    def __init__(self, number: int, target: Target) -> None:
        self.number = number
        self.connection = Connection(target.address)
        self.jobs: list[dict[str, Any]] = []
        self._target = target
        self._status = pb.DaemonStatus()
        self._error = "not asked yet"
        self._datasets: list[pb.DatasetSummary] = []
        self._listed_s = -_DATASETS_EVERY_S
        self._latencies = LatencyMap()
        self._reads: dict[str, _Reads] = {}

    @property
    def name(self) -> str:
        """Its address."""
        return self._target.address.text

    @property
    def datasets(self) -> Sequence[pb.DatasetSummary]:
        """Those that it serves by name, as of the last seconds."""
        return self._datasets

    def look(self) -> None:
        """Asks for the status; a daemon that does not answer is shown as such."""
        now_s = time.monotonic()
        try:
            if now_s - self._listed_s >= _DATASETS_EVERY_S:
                self._datasets = list(self.connection.list_datasets().datasets)
                self._listed_s = now_s
            self._status = self.connection.status(_STATUS_TIMEOUT_S)
            self._error = ""
        except GyreError as error:
            self._error, self.jobs = " ".join(str(error).split()), []
            return
        self._latencies.add(self._status, now_s)
        uris = {each.name: each.uri for each in self._datasets}
        self.jobs = jobs_of(self.number, self._status.sessions, uris)
        there = {job["key"] for job in self.jobs}
        self._reads = {key: reads for key, reads in self._reads.items() if key in there}

    def session_of(self, key: str) -> pb.SessionState:
        """Returns the session of a job with the least progress; its cursor is of the whole job.

        Raises:
            InvalidRequest: The job has ended.
        """
        found = [
            each
            for each in self._status.sessions
            if f"{self.number}/{each.user}/{each.reader.job}" == key
        ]
        if not found:
            raise InvalidRequest("this job has ended. Choose another one.")
        return min(found, key=lambda each: each.resume_step)

    def step_request(self, key: str, step: int) -> pb.LocateStepRequest:
        """Returns the request for the samples of a job's step."""
        session = self.session_of(key)
        ref = pb.DatasetRef(session=session.handle)
        return pb.LocateStepRequest(dataset=ref, cursor=session.cursor, step=step)

    def reads_of(self, key: str) -> list[dict[str, Any]]:
        """Returns how long the last reads of a job took, the oldest first."""
        session = self.session_of(key)
        reads = self._reads.setdefault(key, _Reads())
        return reads.update(self.connection, session)

    def why(self, key: str, step: int) -> list[dict[str, Any]]:
        """Returns how the time of a step's batches was spent."""
        session = self.session_of(key)
        response = self.connection.explain(
            pb.ExplainStepRequest(dataset=pb.DatasetRef(session=session.handle), step=step)
        )
        return [plain(each) for each in response.timings]

    def plain(self) -> dict[str, Any]:
        """Returns everything that the page shows of the daemon itself."""
        status, shown = self._status, [*self._status.sessions]
        sessions = [each for each in shown if not each.reader.job.startswith(OWN_JOBS)]
        return {
            "number": self.number,
            "name": self.name,
            "error": self._error,
            "version": status.version,
            "uptime_s": status.uptime_s,
            "draining": status.draining,
            "reserved_bytes": status.memory_reserved_bytes,
            "budget_bytes": status.memory_budget_bytes,
            "abandoned_bytes": status.memory_abandoned_bytes,
            "num_hidden": status.num_hidden_sessions,
            "num_datasets": len(self._datasets),
            "measuring": [measuring_line(each) for each in status.measurings[:8]],
            "cache": plain(status.cache) if status.HasField("cache") else None,
            "endpoints": [
                {**plain(each), "name": printable(each.name)}
                for each in status.endpoints[:_MAX_ROWS]
            ],
            "mounts": [
                {
                    **plain(each),
                    "path": printable(each.path),
                    "file_system": printable(each.file_system),
                }
                for each in status.mounts[:_MAX_ROWS]
            ],
            "latency": self._latencies.plain(),
            "users": users_of(sessions),
        }

    def close(self) -> None:
        """Ends the calls, and this use of a private daemon."""
        self.connection.close()
        self._target.release()


class _Reads:
    """The last reads of one job. A read has a batch, or several that were read together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: dict[tuple[int, int], dict[str, Any]] = {}

    def update(self, connection: Connection, session: pb.SessionState) -> list[dict[str, Any]]:
        """Asks for steps that are not known yet, the newest first."""
        with self._lock:
            known = {step for read in self._reads for step in range(*read)}
            step = session.next_step + session.num_ready - 1
            ref = pb.DatasetRef(session=session.handle)
            for _ in range(_CALLS_PER_LOOK):
                while step in known:
                    step -= 1
                if step < 0 or step < max(known, default=0) - _MAX_READS:
                    break
                asked = pb.ExplainStepRequest(dataset=ref, step=step, job=session.reader.job)
                try:
                    timings = connection.explain(asked).timings
                except InvalidRequest:  # the daemon has forgotten it, or has not read it yet
                    if step <= session.next_step:
                        break
                    step -= 1
                    continue
                for each in timings:
                    self._add(each)
                    known.update(range(each.first_step, each.stop_step))
                known.add(step)
            kept = sorted(self._reads)[-_MAX_READS:]
            self._reads = {key: self._reads[key] for key in kept}
            return [*self._reads.values()]

    def _add(self, timing: pb.BatchTiming) -> None:
        """Adds a read; of several ranks, the one that took longest counts."""
        key = timing.first_step, timing.stop_step
        if key in self._reads and self._reads[key]["total_s"] >= timing.total_s:
            return
        is_storage = timing.storage_s > timing.total_s / 2
        self._reads[key] = {
            "first_step": timing.first_step,
            "stop_step": timing.stop_step,
            "total_s": timing.total_s,
            "bound": "storage" if is_storage else "processor",
            "awaited": timing.awaited,
            "failed": bool(timing.error),
        }


class Watch:
    """All daemons and runs of the page, and one text about them each second.

    Attributes:
        is_over: Ends `texts` with the next one; no other way ends the streams of browsers.
    """

    def __init__(self, daemons: Sequence[WatchedDaemon], runs: Sequence[TrainingRun]) -> None:
        self.daemons, self.runs = daemons, runs
        self.is_over = False
        self._text = ""
        self._number = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Looks at everything again and again, until it is cancelled."""
        while True:
            began_s = time.monotonic()
            looks: list[Callable[[], object]] = [each.look for each in self.daemons]
            looks += [each.look for each in self.runs]
            await asyncio.gather(*(asyncio.to_thread(look) for look in looks))
            async with self._changed:
                self._text, self._number = json.dumps(self._plain()), self._number + 1
                self._changed.notify_all()
            await asyncio.sleep(max(0.1, LOOK_S - (time.monotonic() - began_s)))

    def _plain(self) -> dict[str, Any]:
        return {
            "daemons": [each.plain() for each in self.daemons],
            "jobs": [job for each in self.daemons for job in each.jobs],
            "runs": [each.plain() for each in self.runs],
        }

    async def texts(self) -> AsyncIterator[str]:
        """Yields the newest text, and each one after it; slow readers miss some."""
        seen = 0
        while not self.is_over:
            async with self._changed:
                await self._changed.wait_for(lambda: self._number > seen)  # noqa: B023
                seen, text = self._number, self._text
            yield text

    def daemon_of(self, key: str) -> WatchedDaemon:
        """Returns the daemon of a job; see `daemon`."""
        return self.daemon(key.partition("/")[0])

    def daemon(self, number: str) -> WatchedDaemon:
        """Returns the daemon of a number.

        Raises:
            InvalidRequest: There is none.
        """
        return _numbered(self.daemons, number, "daemon")

    def serving(self, ref: pb.DatasetRef) -> WatchedDaemon:
        """Returns the daemon that serves a dataset; the first one for data that none names.

        Raises:
            InvalidRequest: There is no daemon.
        """
        if not self.daemons:
            raise InvalidRequest("no daemon is on this page, to read samples. Give --daemon.")
        found = (
            each
            for each in self.daemons
            if any(dataset.name == ref.name for dataset in each.datasets)
        )
        return next(found, self.daemons[0])

    def run_of(self, number: str) -> TrainingRun:
        """Returns the run of a number.

        Raises:
            InvalidRequest: There is none.
        """
        return _numbered(self.runs, number, "run")

    def close(self) -> None:
        """Ends all calls."""
        for each in self.daemons:
            each.close()


def _numbered(shown: Sequence[_Shown], number: str, kind: str) -> _Shown:
    if number.isdecimal() and len(number) < 6 and int(number) < len(shown):
        return shown[int(number)]
    raise InvalidRequest(f"there is no {kind} {number[:20]!r} on this page. Give --{kind}.")


# Sessions that read samples for the page; they are no jobs.
OWN_JOBS = "gyre-page-"
_MAX_RANKS = 256  # shown of a job


def jobs_of(
    daemon: int, sessions: Iterable[pb.SessionState], uris: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the jobs of a daemon, by their names.

    `daemon` is its number on the page, and `uris` says where datasets are, by their names.
    """
    jobs: dict[tuple[str, str], list[pb.SessionState]] = {}
    for session in sessions:
        if not session.reader.job.startswith(OWN_JOBS):
            jobs.setdefault((session.user, session.reader.job), []).append(session)
    found = [_job(daemon, user, job, ranks, uris) for (user, job), ranks in jobs.items()]
    return sorted(found, key=lambda job: (job["job"], job["user"]))


def _job(
    daemon: int, user: str, name: str, sessions: Sequence[pb.SessionState], uris: Mapping[str, str]
) -> dict[str, Any]:
    ranks = sorted(sessions, key=lambda each: (each.reader.rank, each.reader.peer))
    first = ranks[0]
    rates = [found for each in ranks if (found := session_rates(each))]
    shares = _shares(rates)
    starved = fmean(each.starved for each in rates) if rates else 0.0
    where = uris.get(first.dataset) or first.dataset
    quality = first.quality if first.HasField("quality") else None
    return {
        "key": f"{daemon}/{user}/{name}",
        "daemon": daemon,
        "user": user,
        "job": printable(name),
        "dataset": printable(first.dataset),
        "where": printable(where),
        "verdict": verdict_of(rates, shares, starved, printable(where)),
        "shares": shares,
        "batches_per_s": sum(each.batches_per_s for each in rates),
        "bytes_per_s": sum(each.bytes_per_s for each in rates),
        "step": min(each.resume_step for each in ranks),
        "world_size": first.reader.world_size,
        "num_substitutes": sum(each.num_substitutes for each in ranks),
        "transforms": [printable(each) for each in first.transforms],
        "filled": first.filled if first.HasField("filled") else None,
        "quality": {
            "displacement": quality.displacement,
            "spread": quality.spread,
            "mixing": quality.mixing,
        }
        if quality
        else None,
        "num_ranks": len(ranks),
        "ranks": [_rank(each) for each in ranks[:_MAX_RANKS]],
    }


def _rank(session: pb.SessionState) -> dict[str, Any]:
    rates = session_rates(session)
    reader = session.reader
    return {
        "rank": reader.rank,
        "peer": reader.peer if reader.HasField("peer") else None,
        "step": session.resume_step,
        "ready": session.num_ready,
        "in_flight": session.num_in_flight,
        "held": session.num_held,
        "window": session.window_batches,
        "starved": rates.starved if rates else None,
        "memory_bytes": session.memory_bytes,
        "memory_limit_bytes": session.memory_limit_bytes,
        "shared_memory": session.transport == pb.TRANSPORT_ARENA,
    }


def _shares(rates: Sequence[SessionRates]) -> dict[str, float]:
    """Returns the mean shares of the ranks' time; the rest is neither, and together they are 1."""
    if not rates:
        return {"storage": 0.0, "processor": 0.0, "trainer": 0.0}
    found = {
        "storage": fmean(each.wait_storage for each in rates),
        "processor": fmean(each.wait_processor for each in rates),
        "trainer": fmean(each.wait_trainer for each in rates),
    }
    total = max(1.0, sum(found.values()))
    return {name: share / total for name, share in found.items()}


def verdict_of(
    rates: Sequence[SessionRates], shares: Mapping[str, float], starved: float, where: str
) -> dict[str, str]:
    """Returns the kind of a job's bottleneck, one sentence about it, and one about the remedy."""
    if not rates:
        return _verdict("new", "This job has just begun.", "")
    idle = all(not each.batches_per_s for each in rates)
    if idle and shares["trainer"] > 0.5:
        return _verdict("idle", "The trainer takes no batch now: it evaluates, saves or waits.", "")
    if starved < STARVED:
        text = "The next batch is ready when the trainer asks."
        return _verdict("trainer", text, "More speed would have to come from the trainer.")
    if shares["processor"] > shares["storage"]:
        text = (
            f"The trainer waits {100 * starved:.0f} % of its time while processors copy and decode."
        )
        advice = "Give the daemon more cores, cache decoded samples, or make transforms cheaper."
        return _verdict("processor", text, advice)
    if shares["storage"] > 0:
        text = f"The trainer waits {100 * starved:.0f} % of its time for storage: {where}"
        advice = "A larger cache, the order block or a wider prefetch window would help."
        return _verdict("storage", text, advice)
    waits = f"The trainer waits {100 * starved:.0f} % of its time, and batches are ready."
    advice = f"{counted(len(rates), 'rank')} may wait for each other, or for the way to the daemon."
    return _verdict("client", waits, advice)


def _verdict(kind: str, text: str, advice: str) -> dict[str, str]:
    return {"kind": kind, "text": text, "advice": advice}


def users_of(sessions: Iterable[pb.SessionState]) -> list[dict[str, Any]]:
    """Returns the memory and windows of each user, the largest first."""
    users: dict[str, dict[str, Any]] = {}
    for each in sessions:
        none = {"num_sessions": 0, "memory_bytes": 0, "window": 0, "ready": 0}
        found = users.setdefault(each.user, {"user": printable(each.user), **none})
        found["num_sessions"] += 1
        found["memory_bytes"] += each.memory_bytes
        found["window"] += each.window_batches
        found["ready"] += each.num_ready
    return sorted(users.values(), key=lambda user: -int(user["memory_bytes"]))
