"""The counters of a daemon, its jobs and its sessions, each with its name and meaning.

If a window is full on average, the trainer cannot keep up; if it is empty, the storage cannot. A
look now and then shows neither, since the window changes with every batch. So integrals over time
are kept: any two readings give the mean between them, for any number of observers. The caller
brings the clock.

Clients choose the names of jobs, and a loader without one makes one up, so the number of jobs that
have separate counters must be bounded. Beyond `MAX_JOBS`, a new job replaces the one that has been
without a session for longest. If all have sessions, the new job's session is counted under `OTHERS`
until it closes, so that no counter falls while it is read.

Batches are sent in groups that may be seconds apart, so the number sent in a second is no rate. The
client reports now and then how many batches its trainer has taken. Between two such reports, some
ten seconds apart, the rate is exact.

A metric is two lines: a field here and the line that counts. Prometheus and `gyre status` get all
of them from the fields, with name, meaning and labels; a name ends in its unit. One that counts by
job is a field of `SessionTotals`, which `SessionAccount.totals` fills, or of `SessionGauges`. A
field that is a dataclass brings its own metrics; one that is a mapping has a series for each key.

Counters of a job are sums over its sessions, closed ones included, so that `rate()` works across a
job's restarts. The ratio of the rates of its window's two counters, ready and size, is its mean
occupancy. Near 1 the job is trainer-bound. Near 0 it waits for storage or for a processor.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate
from operator import add, sub
from typing import Any, Literal, NamedTuple, Self

from gyre_daemon.errors import GyreError

_METRIC, _LABELS = "metric", "labels"  # keys of a field's metadata


class Declared(NamedTuple):
    """A metric as its field declares it; see `counter` and `gauge`."""

    kind: Literal["counter", "gauge"]
    name: str
    meaning: str
    labels: Mapping[str, str]


def counter(name: str, text: str, **labels: str) -> Any:
    """A field that counts from 0; `name` is without `_total`; labels tell equal names apart."""
    return field(default=0, metadata={_METRIC: Declared("counter", name, text, labels)})


def gauge(name: str, text: str, default: float = 0, **labels: str) -> Any:
    """A field with a present value; see `counter`."""
    return field(default=default, metadata={_METRIC: Declared("gauge", name, text, labels)})


def labelled(*names: str, of: Any = None) -> Any:
    """A mapping with a series for each key, whose parts are the values of the labels.

    Its values are dataclasses with metrics, or numbers `of` a `counter(...)` or `gauge(...)`.
    """
    metadata = {**(of.metadata if of else {}), _LABELS: names}
    return field(default_factory=dict, metadata=metadata)


class Series(NamedTuple):
    """A metric as `gyre status` shows it, such as `gyre_errors_total{kind="CorruptSample"}`."""

    name: str
    value: float
    meaning: str


def series_of(*values: object) -> Iterator[Series]:
    """All series of some dataclasses but those of jobs, whose sessions show them."""
    for each in values:
        for (kind, name, text, _), labels, value in readings(each):
            if "job_name" not in labels:
                total = "_total" if kind == "counter" else ""
                pairs = ",".join(f'{key}="{label}"' for key, label in labels.items())
                yield Series(f"{name}{total}{f'{{{pairs}}}' if pairs else ''}", float(value), text)


def readings(
    values: Any, labels: Mapping[str, str] | None = None
) -> Iterator[tuple[Declared, dict[str, str], Any]]:
    """All metrics of a dataclass as they were declared, each with its labels and its value."""
    labels = labels or {}
    for each in fields(values):
        value, names = getattr(values, each.name), each.metadata.get(_LABELS)
        if names is None:
            yield from _of_value(each.metadata.get(_METRIC), value, labels)
        else:
            for key, of_key in value.items():
                parts = key if isinstance(key, tuple) else (key,)
                own = dict(zip(names, map(str, parts), strict=True))
                yield from _of_value(each.metadata.get(_METRIC), of_key, {**labels, **own})


def _of_value(
    metric: Declared | None, value: Any, labels: Mapping[str, str]
) -> Iterator[tuple[Declared, dict[str, str], Any]]:
    if metric:
        yield metric, {**labels, **metric.labels}, value
    elif is_dataclass(value):
        yield from readings(value, labels)


# Weight of the past when a batch group is added, so that about ten groups count. With many more, it
# would show late that a cache has become warm; with fewer, single slow reads would show.
_KEPT = 0.9


class _Sums:
    """Dataclasses of numbers: the sum of two is that of each field."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        return self._with(add, other)

    def __sub__(self, other: Self) -> Self:
        return self._with(sub, other)

    def _with(self, work: Callable[[Any, Any], Any], other: Self) -> Self:
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        return type(self)(*(work(getattr(self, name), getattr(other, name)) for name in names))


