"""Totals of each job since the daemon's start. Pure.

Clients choose the names of jobs, and a loader without one makes one up, so the number of jobs that
are told apart must be bounded. Beyond `MAX_JOBS`, a new job replaces the one that has been without
a session for longest. If all have sessions, the new job's session is counted under `OTHERS` until
it closes, so that no counter falls while it is read.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from operator import add

from gyre_daemon.monitoring.occupancy import WindowTimes

MAX_JOBS = 64  # each has some 15 time series in Prometheus
OTHERS = "_others"  # stands for all jobs that are not told apart


@dataclass(frozen=True, slots=True)
class SessionTotals:
    """Totals of a session; the sum of two is that of both.

    Attributes:
        num_batches: how many were sent.
        num_bytes: payload of those batches.
        times: of the prefetch window.
        trainer_waited_s: how long the trainer had no batch to go on with, as the client reports.
    """

    num_batches: int = 0
    num_bytes: int = 0
    times: WindowTimes = field(default_factory=WindowTimes)
    trainer_waited_s: float = 0.0

    def __add__(self, other: "SessionTotals") -> "SessionTotals":
        return SessionTotals(
            self.num_batches + other.num_batches,
            self.num_bytes + other.num_bytes,
            self.times + other.times,
            self.trainer_waited_s + other.trainer_waited_s,
        )


@dataclass(frozen=True, slots=True)
class SessionGauges:
    """Present state of a session; the sum of two is that of both.

    Attributes:
        num_sessions: how many it is the state of.
        num_ready: batches that are ready and were not sent.
        num_held: batches that trainers were sent and have not released.
        window_batches: size of the prefetch window.
        memory_bytes: held by batches.
        memory_limit_bytes: reserved for batches.
    """

    num_sessions: int = 0
    num_ready: int = 0
    num_held: int = 0
    window_batches: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0

    def __add__(self, other: "SessionGauges") -> "SessionGauges":
        return SessionGauges(*map(add, astuple(self), astuple(other)))


@dataclass(slots=True)
class _Job:
    past: SessionTotals = field(default_factory=SessionTotals)
    num_open: int = 0


class Jobs:
    """The jobs that are told apart, with the totals of their closed sessions."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        # jobs without a session stand in the order in which they lost it
        self._jobs: OrderedDict[str, _Job] = OrderedDict()

    def open(self, name: str) -> str:
        """Count a session that opens.

        Returns:
            The name that the session is counted under until it is closed.
        """
        if name not in self._jobs and not self._make_room():
            name = OTHERS
        self._jobs.setdefault(name, _Job()).num_open += 1
        return name

    def close(self, name: str, totals: SessionTotals) -> None:
        """Keep the totals of a session that was counted under this name and has ended."""
        job = self._jobs[name]
        job.past += totals
        job.num_open -= 1
        self._jobs.move_to_end(name)

    def totals(self, live: Iterable[tuple[str, SessionTotals]]) -> Mapping[str, SessionTotals]:
        """The totals of each job, over its closed and its open sessions.

        Args:
            live: for each open session, the name that it is counted under and its totals now.
        """
        sums = {name: job.past for name, job in self._jobs.items()}
        for name, totals in live:
            sums[name] += totals
        return sums

    def __iter__(self) -> Iterator[str]:
        return iter(self._jobs)

    def _make_room(self) -> bool:
        """Forget an idle job if there are too many; False where all have sessions."""
        names = [name for name in self._jobs if name != OTHERS]
        if len(names) < self._max_jobs:
            return True
        idle = next((name for name in names if not self._jobs[name].num_open), None)
        if idle is None:
            return False
        del self._jobs[idle]
        return True
