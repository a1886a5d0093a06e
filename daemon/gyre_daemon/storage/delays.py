"""Why reads took as long as they did: a small account of the requests that they became."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestDelays:
    """Where one request's time went.

    Attributes:
        shard: its name.
        start: of the bytes `[start, stop)`.
        stop: see there.
        queue_s: until its turn came.
        tried_s: in tries that failed, and in pauses after them.
        first_byte_s: of the try that succeeded, until its answer began.
        body_s: and until it was whole.
        num_tries: requests sent for it, second ones included.
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
        """From being asked for to being there."""
        return self.queue_s + self.tried_s + self.first_byte_s + self.body_s


@dataclass(slots=True)
class Delays:
    """What some reads took, and the requests that they became.

    Attributes:
        read_s: until the last byte was there.
        storage_s: of that, waiting for the storage; the rest is copying, and waiting for a thread.
        finish_s: from there until all was checked and decoded; waiting for a thread included.
        num_requests: ranges that were needed.
        num_joined: of those, the ones that somebody else was asking for already.
        num_refused: answers 429 and 503.
        num_retries: requests sent again.
        num_hedges: requests sent a second time because the first was late.
        num_bytes: brought.
        slowest: the one that took longest, if any was needed.
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
