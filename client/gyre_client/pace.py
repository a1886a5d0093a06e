"""How fast sessions go, and what holds them up: from two of a daemon's answers, the time between them. Pure.

The daemon counts and integrates; any two of its answers give the mean of the time between them. An answer alone says nothing of
speed, so a session that only the second one knows has none.
"""

from dataclasses import asdict, dataclass
from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

STORAGE_BOUND = "storage-bound"
TRAINER_BOUND = "trainer-bound"
BALANCED = "balanced"
IDLE = "idle"

_EMPTY, _FULL = 0.25, 0.75  # credits and reads come in quarters of a window, so it is never quite empty or full


@dataclass(frozen=True, slots=True)
class Pace:
    """One session over some time.

    Attributes:
        batches_per_s: Sent.
        bytes_per_s: Of their payload.
        occupancy: Mean share of the prefetch window that was ready, in [0, 1]; None where it had none.
        starved: Share of the time that the trainer stood still for want of a batch, as its client tells, in [0, 1].
        wait_storage: Share of the time that the client would have taken a batch and none was ready.
        wait_trainer: Share of the time that a batch was ready and the client took none.
    """

    batches_per_s: float
    bytes_per_s: float
    occupancy: float | None
    starved: float
    wait_storage: float
    wait_trainer: float

    @property
    def meaning(self) -> str:
        """What holds the session up: an empty window waits for storage, a full one for its trainer."""
        if self.occupancy is None:
            return IDLE
        if self.occupancy <= _EMPTY:
            return STORAGE_BOUND
        return TRAINER_BOUND if self.occupancy >= _FULL else BALANCED

    def to_plain(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return {**asdict(self), "meaning": self.meaning}


def paces(before: pb.DaemonStatus, after: pb.DaemonStatus) -> dict[str, Pace]:
    """The pace of every session that both answers know, by its id. None where they are of two daemons, or of one moment."""
    elapsed_s = after.uptime_s - before.uptime_s
    if before.pid != after.pid or elapsed_s <= 0:
        return {}
    known = {session.session_id: session for session in before.sessions}
    return {
        session.session_id: _pace(known[session.session_id], session, elapsed_s)
        for session in after.sessions
        if session.session_id in known
    }


def _pace(before: pb.SessionState, after: pb.SessionState, elapsed_s: float) -> Pace:
    size_s = after.window_size_batch_s - before.window_size_batch_s
    ready_s = after.window_ready_batch_s - before.window_ready_batch_s
    return Pace(
        batches_per_s=(after.num_batches_sent - before.num_batches_sent) / elapsed_s,
        bytes_per_s=(after.num_bytes_sent - before.num_bytes_sent) / elapsed_s,
        occupancy=_share(ready_s, size_s) if size_s > 0 else None,
        starved=_share(after.trainer_waited_s - before.trainer_waited_s, elapsed_s),
        wait_storage=_share(after.wait_storage_s - before.wait_storage_s, elapsed_s),
        wait_trainer=_share(after.wait_trainer_s - before.wait_trainer_s, elapsed_s),
    )


def _share(part: float, whole: float) -> float:
    """In [0, 1]: a client tells of its waiting when it ends, so of more than there was time for."""
    return min(max(part / whole, 0.0), 1.0)