@dataclass(frozen=True, slots=True)
class WindowTimes(_Sums):
    """Integrals over time since a session's start; they never fall."""

    window_ready_batch_s: float = counter(
        "gyre_job_window_ready_batch_seconds",
        "Ready batches in a job's prefetch windows, integrated over time.",
    )
    window_size_batch_s: float = counter(
        "gyre_job_window_size_batch_seconds",
        "Sizes of a job's prefetch windows, integrated over time.",
    )
    wait_storage_s: float = counter(
        "gyre_job_wait_for_storage_seconds",
        "Time in which a trainer would have taken a batch, and storage had not answered.",
    )
    wait_trainer_s: float = counter(
        "gyre_job_wait_for_trainer_seconds",
        "Time in which a batch was ready, and no trainer took it.",
    )
    wait_processor_s: float = counter(
        "gyre_job_wait_for_processor_seconds",
        "Time in which a trainer would have taken a batch that waited for a processor.",
    )


class Occupancy:
    """Integrates the state of one session's window."""

    def __init__(self, now: float) -> None:
        """The window is empty and no client waits until the first `note`; `now` is monotonic."""
        self._since = now
        self._num_ready = self._size = 0
        self._is_batch_late = self._is_trainer_late = False
        self._storage_share = 1.0
        self._times = WindowTimes()  # up to `_since`

    def note(
        self,
        now: float,
        num_ready: int,
        size: int,
        num_credits: int,
        *,
        is_head_ready: bool,
        storage_share: float = 1.0,
    ) -> None:
        """Set the window's state from `now` on.

        Args:
            now: not before that of the last call.
            num_ready: batches ready but not sent.
            size: of the window, in batches; near the end of a stream, the batches still to be sent
                if they are fewer.
            num_credits: batches that the client would take.
            is_head_ready: whether the next batch to be sent is ready.
            storage_share: how much of the wait for the next batch counts as waiting for storage, in
                [0, 1]; see `StorageShare`.
        """
        self._times = self.at(now)
        self._since, self._num_ready, self._size = now, num_ready, size
        self._storage_share = storage_share
        self._is_batch_late = num_credits > 0 and size > 0 and not is_head_ready
        self._is_trainer_late = num_credits == 0 and is_head_ready

    def at(self, now: float) -> WindowTimes:
        """The integrals up to `now`."""
        times, elapsed_s = self._times, now - self._since
        late_s = elapsed_s if self._is_batch_late else 0.0
        return WindowTimes(
            times.window_ready_batch_s + self._num_ready * elapsed_s,
            times.window_size_batch_s + self._size * elapsed_s,
            times.wait_storage_s + late_s * self._storage_share,
            times.wait_trainer_s + (elapsed_s if self._is_trainer_late else 0.0),
            times.wait_processor_s + late_s * (1.0 - self._storage_share),
        )


class StorageShare:
    """The share of storage in the time that the last batches took to become ready.

    The rest is copying, checking and decoding, or waiting for a processor to do it.
    """

    def __init__(self, *, until_known: float) -> None:
        """Nothing was read yet; `until_known` in [0, 1] is the share until something was."""
        self._until_known = until_known
        self._storage_s = self._total_s = 0.0

    def add(self, storage_s: float, total_s: float) -> None:
        """Add a batch group that took `total_s`, with `storage_s` of it in storage."""
        self._storage_s = self._storage_s * _KEPT + min(storage_s, total_s)
        self._total_s = self._total_s * _KEPT + total_s

    @property
    def value(self) -> float:
        """The share, in [0, 1]."""
        return self._storage_s / self._total_s if self._total_s > 0 else self._until_known


MAX_JOBS = 64  # each has some 15 time series in Prometheus


class JobKey(NamedTuple):
    """A job, by its user, the name of a principal, and the name that its client chose."""

    user: str
    name: str


OTHERS = JobKey("", "_others")  # all jobs without separate counters


@dataclass(frozen=True, slots=True)
class SessionTotals(_Sums):
    """Totals of a session; the sum of two is that of both."""

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


@dataclass(frozen=True, slots=True)
class SessionGauges(_Sums):
    """Present state of a session; the sum of two is that of both."""

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
        """Count a session that opens; returns the job that it is counted under until `close`."""
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
        """The totals of each job, over its closed and its open sessions, which are `live`."""
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


