"""The daemon's counters: plain numbers that its status and its metrics are rendered from."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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

    num_requests: int = 0
    num_bytes: int = 0
    first_byte_s: float = 0.0
    body_s: float = 0.0


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
    """

    num_hits: int = 0
    num_misses: int = 0
    num_joined: int = 0
    num_past: int = 0
    num_blocks_fetched: int = 0
    num_bytes_fetched: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


@dataclass(slots=True)
class TransformCounts:
    """The work of worker processes on samples.

    Attributes:
        num_samples: samples that were transformed.
        cpu_s: processor time of that.
        num_replaced: processes that died or hung, and were replaced.
    """

    num_samples: int = 0
    cpu_s: float = 0.0
    num_replaced: int = 0


@dataclass(slots=True)
class Metrics:
    """The counters of one daemon since its start; they belong to the event loop."""

    storage: dict[RequestLabels, RequestCount] = field(default_factory=dict)
    num_batches_sent: int = 0
    num_bytes_sent: int = 0
    num_substitutes_sent: int = 0
    jobs: Jobs = field(default_factory=Jobs)
    cache: CacheCounts = field(default_factory=CacheCounts)
    transforms: TransformCounts = field(default_factory=TransformCounts)

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
