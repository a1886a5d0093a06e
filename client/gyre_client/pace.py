"""How fast sessions go, and what holds them up: from what the daemon says of each one's last seconds. Pure."""

from dataclasses import asdict, dataclass
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

STORAGE_BOUND = "storage-bound"
PROCESSOR_BOUND = "processor-bound"
TRAINER_BOUND = "trainer-bound"
BALANCED = "balanced"
IDLE = "idle"

_EMPTY, _FULL = 0.25, 0.75  # credits and reads come in quarters of a window, so it is never quite empty or full
_MIN_ELAPSED_S = 0.1  # less says nothing of speed


@dataclass(frozen=True, slots=True)
class Pace:
    """One session over its last seconds: ten, or since it began.

    Attributes:
        batches_per_s: Taken by the trainer.
        bytes_per_s: Of their payload.
        occupancy: Mean share of the prefetch window that was ready, in [0, 1]; None where it had none.
        starved: Share of the time that the trainer stood still for want of a batch, as its client tells, in [0, 1].
        wait_storage: Share of the time that the client would have taken a batch and none was ready: storage had not answered.
        wait_processor: The same for want of a processor, to copy or decode it.
        wait_trainer: Share of the time that a batch was ready and the client took none.
    """

    batches_per_s: float
    bytes_per_s: float
    occupancy: float | None
    starved: float
    wait_storage: float
    wait_processor: float
    wait_trainer: float

    @property
    def meaning(self) -> str:
        """What holds the session up: an empty window waits for storage or a processor, a full one for its trainer."""
        if self.occupancy is None:
            return IDLE
        if self.occupancy <= _EMPTY:
            return PROCESSOR_BOUND if self.wait_processor > self.wait_storage else STORAGE_BOUND
        return TRAINER_BOUND if self.occupancy >= _FULL else BALANCED

    def to_plain(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {**asdict(self), "meaning": self.meaning}


def pace(session: pb.SessionState) -> Pace | None:
    """The pace of a session; None of one that has just begun."""
    lately = session.lately
    elapsed_s = lately.elapsed_s
    if elapsed_s < _MIN_ELAPSED_S:
        return None
    size_s = lately.window_size_batch_s
    return Pace(
        batches_per_s=lately.batches_per_s,
        bytes_per_s=lately.bytes_per_s,
        occupancy=_share(lately.window_ready_batch_s, size_s) if size_s > 0 else None,
        starved=_share(lately.trainer_waited_s, elapsed_s),
        wait_storage=_share(lately.wait_storage_s, elapsed_s),
        wait_processor=_share(lately.wait_processor_s, elapsed_s),
        wait_trainer=_share(lately.wait_trainer_s, elapsed_s),
    )


def _share(part: float, whole: float) -> float:
    """In [0, 1]: a client tells of its waiting when it ends, so of more than there was time for."""
    return min(max(part / whole, 0.0), 1.0)
