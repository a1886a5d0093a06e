"""The sessions of a daemon: opened, found, fenced, ended when their leases run out, and drained."""

import asyncio
import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from gyre_protos.text import counted

from gyre_daemon import __version__
from gyre_daemon.access.policy import Principal
from gyre_daemon.datasets.dataset import balance_of, bucket_lengths
from gyre_daemon.errors import Draining, Fenced, GyreError, InvalidRequest, LeaseExpired
from gyre_daemon.monitoring.metrics import (
    OTHERS,
    Census,
    JobKey,
    LoopLag,
    SessionGauges,
    SessionTotals,
)
from gyre_daemon.order.mixture import planner_for
from gyre_daemon.order.planner import BatchPlanner, ShuffleQuality, average, expected_quality
from gyre_daemon.order.steps import in_words
from gyre_daemon.runtime.events import debug_event, log_event
from gyre_daemon.runtime.limits import check_descriptors
from gyre_daemon.runtime.threads import Flow
from gyre_daemon.sessions.session import Session, joinable_rank
from gyre_daemon.sessions.session_request import Reader, SessionRequest
from gyre_daemon.sessions.shared_stream import DaemonResources


def weights_of(user: str, job: str, patterns: Mapping[str, float]) -> tuple[float, float]:
    """The weights of a user's job: relative to other jobs of this user, and to other users.

    The first pattern that matches weighs the job among those of its user. A client chooses the name
    of its job, so only a pattern `USER/JOB` weighs against other users as well: the first one that
    matches.

    Args:
        user: the name of a principal.
        job: the job's name.
        patterns: weights by `JOB` or `USER/JOB`; the first slash ends the user.
    """
    named = [
        ("/" in pattern, weight)
        for pattern, weight in patterns.items()
        if _matches(user, job, pattern)
    ]
    in_user = next((weight for _, weight in named), 1.0)
    return in_user, next((weight for has_user, weight in named if has_user), 1.0)


def _matches(user: str, job: str, pattern: str) -> bool:
    of_user, slash, of_job = pattern.partition("/")
    if not slash:
        return fnmatch.fnmatchcase(job, pattern)
    return fnmatch.fnmatchcase(user, of_user) and fnmatch.fnmatchcase(job, of_job)


Result = TypeVar("Result")

# The cost of a request's work in threads, as the number of bytes copied in about that time: it
# counts with the reads of all users' jobs. If it were free, a user who asks all the time would
# keep the others from reading.
_PLANNED_BYTES, _ANSWERED_BYTES = 1 << 20, 64 << 20