# Rates are means over SPAN_S. With half of it, a job of one batch per second would be shown 4, 5 or
# 6 of them; with twice as much, a change would show after half a minute. Marks are MIN_GAP_S apart,
# so that a session keeps some twenty. Clients report every second while batches are taken; after
# SILENCE_S without a report, none was.
SPAN_S = 10.0
MIN_GAP_S = 0.5
SILENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Lately:
    """The rates and waits of a session in its last seconds, of batches that a trainer took."""

    elapsed_s: float
    batches_per_s: float
    bytes_per_s: float
    times: WindowTimes
    trainer_waited_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    num_taken: int
    totals: SessionTotals


class Recorder:
    """Remembers where a session stood at some moments of the last `SPAN_S`."""

    def __init__(self, now: float) -> None:
        """The session begins at `now`, in seconds of a monotonic clock as everywhere here."""
        self._marks = deque([_Mark(now, 0, SessionTotals())])

    def is_due(self, now: float) -> bool:
        """Whether the last mark is old enough for another one."""
        return now - self._marks[-1].at >= MIN_GAP_S

    def mark(self, now: float, num_taken: int, totals: SessionTotals) -> None:
        """Remember that the trainer has taken `num_taken` batches so far, and the totals."""
        self._marks.append(_Mark(now, num_taken, totals))
        self._forget(now)

    def at(self, now: float, totals: SessionTotals) -> Lately:
        """The last `SPAN_S` before `now`, or the time since the session began if shorter."""
        self._forget(now)
        first, last = self._marks[0], self._marks[-1]
        is_silent = last is first or now - last.at > SILENCE_S
        counted_s = (now if is_silent else last.at) - first.at
        batches_per_s = (last.num_taken - first.num_taken) / counted_s if counted_s > 0 else 0.0
        mean_bytes = totals.num_bytes / totals.num_batches if totals.num_batches else 0.0
        return Lately(
            now - first.at,
            batches_per_s,
            batches_per_s * mean_bytes,
            totals.times - first.totals.times,
            totals.trainer_waited_s - first.totals.trainer_waited_s,
        )

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1].at <= now - SPAN_S:
            self._marks.popleft()


RequestKind = Literal["read", "list"]
# How a request ended. ok: its bytes were used. refused: it was answered with 429 or 503, or could
# not connect. retried: it failed otherwise and was sent again. hedged: its duplicate was faster.
# abandoned: no reader waited for it any more. error: it failed for good.
Outcome = Literal["ok", "refused", "retried", "hedged", "abandoned", "error"]


class RequestLabels(NamedTuple):
    """The bounded labels of a storage request."""

    scheme: str
    kind: RequestKind
    outcome: Outcome


@dataclass(slots=True)
class RequestCount:
    """Requests of one kind and outcome."""

    num_requests: int = counter(
        "gyre_storage_requests", "Requests to storage that were answered or failed."
    )
    num_bytes: int = counter("gyre_storage_read_bytes", "Bytes that requests to storage brought.")


_CACHE_READS = "Reads from object storage, by the part that the node cache had."
_CACHE_HELD = "Bytes of the blocks that the cache holds."


@dataclass(slots=True)
class CacheCounts:
    """Reads and blocks of the node cache."""

    num_hits: int = counter("gyre_cache_reads", _CACHE_READS, found="there")
    num_misses: int = counter("gyre_cache_reads", _CACHE_READS, found="nothing")
    num_joined: int = counter("gyre_cache_reads", _CACHE_READS, found="on its way")
    num_past: int = counter("gyre_cache_reads_past", "Reads that bypassed the node cache.")
    num_blocks_fetched: int = counter("gyre_cache_blocks_fetched", "Blocks taken into the cache.")
    num_bytes_fetched: int = counter("gyre_cache_fetched_bytes", "Bytes of the blocks taken.")
    num_evicted: int = counter("gyre_cache_blocks_evicted", "Blocks dropped to make room.")
    num_corrupt: int = counter("gyre_cache_blocks_corrupt", "Damaged blocks found on disk.")
    memory_bytes: int = gauge("gyre_cache_held_bytes", _CACHE_HELD, where="memory")
    disk_bytes: int = gauge("gyre_cache_held_bytes", _CACHE_HELD, where="disk")
    num_disk_failures: int = counter(
        "gyre_cache_disk_failures", "Writes to cache_dir, and removals there, that failed."
    )
    is_disk_failing: bool = gauge(
        "gyre_cache_disk_failing",
        "1 while no block is written to cache_dir, since it fails or could not be opened.",
        default=False,
    )


