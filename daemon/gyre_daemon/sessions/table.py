"""The sessions of a daemon: opened, found, fenced, ended when their leases run out, and drained."""

import asyncio
import contextlib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import replace
from weakref import WeakValueDictionary

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import Draining, Fenced, GyreError, LeaseExpired
from gyre_daemon.order.plan import Order, plan_of
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.fair import NO_JOB, Flow
from gyre_daemon.sessions.request import Reader, SessionRequest
from gyre_daemon.sessions.room import make_room
from gyre_daemon.sessions.session import Session, SessionEnvironment


class SessionTable:
    """The sessions of a daemon, by id; a rank of a job has at most one."""

    def __init__(self, environment: SessionEnvironment, weights: Mapping[str, float]) -> None:
        """Nobody reads yet.

        Args:
            environment: what the sessions share.
            weights: by pattern of a job's name, its share relative to others.
        """
        self.environment = environment
        self._weights = weights
        self._sessions: dict[str, Session] = {}
        self._counted_as: dict[str, str] = {}  # the job's name in the metrics, by session
        self._flows: WeakValueDictionary[str, Flow] = WeakValueDictionary()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False

    def __iter__(self) -> Iterator[Session]:
        """Over all that are open."""
        return iter(list(self._sessions.values()))

    async def open(self, request: SessionRequest) -> Session:
        """A new session that has begun to fetch; one of the same job and rank is fenced.

        Raises:
            Fenced: a newer generation of this rank is here already.
            Draining: the daemon takes no new session.
            GyreError: see `Session`.
        """
        if self.draining:
            raise Draining("the daemon is stopping and opens no session; try again after its restart")
        request.check()
        machinery = self.environment.machinery
        plan = await machinery.workers.run(NO_JOB, 0, 0, lambda: plan_of(request.order, request.dataset.index))
        await make_room(request, self._sessions.values(), machinery)
        reader = request.reader
        for other in self:
            theirs = other.request.reader
            if (theirs.job, theirs.rank) != (reader.job, reader.rank):
                continue
            if theirs.generation > reader.generation:
                raise Fenced(
                    f"generation {reader.generation} of {_who(reader)} is older than generation {theirs.generation} of it"
                )
            self.close(other.session_id, Fenced(f"generation {reader.generation} of {_who(reader)} has taken over"))
        session = Session(request, plan, self._flow(reader.job), self.environment)
        self._sessions[session.session_id] = session
        self._counted_as[session.session_id] = self.environment.metrics.jobs.open(reader.job)
        self._empty.clear()
        try:
            await session.start()
        except BaseException:
            self.close(session.session_id, GyreError("the session could not start"))
            raise
        log_event(
            "session open",
            {"session": session.session_id, "dataset": request.dataset.name, "job": reader.job, "rank": reader.rank},
        )
        return session

    def hot_position(self, dataset: Dataset, order: Order) -> int:
        """Where a job that comes late should begin: where one of the same order on the same data is furthest; 0 if none is."""
        return max(
            (
                feed.hot_position
                for feed in self.environment.machinery.feeds
                if not feed.is_closed
                and feed.spec.dataset.fingerprint == dataset.fingerprint
                and replace(feed.spec.order, start_position=0) == replace(order, start_position=0)
            ),
            default=0,
        )

    def reweigh(self, weights: Mapping[str, float]) -> None:
        """From now on these weights count, for jobs that read already too."""
        self._weights = weights
        for job, flow in list(self._flows.items()):
            flow.weight = self._weight(job)

    def by_job(self) -> Iterator[tuple[str, Session]]:
        """Over all that are open, with the name that each one's job has in the metrics."""
        for session in self:
            yield self._counted_as[session.session_id], session

    def get(self, session_id: str) -> Session:
        """An open session.

        Raises:
            LeaseExpired: it is none, or no longer.
        """
        if session_id not in self._sessions:
            raise LeaseExpired(
                f"session {session_id[:64]!r} is not open: its lease ran out, or the daemon was restarted; open it again"
            )
        return self._sessions[session_id]

    def close(self, session_id: str, reason: GyreError) -> None:
        """End a session, if it is open."""
        session = self._sessions.pop(session_id, None)
        if session:
            if not self._sessions:
                self._empty.set()
            self.environment.metrics.jobs.close(self._counted_as.pop(session_id), session.totals)
            session.end(reason)
            facts = {"session": session_id, "batches": session.counts.num_batches_sent, "reason": reason}
            log_event("session closed", facts)

    async def watch_leases(self) -> None:
        """End sessions whose clients are silent, for ever."""
        lease_s = self.environment.lease_s
        while True:
            await asyncio.sleep(lease_s / 4)
            for session in self:
                if session.lease_left_s < 0:
                    self.close(
                        session.session_id,
                        LeaseExpired(f"the client was silent for more than {lease_s:g} s; open the session again"),
                    )

    async def drain(self, timeout_s: float) -> None:
        """Open no more sessions, let those that are open run dry, and end those that have not after the timeout."""
        self.draining = True
        for session in self:
            session.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        for session in self:
            self.close(session.session_id, Draining("the daemon stopped; open the session again with the last cursor"))

    def _flow(self, job: str) -> Flow:
        """All sessions of a job have one claim on what is shared."""
        flow = self._flows.get(job)
        if flow is None:
            flow = self._flows[job] = Flow(job, self._weight(job))
        return flow

    def _weight(self, job: str) -> float:
        """Of the first pattern that the job's name matches."""
        return next((weight for pattern, weight in self._weights.items() if fnmatch.fnmatchcase(job, pattern)), 1.0)


def _who(reader: Reader) -> str:
    return f"rank {reader.rank} of job {reader.job!r}"