class SessionTable:
    """The sessions of a daemon, by id; each peer of a rank of a user's job has at most one."""

    def __init__(self, resources: DaemonResources, weights: Mapping[str, float]) -> None:
        """A table without sessions.

        Args:
            resources: those that all sessions share.
            weights: the weights of jobs by pattern, as `weights_of` takes them.
        """
        self.resources = resources
        self._weights = weights
        self._sessions: dict[str, Session] = {}
        self._counted_as: dict[str, JobKey] = {}  # the job in the metrics, by session
        self._flows: WeakValueDictionary[JobKey, Flow] = WeakValueDictionary()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __iter__(self) -> Iterator[Session]:
        """The open sessions."""
        return iter(list(self._sessions.values()))

    async def open(self, request: SessionRequest) -> Session:
        """Open a session, which begins to fetch; its user's older one of the same peer is fenced.

        Raises:
            Fenced: a newer generation of this peer is here already.
            Draining: the daemon takes no new session.
            Overloaded: its user has as many sessions as it may, or the daemon has too
                few descriptors left.
            InvalidRequest: another rank of its job reads other samples of the dataset.
            GyreError: see `Session`.
        """
        if self.draining:
            raise Draining(
                "the daemon is stopping and opens no session; try again after its restart"
            )
        request.check()
        resources = self.resources
        plan = partial(_plan, request, resources)
        planner, quality = await self.compute(request.owner.name, plan, _PLANNED_BYTES)
        check_descriptors()
        reader, owner = request.reader, request.owner
        key = JobKey(owner.name, reader.job)
        flow = self._flow(key)
        if joinable_rank(request, planner, flow, resources) is None:
            await resources.reservations.settle(request, resources.registry)
        for other in self:
            theirs = other.request.reader
            if other.request.owner.name != owner.name:
                continue
            if (theirs.fence, theirs.rank, theirs.peer) != (reader.fence, reader.rank, reader.peer):
                continue
            if theirs.generation > reader.generation:
                raise Fenced(
                    f"generation {reader.generation} of {_who(reader)} is older than generation "
                    f"{theirs.generation}, which is open"
                )
            self.close(
                other.session_id,
                Fenced(f"generation {reader.generation} of {_who(reader)} has taken over"),
            )
        self._check_agreement(request, planner)
        num_open = sum(each.request.owner.name == owner.name for each in self)
        resources.limits.check_sessions(owner.name, num_open)
        in_use = [each.in_use for each in self]
        session = Session(request, planner, quality, flow, resources, in_use)
        self._sessions[session.session_id] = session
        self._counted_as[session.session_id] = resources.metrics.jobs.open(key)
        self._empty.clear()
        try:
            await session.start()
        except BaseException:
            self.close(session.session_id, GyreError("the session could not start"))
            raise
        log_event("session open", _facts(session))
        facts = {"session": session.handle, "first_step": session.first_step}
        facts |= {"window": session.window_batches, "sharing": session.num_sharing}
        debug_event("session reads", facts | {"reserved_bytes": session.reserved_bytes})
        return session

    async def compute(
        self, user: str, work: Callable[[], Result], num_bytes: int = _ANSWERED_BYTES
    ) -> Result:
        """Compute a user's answer in a thread, when it is the user's turn.

        Args:
            user: the name of a principal.
            work: called in the thread.
            num_bytes: whose copying takes about as long.
        """
        return await self.resources.workers.run(Flow("", user), num_bytes, 0, work)

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """Count jobs with these weights from now on, those that already read too."""
        self._weights = weights
        for key, flow in list(self._flows.items()):
            flow.weight, flow.user_weight = weights_of(key.user, key.name, weights)

    def by_job(self) -> Iterator[tuple[JobKey, Session]]:
        """The open sessions, each with its job in the metrics."""
        for session in self:
            yield self._counted_as[session.session_id], session

    def get(self, session_id: str, caller: Principal) -> Session:
        """An open session of the caller.

        Raises:
            LeaseExpired: no session of the caller has this id, or it has ended. A session of
                another user counts as absent.
        """
        session = self._sessions.get(session_id)
        if session is None or session.request.owner.name != caller.name:
            raise LeaseExpired(
                "the session is not open: its lease ran out, or the daemon was restarted; open it "
                "again"
            )
        return session

    def close(self, session_id: str, reason: GyreError) -> None:
        """End a session, if it is open."""
        session = self._sessions.pop(session_id, None)
        if session:
            if not self._sessions:
                self._empty.set()
            self.resources.metrics.jobs.close(self._counted_as.pop(session_id), session.totals)
            session.end(reason)
            totals = session.totals
            facts = {
                "batches": totals.num_batches,
                "bytes": totals.num_bytes,
                "seconds": round(self.resources.clock() - session.opened_at, 3),
                "reason": reason,
            }
            log_event("session closed", _facts(session) | facts)

    async def watch_leases(self) -> None:
        """End each session whose client is silent for longer than its lease; never returns."""
        lease_s = self.resources.lease_s
        while True:
            await asyncio.sleep(lease_s / 4)
            for session in self:
                if session.lease_left_s < 0:
                    reason = f"the client was silent for more than {lease_s:g} s"
                    self.close(
                        session.session_id, LeaseExpired(f"{reason}; open the session again")
                    )

    async def drain(self, timeout_s: float) -> None:
        """Open no more sessions, and let the open ones run dry; end the rest after the timeout."""
        self.draining = True
        for session in self:
            session.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        for session in self:
            self.close(
                session.session_id,
                Draining("the daemon stopped; open the session again with the last cursor"),
            )

    def _check_agreement(self, request: SessionRequest, planner: BatchPlanner) -> None:
        """Refuse a rank whose job reads other samples: the dataset has grown between them."""
        its, reader = request.dataset, request.reader
        for other in self:
            theirs = other.request
            if (theirs.owner.name, theirs.reader.fence) != (request.owner.name, reader.fence):
                continue
            if (theirs.dataset.name, replace(theirs.order, skipped=())) != (
                its.name,
                replace(request.order, skipped=()),
            ):
                continue
            if theirs.order.skipped != request.order.skipped:
                raise InvalidRequest(
                    f"{_who(theirs.reader)} leaves out the steps {in_words(theirs.order.skipped)} "
                    f"of `{its.name}`, and rank {reader.rank} would leave out "
                    f"{in_words(request.order.skipped)}. End all ranks, and give all of them one "
                    "state and the same skip_steps."
                )
            if other.planner.phases != planner.phases:
                raise InvalidRequest(
                    f"{_who(theirs.reader)} reads `{its.name}` with other weights than rank "
                    f"{reader.rank} would: they were changed between them. End all ranks, and "
                    "resume them from one state."
                )
            if other.planner.stages.all != planner.stages.all:
                raise InvalidRequest(
                    f"{_who(theirs.reader)} reads {_in_words(other.planner)} of `{its.name}`, and "
                    f"rank {reader.rank} would read {_in_words(planner)}: the dataset has changed "
                    "between them. End all ranks, and resume them from one state."
                )

    def _flow(self, key: JobKey) -> Flow:
        """All sessions of a user's job are one flow."""
        flow = self._flows.get(key)
        if flow is None:
            weights = weights_of(key.user, key.name, self._weights)
            flow = self._flows[key] = Flow(key.name, key.user, *weights)
        return flow


