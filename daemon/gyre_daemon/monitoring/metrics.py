"""The counters of a daemon, each declared with its name and its meaning where it is a field.

A metric is two lines: a field here, or in `jobs` if it counts by job, and the line that counts.
Prometheus and `gyre status` get all of them from the fields. A field that is a dataclass brings its
own metrics; one that is a mapping has a series for each key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.declared import counter, gauge, labelled
from gyre_daemon.monitoring.jobs import Jobs

RequestKind = Literal["read", "list", "stream"]
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
    """Requests of one kind and outcome.

    Attributes:
        num_requests: how many were sent.
        num_bytes: how many bytes they brought.
        first_byte_s: sum of the times to the first byte, where they were measured.
        body_s: sum of the times from the first byte to the last, where they were measured.
    """

    num_requests: int = counter(
        "gyre_storage_requests", "Requests to storage that were answered or failed."
    )
    num_bytes: int = counter("gyre_storage_read_bytes", "Bytes that requests to storage brought.")
    first_byte_s: float = 0.0
    body_s: float = 0.0


_CACHE_READS = "Reads from object storage, by the part that the node cache had."
_CACHE_HELD = "Bytes of the blocks that the cache holds."


@dataclass(slots=True)
class CacheCounts:
    """Reads and blocks of the node cache.

    Attributes:
        num_hits: reads whose block was there.
        num_misses: reads whose block was not there.
        num_joined: reads whose block was being fetched for another read.
        num_past: reads that bypassed the cache, among them misses that got no room for a block.
        num_blocks_fetched: blocks fetched from storage.
        num_bytes_fetched: bytes of those blocks.
        num_evicted: blocks that were dropped to make room.
        num_corrupt: blocks on disk that were damaged, and were fetched again.
        memory_bytes: size of the blocks in memory now, in whole pages.
        disk_bytes: size of the blocks on disk now.
        num_disk_failures: files of `cache_dir` that could not be written or removed.
        is_disk_failing: whether nothing is written for that reason, or for want of the folder.
    """

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
    """The work of worker processes on samples.

    Attributes:
        num_samples: samples that were transformed.
        cpu_s: processor time of that.
        num_replaced: processes that died or hung, and were replaced.
    """

    num_samples: int = counter("gyre_samples_transformed", "Samples that were transformed.")
    cpu_s: float = counter("gyre_transform_cpu_seconds", "Processor time of transforms.")
    num_replaced: int = counter(
        "gyre_transform_workers_replaced",
        "Processes that died or hung while they transformed samples.",
    )


@dataclass(slots=True)
class MountGauges:
    """A mount that was used in the last half minute.

    Attributes:
        hangs_for_s: how long its oldest call has not been answered; 0 if it does not hang.
        read_s: how long one of the last reads took, in the median; 0 until some are measured.
    """

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

    def requests(self, labels: RequestLabels) -> RequestCount:
        """The count of one kind and outcome, for the caller to add to."""
        count = self.storage.get(labels)
        if count is None:
            count = self.storage[labels] = RequestCount()
        return count

    def count_requests(self, labels: RequestLabels, num_requests: int, num_bytes: int) -> None:
        """Add requests of one kind and outcome."""
        count = self.requests(labels)
        count.num_requests += num_requests
        count.num_bytes += num_bytes


def _family(kind: type[GyreError]) -> list[type[GyreError]]:
    """A class of errors and all below it."""
    return [kind, *(each for below in kind.__subclasses__() for each in _family(below))]
