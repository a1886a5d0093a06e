"""Totals of each job since the daemon's start. Pure.

Clients choose the names of jobs, and a loader without one makes one up, so the number of jobs that
have separate counters must be bounded. Beyond `MAX_JOBS`, a new job replaces the one that has been
without a session for longest. If all have sessions, the new job's session is counted under `OTHERS`
until it closes, so that no counter falls while it is read.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from operator import add
from typing import NamedTuple

from gyre_daemon.monitoring.declared import counter, gauge
from gyre_daemon.monitoring.occupancy import WindowTimes

MAX_JOBS = 64  # each has some 15 time series in Prometheus


class JobKey(NamedTuple):
    """A job, whose name is unique among those of one user.

    Attributes:
        user: whose job it is: the name of a principal.
        name: as the client chose it.
    """

    user: str
    name: str


OTHERS = JobKey("", "_others")  # all jobs without separate counters


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """Totals of a session; the sum of two is that of both.

    Attributes:
        num_batches: how many were sent.
        num_bytes: payload of those batches.
        times: of the prefetch window.
        trainer_waited_s: how long the trainer had no batch to go on with, as the client reports.
        num_substitutes: samples that were sent in place of corrupt ones.
    """

    num_batches: int = counter("gyre_job_batches_sent", "Batches sent to the trainers of a job.")
    num_bytes: int = counter(
        "gyre_job_sent_bytes", "Payload of the batches sent to the trainers of a job."
    )
    times: WindowTimes = field(default_factory=WindowTimes)
    trainer_waited_s: float = counter(
        "gyre_job_trainer_starved_seconds",
        "Time in which a trainer stood still for want of a batch.",
    )
    num_substitutes: int = counter(
        "gyre_job_substitutes_sent",
        "Samples sent to the trainers of a job in place of corrupt ones.",
    )

    def __add__(self, other: "SessionTotals") -> "SessionTotals":
        return SessionTotals(
            self.num_batches + other.num_batches,
            self.num_bytes + other.num_bytes,
            self.times + other.times,
            self.trainer_waited_s + other.trainer_waited_s,
            self.num_substitutes + other.num_substitutes,
        )


@dataclass(frozen=True, slots=True)
class SessionGauges:
    """Present state of a session; the sum of two is that of both.

    Attributes:
        num_sessions: how many it is the state of.
        num_ready: batches ready but not sent.
        num_held: batches that trainers were sent and have not released.
        window_batches: size of the prefetch window.
        memory_bytes: held by batches.
        memory_limit_bytes: reserved for batches.
    """

    num_sessions: int = gauge("gyre_job_sessions", "Sessions of a job: its ranks on this node.")
    num_ready: int = gauge("gyre_job_window_ready_batches", "Ready batches that were not sent.")
    num_held: int = gauge(
        "gyre_job_held_batches", "Batches that trainers have and did not release."
    )
    window_batches: int = gauge(
        "gyre_job_window_size_batches", "Batches that may be in flight or ready."
    )
    memory_bytes: int = gauge("gyre_job_memory_bytes", "Memory held by a job's batches.")
    memory_limit_bytes: int = gauge(
        "gyre_job_memory_reserved_bytes", "Memory reserved for its batches."
    )

    def __add__(self, other: "SessionGauges") -> "SessionGauges":
        return SessionGauges(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class _Job:
    past: SessionTotals = field(default_factory=SessionTotals)
    num_open: int = 0


class Jobs:
    """The jobs with separate counters, and the totals of their closed sessions."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        # jobs without a session stand in the order in which they lost it
        self._jobs: OrderedDict[JobKey, _Job] = OrderedDict()

    def open(self, key: JobKey) -> JobKey:
        """Count a session that opens.

        Returns:
            The job that the session is counted under until it is closed.
        """
        if key not in self._jobs and not self._make_room():
            key = OTHERS
        self._jobs.setdefault(key, _Job()).num_open += 1
        return key

    def close(self, key: JobKey, totals: SessionTotals) -> None:
        """Keep the totals of a session that was counted under this job and has ended."""
        job = self._jobs[key]
        job.past += totals
        job.num_open -= 1
        self._jobs.move_to_end(key)

    def totals(
        self, live: Iterable[tuple[JobKey, SessionTotals]]
    ) -> Mapping[JobKey, SessionTotals]:
        """The totals of each job, over its closed and its open sessions.

        Args:
            live: for each open session, the job that it is counted under and its totals now.
        """
        sums = {key: job.past for key, job in self._jobs.items()}
        for key, totals in live:
            sums[key] += totals
        return sums

    def __iter__(self) -> Iterator[JobKey]:
        return iter(self._jobs)

    def _make_room(self) -> bool:
        """Forget an idle job if there are too many; False where all have sessions."""
        keys = [key for key in self._jobs if key != OTHERS]
        if len(keys) < self._max_jobs:
            return True
        idle = next((key for key in keys if not self._jobs[key].num_open), None)
        if idle is None:
            return False
        del self._jobs[idle]
        return True
