"""What the daemon counts. Plain numbers, owned by one daemon, read by its status."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gyre_daemon.jobs import Jobs

RequestKind = Literal["read", "list", "stream"]
Outcome = Literal["ok", "error"]


class RequestLabels(NamedTuple):
    """The bounded labels of a storage request."""

    scheme: str
    kind: RequestKind
    outcome: Outcome


@dataclass(slots=True)
class RequestCount:
    """How many requests there were and how many bytes they brought."""

    num_requests: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class Metrics:
    """The counters of one daemon since its start; updated on the event loop only."""

    storage: dict[RequestLabels, RequestCount] = field(default_factory=dict)
    num_batches_sent: int = 0
    num_bytes_sent: int = 0
    jobs: Jobs = field(default_factory=Jobs)

    def count_requests(self, labels: RequestLabels, num_requests: int, num_bytes: int) -> None:
        """Add requests of one kind and outcome."""
        count = self.storage.setdefault(labels, RequestCount())
        count.num_requests += num_requests
        count.num_bytes += num_bytes