def _facts(session: Session) -> dict[str, object]:
    """The description of a session in the audit log."""
    request = session.request
    return {
        "session": session.handle,
        "user": request.owner.name,
        "pid": request.owner.pid,
        "dataset": request.dataset.name,
        "job": request.reader.job,
        "rank": request.reader.rank,
    } | ({} if request.reader.peer is None else {"peer": request.reader.peer})


def _plan(
    request: SessionRequest, resources: DaemonResources
) -> tuple[BatchPlanner, ShuffleQuality]:
    """The planner of a session that can have the memory for one batch, and its quality; waits.

    Raises:
        InvalidRequest: the order does not fit the dataset.
        Overloaded: not even the whole budget has room for three batches.
    """
    dataset, stages = request.dataset, request.cursor.stages
    balance = balance_of(dataset, request.balance) if request.balance else None
    phases = request.cursor.mixture.phases if request.cursor.mixture else ()
    order, lengths_of = request.order, bucket_lengths(dataset, request.order)
    ordered, corrupt = dataset.ordered, dataset.corrupt
    planner = planner_for(order, ordered, corrupt, stages, balance, phases, lengths_of)
    resources.reservations.check(request)
    # sorting within buckets would take as long as some hundred of their windows
    unsorted = planner_for(replace(order, bucket=None), ordered) if order.bucket else planner
    return planner, expected_quality(unsorted)


def _in_words(planner: BatchPlanner) -> str:
    """The stages of a job, for people."""
    first, *later = planner.stages.all
    parts = [f"{each.num_samples} from epoch {each.first_epoch} on" for each in later]
    return ", ".join([counted(first.num_samples, "sample"), *parts])


def _who(reader: Reader) -> str:
    peer = "" if reader.peer is None else f", peer {reader.peer},"
    return f"rank {reader.rank}{peer} of job {reader.job!r}"


# Limits on the spreads of balanced batches in one status: some tenths of a second of a thread.
_MAX_SPREAD_SAMPLES, _MAX_SPREADS = 1 << 14, 64


def take_census(
    sessions: SessionTable, loop_lag: LoopLag | None = None, *, with_names: bool = True
) -> Census:
    """The state of a daemon now.

    Args:
        sessions: the open ones.
        loop_lag: of the event loop.
        with_names: whether jobs are told apart; otherwise all count as `OTHERS`.
    """
    budget = sessions.resources.budget
    by_job = [(job if with_names else OTHERS, session) for job, session in sessions.by_job()]
    totals = _totals(sessions, with_names=with_names)
    jobs = dict.fromkeys(totals, SessionGauges())  # without a session, zeros
    num_sessions = dict.fromkeys(totals, 0)
    qualities: dict[JobKey, list[ShuffleQuality]] = {}
    for job, session in by_job:
        jobs[job] += session.gauges
        num_sessions[job] += 1
        qualities.setdefault(job, []).append(session.quality)
    return Census(
        version=__version__,
        counts=sessions.resources.metrics,
        is_draining=sessions.draining,
        memory_budget_bytes=budget.limit_bytes,
        memory_reserved_bytes=budget.reserved_bytes,
        memory_abandoned_bytes=budget.abandoned_bytes,
        num_sessions=len(by_job),
        totals=totals,
        jobs=jobs,
        num_job_sessions=num_sessions,
        qualities={
            (*job, of): value
            for job, each in qualities.items()
            for of, value in asdict(average(each)).items()
        },
        loop_lag=loop_lag or LoopLag(),
    )


def _totals(sessions: SessionTable, *, with_names: bool) -> Mapping[JobKey, SessionTotals]:
    live = ((job, session.totals) for job, session in sessions.by_job())
    totals = sessions.resources.metrics.jobs.totals(live)
    if with_names or not totals:
        return totals
    return {OTHERS: sum(totals.values(), start=SessionTotals())}


async def spreads_of(
    sessions: Sequence[Session], table: SessionTable, user: str
) -> list[float | None]:
    """By how much the most expensive rank exceeded the mean in the last step of each session.

    Args:
        sessions: of any jobs; all ranks of a job have the same.
        table: of all sessions.
        user: the user who asks.

    Returns:
        None where nothing is balanced, or batches are too large to look at for a status.
    """
    asked: dict[object, Callable[[], float | None]] = {}
    keys: list[object] = []
    for session in sessions:
        its, step = session.request, session.next_step
        size, world_size = its.order.global_batch_size, its.reader.world_size
        job = its.owner.name, its.reader.fence, its.dataset.fingerprint
        key = *job, its.order, its.balance, world_size, step
        keys.append(key)
        is_asked = its.balance and step and size <= _MAX_SPREAD_SAMPLES
        if is_asked and len(asked) < _MAX_SPREADS:
            asked.setdefault(key, partial(session.planner.spread, step - 1, world_size))
    if not asked:
        return [None] * len(keys)
    found = await table.compute(user, lambda: {key: work() for key, work in asked.items()})
    return [found.get(key) for key in keys]
