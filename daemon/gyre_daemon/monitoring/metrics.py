"""What the daemon counts. Plain numbers, owned by one daemon, read by its status."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gyre_daemon.monitoring.jobs import Jobs

RequestKind = Literal["read", "list", "stream"]
# Of each request that was sent: its bytes were used; it was answered 429 or 503, or reached nobody; it failed otherwise and was
# tried again; its twin was faster; nobody waited any more; it failed for good.
Outcome = Literal["ok", "refused", "retried", "hedged", "abandoned", "error"]


class RequestLabels(NamedTuple):
    """The bounded labels of a storage request."""

    scheme: str
    kind: RequestKind
    outcome: Outcome


@dataclass(slots=True)
class RequestCount:
    """How many requests there were, how many bytes they brought, and what they took together where that was timed."""

    num_requests: int = 0
    num_bytes: int = 0
    first_byte_s: float = 0.0
    body_s: float = 0.0


@dataclass(slots=True)
class CacheCounts:
    """What the node cache did, in reads and in blocks.

    Attributes:
        num_hits: reads whose block was there.
        num_misses: reads that found none.
        num_joined: reads whose block was on its way for another.
        num_past: reads that went to the storage beside the cache; those of `num_misses` that a block could not be had for.
        num_blocks_fetched: whole blocks.
        num_bytes_fetched: their bytes.
        num_evicted: blocks that went for others.
        num_corrupt: blocks on disk that were not what was written, and were fetched anew.
        memory_bytes: held now.
        disk_bytes: held now.
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
class Metrics:
    """The counters of one daemon since its start; updated on the event loop only."""

    storage: dict[RequestLabels, RequestCount] = field(default_factory=dict)
    num_batches_sent: int = 0
    num_bytes_sent: int = 0
    jobs: Jobs = field(default_factory=Jobs)
    cache: CacheCounts = field(default_factory=CacheCounts)

    def requests(self, labels: RequestLabels) -> RequestCount:
        """The count of the requests of one kind and outcome, to add to."""
        count = self.storage.get(labels)
        if count is None:
            count = self.storage[labels] = RequestCount()
        return count

    def count_requests(self, labels: RequestLabels, num_requests: int, num_bytes: int) -> None:
        """Add requests of one kind and outcome."""
        count = self.requests(labels)
        count.num_requests += num_requests
        count.num_bytes += num_bytes
