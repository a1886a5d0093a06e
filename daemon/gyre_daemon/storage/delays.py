"""How long reads took, and the requests that they became. Values without I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestDelays:
    """Where one request's time went.

    Attributes:
        shard: its name.
        start: the first requested byte.
        stop: the byte after the last.
        queue_s: time in the queue before the first attempt.
        tried_s: time spent on attempts that failed, and on pauses between them.
        first_byte_s: time from sending the successful attempt to its first byte.
        body_s: time from the first byte to the last.
        num_tries: attempts, hedges included.
    """

    shard: str
    start: int
    stop: int
    queue_s: float
    tried_s: float
    first_byte_s: float
    body_s: float
    num_tries: int

    @property
    def total_s(self) -> float:
        """Time from the request to the last byte."""
        return self.queue_s + self.tried_s + self.first_byte_s + self.body_s


@dataclass(slots=True)
class Delays:
    """How long some reads took, and the requests that they became.

    Attributes:
        read_s: time until the last byte was in memory.
        storage_s: the part of `read_s` spent waiting for the storage; the rest is copying, and
            waiting for a thread.
        finish_s: time from there until everything was checked and decoded, waiting for a thread
            included.
        num_requests: ranges that were needed.
        num_joined: ranges that another read was already fetching.
        num_refused: responses with status 429 or 503.
        num_retries: requests sent again after a failure.
        num_hedges: requests sent again because the first was late.
        num_bytes: bytes received.
        slowest: the request that took longest, if any was sent.
    """

    read_s: float = 0.0
    storage_s: float = 0.0
    finish_s: float = 0.0
    num_requests: int = 0
    num_joined: int = 0
    num_refused: int = 0
    num_retries: int = 0
    num_hedges: int = 0
    num_bytes: int = 0
    slowest: RequestDelays | None = None

    def add_requests(self, other: "Delays") -> None:
        """Count the requests of reads that were done at the same time as these."""
        for name in ("num_requests", "num_joined", "num_refused", "num_retries", "num_hedges"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_bytes += other.num_bytes
        slowest = [each for each in (self.slowest, other.slowest) if each]
        self.slowest = max(slowest, key=lambda each: each.total_s, default=None)