@dataclass(slots=True)
class TransformCounts:
    """The work of worker processes on samples."""

    num_samples: int = counter("gyre_samples_transformed", "Samples that were transformed.")
    cpu_s: float = counter("gyre_transform_cpu_seconds", "Processor time of transforms.")
    num_replaced: int = counter(
        "gyre_transform_workers_replaced",
        "Processes that died or hung while they transformed samples.",
    )


@dataclass(slots=True)
class MountGauges:
    """A mount that was used in the last half minute."""

    hangs_for_s: float = gauge(
        "gyre_mount_hangs_seconds", "How long a mount has not answered; 0 if it does."
    )
    read_s: float = gauge("gyre_mount_read_seconds", "Median time of a mount's last reads.")


@dataclass(slots=True)
class Metrics:
    """The counters of one daemon since its start; they belong to the event loop."""

    storage: dict[RequestLabels, RequestCount] = labelled("scheme", "kind", "outcome")
    num_batches_sent: int = counter("gyre_batches_sent", "Batches sent to all trainers.")
    num_bytes_sent: int = counter("gyre_sent_bytes", "Payload of the batches sent to all trainers.")
    num_substitutes_sent: int = counter(
        "gyre_substitutes_sent", "Samples sent in place of corrupt ones (on_corrupt)."
    )
    jobs: Jobs = field(default_factory=Jobs)
    cache: CacheCounts = field(default_factory=CacheCounts)
    transforms: TransformCounts = field(default_factory=TransformCounts)
    errors: dict[str, int] = labelled(
        "kind", of=counter("gyre_errors", "Calls and streams that ended with an error, by class.")
    )
    is_reload_good: bool = gauge(
        "gyre_last_reload_successful", "0 if the last reload was refused.", default=True
    )
    reloaded_at: float = gauge(
        "gyre_last_reload_timestamp_seconds", "When the configuration was last read again; or 0."
    )
    expires: Mapping[tuple[str, str], float] = labelled(
        *("kind", "name"),
        of=gauge(
            "gyre_expires_timestamp_seconds",
            "When the daemon's certificate, a root of clients' ones or the last token of a name "
            "expires.",
        ),
    )
    mounts: Mapping[tuple[str, str], MountGauges] = labelled("mount", "file_system")

    def __post_init__(self) -> None:
        # Prometheus sees no increase where a series begins with 1
        self.errors |= {kind.__name__: 0 for kind in _family(GyreError)}

    def count_error(self, error: GyreError) -> None:
        """Add a call or a stream that ended with this error."""
        self.errors[type(error).__name__] += 1

    def count_requests(self, labels: RequestLabels, num_requests: int, num_bytes: int) -> None:
        """Add requests of one kind and outcome."""
        count = self.storage.setdefault(labels, RequestCount())
        count.num_requests += num_requests
        count.num_bytes += num_bytes


def _family(kind: type[GyreError]) -> list[type[GyreError]]:
    """A class of errors and all below it."""
    return [kind, *(each for below in kind.__subclasses__() for each in _family(below))]


BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_INTERVAL_S = 0.25  # shorter intervals find shorter delays and wake an idle daemon more often


class LoopLag:
    """A histogram of how late timers of the event loop were: their number, and their sum in s."""

    def __init__(self) -> None:
        self.num_timers = 0
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._due_at = math.inf

    @property
    def late_s(self) -> float:
        """How late the present timer is; in any thread, and above 0 only while `watch` runs."""
        return max(0.0, time.monotonic() - self._due_at)

    @property
    def at_most(self) -> list[int]:
        """How many timers were at most as late as each of `BOUNDS_S`."""
        return list(accumulate(self._counts[:-1]))

    def note(self, late_s: float) -> None:
        """Count one timer; a negative delay counts as none."""
        late_s = max(0.0, late_s)
        self.num_timers += 1
        self.sum_s += late_s
        self._counts[sum(late_s > bound for bound in BOUNDS_S)] += 1

    async def watch(self) -> None:
        """Wait for one timer after another until cancelled."""
        while True:
            self._due_at = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self.note(time.monotonic() - self._due_at)


@dataclass(frozen=True, slots=True)
class Census:
    """The figures of a daemon at one moment, for its status and its metrics; some by job."""

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
    num_job_sessions: Mapping[JobKey, int] = labelled(
        *("user", "job_name"),
        of=gauge("gyre_job_sessions", "Sessions of a job: its ranks on this node."),
    )
    qualities: Mapping[tuple[str, str, str], float] = labelled(
        *("user", "job_name", "of"),
        of=gauge(
            "gyre_job_shuffle_quality",
            "How well a job's last batches were shuffled: 1 is uniform, 0 the order of sample ids.",
        ),
    )
    loop_lag: LoopLag = field(default_factory=LoopLag)
