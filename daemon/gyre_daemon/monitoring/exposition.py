"""The metrics that Prometheus scrapes from a daemon: a census in, metric families out.

Counters of a job are sums over its sessions, closed ones included, so that `rate()` works across a
job's restarts. The occupancy of its prefetch window comes as two counters. The ratio of their rates
is the mean over any interval, for any number of scrapers:

    rate(gyre_job_window_ready_batch_seconds_total[1m]) /
    rate(gyre_job_window_size_batch_seconds_total[1m])

Near 1 the job is trainer-bound. Near 0 it waits for storage or for a processor, which the two
counters of its waiting tell apart.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from gyre_daemon.monitoring.metrics import (
    JobKey,
    Metrics,
    SessionGauges,
    SessionTotals,
    families_of,
    gauge,
    labelled,
)
from gyre_daemon.runtime.liveness import BOUNDS_S, LoopLag

_LOOP_DEADLINE_S = 5.0  # a loop later than this has worse trouble than a missing scrape


@dataclass(frozen=True, slots=True)
class Census:
    """The figures of a daemon at one moment, for its status and its metrics.

    Attributes:
        version: of Gyre.
        counts: since the daemon's start.
        is_draining: whether the daemon is stopping.
        memory_budget_bytes: the most that all sessions may reserve.
        memory_reserved_bytes: reserved by all sessions.
        memory_abandoned_bytes: closed arenas that some process still has.
        num_sessions: open ones.
        totals: of each job, since the daemon's start.
        jobs: of the same jobs, now.
        qualities: of the shuffle, by user, job and measure.
        loop_lag: of the event loop.
    """

    version: str
    counts: Metrics
    is_draining: bool = gauge("gyre_draining", "1 while the daemon stops and opens no session.")
    memory_budget_bytes: int = gauge(
        "gyre_memory_budget_bytes", "Limit of all sessions' reservations."
    )
    memory_reserved_bytes: int = gauge("gyre_memory_reserved_bytes", "Reserved by all sessions.")
    memory_abandoned_bytes: int = gauge(
        "gyre_memory_abandoned_bytes",
        "Arenas that the daemon has closed and clients still map; part of the budget.",
    )
    num_sessions: int = gauge("gyre_sessions", "Open sessions.")
    totals: Mapping[JobKey, SessionTotals] = labelled("user", "job_name")
    jobs: Mapping[JobKey, SessionGauges] = labelled("user", "job_name")
    qualities: Mapping[tuple[str, str, str], float] = labelled(
        *("user", "job_name", "of"),
        of=gauge(
            "gyre_job_shuffle_quality",
            "How well a job's last batches were shuffled: 1 is uniform, 0 the order of sample ids.",
        ),
    )
    loop_lag: LoopLag = field(default_factory=LoopLag)


def families(census: Census) -> Iterator[Metric]:
    """All metrics of a daemon except those of its process."""
    yield InfoMetricFamily("gyre_build", "The version of Gyre.", {"version": census.version})
    yield from families_of(census)
    yield _loop_lag(census.loop_lag)


def _loop_lag(lag: LoopLag) -> Metric:
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, [*lag.at_most, lag.num_timers], strict=True))
    return HistogramMetricFamily(
        "gyre_event_loop_lag_seconds",
        "How late a timer of the daemon's event loop is.",
        buckets,
        lag.sum_s,
    )


class DaemonCollector(Collector):
    """Collects a daemon's metrics; may be asked in any thread but that of the event loop."""

    def __init__(self, take_census: Callable[[], Census]) -> None:
        """Made on the event loop, which then takes each census."""
        self._take_census = take_census
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Metric]:
        """The families as of now.

        Raises:
            TimeoutError: the event loop did not answer in time.
        """
        taken = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        return taken.result(_LOOP_DEADLINE_S)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not take a census."""
        return []

    async def _take(self) -> list[Metric]:
        return list(families(self._take_census()))


def new_registry(take_census: Callable[[], Census]) -> CollectorRegistry:
    """The metrics of a daemon and of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(DaemonCollector(take_census))
    return registry
