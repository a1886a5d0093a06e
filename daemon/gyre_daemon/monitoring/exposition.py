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
from operator import attrgetter

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gyre_daemon.monitoring.jobs import JobKey, SessionGauges, SessionTotals
from gyre_daemon.monitoring.metrics import CacheCounts, RequestCount, RequestLabels, TransformCounts
from gyre_daemon.runtime.lag import BOUNDS_S, LoopLag

_JOB_LABELS = ["job_name", "user"]  # `job` is Prometheus's own name for a scraped service
_LOOP_DEADLINE_S = 5.0  # a loop later than this has worse trouble than a missing scrape


@dataclass(frozen=True, slots=True)
class Census:
    """The figures of a daemon at one moment, for its status and its metrics.

    Attributes:
        version: of Gyre.
        is_draining: whether the daemon is stopping.
        memory_budget_bytes: the most that all sessions may reserve.
        memory_reserved_bytes: reserved by all sessions.
        num_batches_sent: to all trainers, since the start.
        num_bytes_sent: payload of those batches.
        storage: requests to storage.
        cache: counters of the node cache.
        totals: of each job, since the daemon's start.
        jobs: of each job with an open session.
        qualities: of the shuffle, by job and by measure.
        loop_lag: of the event loop.
        memory_abandoned_bytes: closed arenas that some process still has.
        num_substitutes_sent: samples in place of corrupt ones, in those batches.
        transforms: counters of the workers.
    """

    version: str
    is_draining: bool
    memory_budget_bytes: int
    memory_reserved_bytes: int
    num_batches_sent: int
    num_bytes_sent: int
    storage: Mapping[RequestLabels, RequestCount] = field(default_factory=dict)
    cache: CacheCounts = field(default_factory=CacheCounts)
    totals: Mapping[JobKey, SessionTotals] = field(default_factory=dict)
    jobs: Mapping[JobKey, SessionGauges] = field(default_factory=dict)
    qualities: Mapping[JobKey, Mapping[str, float]] = field(default_factory=dict)
    loop_lag: LoopLag = field(default_factory=LoopLag)
    memory_abandoned_bytes: int = 0
    num_substitutes_sent: int = 0
    transforms: TransformCounts = field(default_factory=TransformCounts)

    @property
    def num_sessions(self) -> int:
        """The number of open sessions."""
        return sum(job.num_sessions for job in self.jobs.values())


_Table = tuple[tuple[str, str, str], ...]  # name, attribute to read, help text

_DAEMON_GAUGES: _Table = (
    ("gyre_draining", "is_draining", "1 while the daemon stops and opens no session."),
    ("gyre_memory_budget_bytes", "memory_budget_bytes", "Limit of all sessions' reservations."),
    ("gyre_memory_reserved_bytes", "memory_reserved_bytes", "Reserved by all sessions."),
    (
        "gyre_memory_abandoned_bytes",
        "memory_abandoned_bytes",
        "Arenas that the daemon has closed and clients still map; part of the budget.",
    ),
    ("gyre_sessions", "num_sessions", "Sessions that are open."),
)
_DAEMON_COUNTERS: _Table = (
    ("gyre_batches_sent", "num_batches_sent", "Batches sent to all trainers."),
    ("gyre_sent_bytes", "num_bytes_sent", "Payload of the batches sent to all trainers."),
    (
        "gyre_substitutes_sent",
        "num_substitutes_sent",
        "Samples sent in place of corrupt ones (on_corrupt).",
    ),
    ("gyre_cache_reads_past", "cache.num_past", "Reads that bypassed the node cache."),
    ("gyre_cache_blocks_fetched", "cache.num_blocks_fetched", "Blocks taken into the cache."),
    ("gyre_cache_fetched_bytes", "cache.num_bytes_fetched", "Bytes of the blocks taken."),
    ("gyre_cache_blocks_evicted", "cache.num_evicted", "Blocks dropped to make room."),
    ("gyre_cache_blocks_corrupt", "cache.num_corrupt", "Damaged blocks found on disk."),
    ("gyre_samples_transformed", "transforms.num_samples", "Samples that were transformed."),
    ("gyre_transform_cpu_seconds", "transforms.cpu_s", "Processor time of transforms."),
    (
        "gyre_transform_workers_replaced",
        "transforms.num_replaced",
        "Processes that died or hung while they transformed samples.",
    ),
)
_JOB_COUNTERS: _Table = (  # of `SessionTotals`
    ("gyre_job_batches_sent", "num_batches", "Batches sent to the trainers of a job."),
    ("gyre_job_sent_bytes", "num_bytes", "Payload of the batches sent to the trainers of a job."),
    (
        "gyre_job_substitutes_sent",
        "num_substitutes",
        "Samples sent to the trainers of a job in place of corrupt ones.",
    ),
    (
        "gyre_job_window_ready_batch_seconds",
        "times.ready_batch_s",
        "Ready batches in a job's prefetch windows, integrated over time.",
    ),
    (
        "gyre_job_window_size_batch_seconds",
        "times.size_batch_s",
        "Sizes of a job's prefetch windows, integrated over time.",
    ),
    (
        "gyre_job_wait_for_storage_seconds",
        "times.wait_storage_s",
        "Time in which a trainer would have taken a batch, and storage had not answered.",
    ),
    (
        "gyre_job_wait_for_processor_seconds",
        "times.wait_processor_s",
        "Time in which a trainer would have taken a batch that waited for a processor.",
    ),
    (
        "gyre_job_wait_for_trainer_seconds",
        "times.wait_trainer_s",
        "Time in which a batch was ready, and no trainer took it.",
    ),
    (
        "gyre_job_trainer_starved_seconds",
        "trainer_waited_s",
        "Time in which a trainer stood still for want of a batch.",
    ),
)
_JOB_GAUGES: _Table = (  # of `SessionGauges`
    ("gyre_job_sessions", "num_sessions", "Sessions of a job: its ranks on this node."),
    ("gyre_job_window_ready_batches", "num_ready", "Batches that are ready and were not sent."),
    ("gyre_job_window_size_batches", "window_batches", "Batches that may be in flight or ready."),
    ("gyre_job_held_batches", "num_held", "Batches that trainers have and did not release."),
    ("gyre_job_memory_bytes", "memory_bytes", "Memory held by a job's batches."),
    ("gyre_job_memory_reserved_bytes", "memory_limit_bytes", "Memory reserved for its batches."),
)


