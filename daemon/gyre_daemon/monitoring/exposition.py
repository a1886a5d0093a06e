"""What Prometheus reads of a daemon. One table of names; plain numbers in, text out, and nothing is kept here.

Counters of a job are sums over its sessions, those that ended included, so that `rate()` works across a job's restarts. The
occupancy of its window comes as two counters, whose rates divide to the mean of any interval, for any number of scrapers:

    rate(gyre_job_window_ready_batch_seconds_total[1m]) / rate(gyre_job_window_size_batch_seconds_total[1m])

Near 1 the job is trainer-bound; near 0 it waits for storage or for a processor, as the two counters of its waiting tell.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from gyre_daemon.monitoring.jobs import SessionTotals
from gyre_daemon.monitoring.metrics import CacheCounts, RequestCount, RequestLabels
from gyre_daemon.runtime.lag import BOUNDS_S, LoopLag

OPENMETRICS = "application/openmetrics-text"
_JOB_LABEL = "job_name"  # `job` is Prometheus's own name for what it scrapes


@dataclass(frozen=True, slots=True)
class JobNow:
    """What a job's open sessions hold; those of several can be added.

    Attributes:
        num_sessions: open.
        num_ready: batches that are ready and not sent.
        num_held: batches that trainers have and did not release.
        window_size: in batches.
        memory_bytes: held by batches.
        memory_limit_bytes: reserved for them.
    """

    num_sessions: int = 0
    num_ready: int = 0
    num_held: int = 0
    window_size: int = 0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0

    def __add__(self, other: "JobNow") -> "JobNow":
        return JobNow(
            self.num_sessions + other.num_sessions,
            self.num_ready + other.num_ready,
            self.num_held + other.num_held,
            self.window_size + other.window_size,
            self.memory_bytes + other.memory_bytes,
            self.memory_limit_bytes + other.memory_limit_bytes,
        )


@dataclass(frozen=True, slots=True)
class Census:
    """A daemon at one moment.

    Attributes:
        totals: by job, since the daemon's start.
        jobs: by job; absent where it has no session.
        qualities: of the shuffle of jobs that read, by job and by what is measured.
        loop_lag: of its event loop.
    """

    version: str
    is_draining: bool
    memory_budget_bytes: int
    memory_reserved_bytes: int
    num_batches_sent: int
    num_bytes_sent: int
    storage: Mapping[RequestLabels, RequestCount] = field(default_factory=dict)
    cache: CacheCounts = field(default_factory=CacheCounts)
    totals: Mapping[str, SessionTotals] = field(default_factory=dict)
    jobs: Mapping[str, JobNow] = field(default_factory=dict)
    qualities: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    loop_lag: LoopLag = field(default_factory=LoopLag)
    memory_abandoned_bytes: int = 0


# Name, what it says, and where it is read; counters of totals, then gauges of what is open now.
_JOB_COUNTERS: tuple[tuple[str, str, Callable[[SessionTotals], float]], ...] = (
    ("gyre_job_batches_sent", "Batches sent to the trainers of a job.", lambda job: job.num_batches),
    ("gyre_job_sent_bytes", "Payload of the batches sent to the trainers of a job.", lambda job: job.num_bytes),
    (
        "gyre_job_window_ready_batch_seconds",
        "Ready batches in a job's prefetch windows, times the seconds that they were.",
        lambda job: job.times.ready_batch_s,
    ),
    (
        "gyre_job_window_size_batch_seconds",
        "Sizes of a job's prefetch windows, times the seconds that they were.",
        lambda job: job.times.size_batch_s,
    ),
    (
        "gyre_job_wait_for_storage_seconds",
        "A trainer would have taken a batch, and none was ready: storage had not answered.",
        lambda job: job.times.wait_storage_s,
    ),
    (
        "gyre_job_wait_for_processor_seconds",
        "A trainer would have taken a batch, and none was ready for want of a processor to copy or decode it.",
        lambda job: job.times.wait_processor_s,
    ),
    (
        "gyre_job_wait_for_trainer_seconds",
        "A batch was ready, and no trainer took it.",
        lambda job: job.times.wait_trainer_s,
    ),
    ("gyre_job_trainer_starved_seconds", "A trainer stood still for want of a batch.", lambda job: job.trainer_waited_s),
)
_JOB_GAUGES: tuple[tuple[str, str, Callable[[JobNow], float]], ...] = (
    ("gyre_job_sessions", "Sessions of a job: its ranks on this node.", lambda job: job.num_sessions),
    ("gyre_job_window_ready_batches", "Batches that are ready and not sent.", lambda job: job.num_ready),
    ("gyre_job_window_size_batches", "Batches that may be in flight or ready.", lambda job: job.window_size),
    ("gyre_job_held_batches", "Batches that trainers have and did not release.", lambda job: job.num_held),
    ("gyre_job_memory_bytes", "Memory held by a job's batches.", lambda job: job.memory_bytes),
    ("gyre_job_memory_reserved_bytes", "Memory reserved for a job's batches.", lambda job: job.memory_limit_bytes),
)


def families(census: Census) -> Iterator[Metric]:
    """Every metric of a daemon but those of its process."""
    yield InfoMetricFamily("gyre_build", "Which Gyre this is.", {"version": census.version})
    yield GaugeMetricFamily("gyre_draining", "1 while the daemon stops and takes no session.", float(census.is_draining))
    yield GaugeMetricFamily("gyre_memory_budget_bytes", "What all sessions may reserve.", census.memory_budget_bytes)
    yield GaugeMetricFamily("gyre_memory_reserved_bytes", "What all sessions have reserved.", census.memory_reserved_bytes)
    what = "Arenas that the daemon uses no longer and clients still map; part of the budget."
    yield GaugeMetricFamily("gyre_memory_abandoned_bytes", what, census.memory_abandoned_bytes)
    num_sessions = sum(job.num_sessions for job in census.jobs.values())
    yield GaugeMetricFamily("gyre_sessions", "Sessions that are open.", num_sessions)
    yield CounterMetricFamily("gyre_batches_sent", "Batches sent to all trainers.", census.num_batches_sent)
    yield CounterMetricFamily("gyre_sent_bytes", "Payload of the batches sent to all trainers.", census.num_bytes_sent)
    yield from _storage(census.storage)
    yield from _cache(census.cache)
    yield _loop_lag(census.loop_lag)
    for name, what, read in _JOB_COUNTERS:
        counter = CounterMetricFamily(name, what, labels=[_JOB_LABEL])
        for job, totals in census.totals.items():
            counter.add_metric([job], read(totals))
        yield counter
    for name, what, read_now in _JOB_GAUGES:
        gauge = GaugeMetricFamily(name, what, labels=[_JOB_LABEL])
        for job in census.totals:
            gauge.add_metric([job], read_now(census.jobs.get(job, JobNow())))
        yield gauge
    yield _shuffle(census.qualities)


def _shuffle(qualities: Mapping[str, Mapping[str, float]]) -> Metric:
    what = "How well a job's last batches were shuffled: 1 is a uniform order, 0 that of the sample ids."
    gauge = GaugeMetricFamily("gyre_job_shuffle_quality", what, labels=[_JOB_LABEL, "of"])
    for job, quality in qualities.items():
        for of, value in quality.items():
            gauge.add_metric([job, of], value)
    return gauge


def _storage(counts: Mapping[RequestLabels, RequestCount]) -> Iterator[Metric]:
    labels = RequestLabels._fields
    requests = CounterMetricFamily("gyre_storage_requests", "Requests to storage that were answered or failed.", labels=labels)
    read = CounterMetricFamily("gyre_storage_read_bytes", "What the requests to storage brought.", labels=labels)
    for of, count in sorted(counts.items()):
        requests.add_metric(list(of), count.num_requests)
        read.add_metric(list(of), count.num_bytes)
    yield requests
    yield read


def _cache(counts: CacheCounts) -> Iterator[Metric]:
    reads = CounterMetricFamily("gyre_cache_reads", "Reads from object storage, by what the node cache had.", labels=["found"])
    for found, count in (("there", counts.num_hits), ("on its way", counts.num_joined), ("nothing", counts.num_misses)):
        reads.add_metric([found], count)
    yield reads
    yield CounterMetricFamily("gyre_cache_reads_past", "Reads that went to the storage beside the cache.", counts.num_past)
    yield CounterMetricFamily("gyre_cache_blocks_fetched", "Blocks taken into the cache.", counts.num_blocks_fetched)
    yield CounterMetricFamily("gyre_cache_fetched_bytes", "Their bytes.", counts.num_bytes_fetched)
    yield CounterMetricFamily("gyre_cache_blocks_evicted", "Blocks that went for others.", counts.num_evicted)
    yield CounterMetricFamily("gyre_cache_blocks_corrupt", "Blocks on disk that were damaged.", counts.num_corrupt)
    held = GaugeMetricFamily("gyre_cache_held_bytes", "Blocks that the cache holds.", labels=["where"])
    held.add_metric(["memory"], counts.memory_bytes)
    held.add_metric(["disk"], counts.disk_bytes)
    yield held


def _loop_lag(lag: LoopLag) -> Metric:
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, [*lag.at_most, lag.num_timers], strict=True))
    return HistogramMetricFamily(
        "gyre_event_loop_lag_seconds", "How late a timer of the daemon's event loop is.", buckets, lag.sum_s
    )


class Exposition(Collector):
    """A daemon's metrics and those of its process, as text."""

    def __init__(self, take_census: Callable[[], Census]) -> None:
        self._take_census = take_census
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """See `families`."""
        return families(self._take_census())

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names are known without looking at a daemon."""
        return []

    def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics now, and their content type: OpenMetrics for a scraper that accepts it, plain text for others."""
        if OPENMETRICS in accept:
            body: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