def families(census: Census) -> Iterator[Metric]:
    """All metrics of a daemon except those of its process."""
    yield InfoMetricFamily("gyre_build", "The version of Gyre.", {"version": census.version})
    for name, attribute, text in _DAEMON_GAUGES:
        yield GaugeMetricFamily(name, text, float(attrgetter(attribute)(census)))
    for name, attribute, text in _DAEMON_COUNTERS:
        yield CounterMetricFamily(name, text, attrgetter(attribute)(census))
    yield from _storage(census.storage)
    yield from _cache(census.cache)
    yield _loop_lag(census.loop_lag)
    for name, attribute, text in _JOB_COUNTERS:
        counter = CounterMetricFamily(name, text, labels=_JOB_LABELS)
        for job, totals in census.totals.items():
            counter.add_metric([job.name, job.user], attrgetter(attribute)(totals))
        yield counter
    for name, attribute, text in _JOB_GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=_JOB_LABELS)
        for job in census.totals:
            gauge.add_metric(
                [job.name, job.user], attrgetter(attribute)(census.jobs.get(job, SessionGauges()))
            )
        yield gauge
    yield _shuffle(census.qualities)


def _shuffle(qualities: Mapping[JobKey, Mapping[str, float]]) -> Metric:
    what = "How well a job's last batches were shuffled: 1 is uniform, 0 the order of sample ids."
    gauge = GaugeMetricFamily("gyre_job_shuffle_quality", what, labels=[*_JOB_LABELS, "of"])
    for job, quality in qualities.items():
        for of, value in quality.items():
            gauge.add_metric([job.name, job.user, of], value)
    return gauge


def _storage(counts: Mapping[RequestLabels, RequestCount]) -> Iterator[Metric]:
    labels = RequestLabels._fields
    requests = CounterMetricFamily(
        "gyre_storage_requests", "Requests to storage that were answered or failed.", labels=labels
    )
    read = CounterMetricFamily(
        "gyre_storage_read_bytes", "Bytes that requests to storage brought.", labels=labels
    )
    for of, count in sorted(counts.items()):
        requests.add_metric(list(of), count.num_requests)
        read.add_metric(list(of), count.num_bytes)
    yield requests
    yield read


def _cache(counts: CacheCounts) -> Iterator[Metric]:
    reads = CounterMetricFamily(
        "gyre_cache_reads",
        "Reads from object storage, by the part that the node cache had.",
        labels=["found"],
    )
    for found, count in (
        ("there", counts.num_hits),
        ("on its way", counts.num_joined),
        ("nothing", counts.num_misses),
    ):
        reads.add_metric([found], count)
    yield reads
    held = GaugeMetricFamily(
        "gyre_cache_held_bytes", "Bytes of the blocks that the cache holds.", labels=["where"]
    )
    held.add_metric(["memory"], counts.memory_bytes)
    held.add_metric(["disk"], counts.disk_bytes)
    yield held


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
