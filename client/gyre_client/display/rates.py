"""Rates and bottlenecks of sessions, and the progress of measuring, from the daemon's counts."""

from dataclasses import asdict, dataclass
from typing import Any

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

STORAGE_BOUND = "storage-bound"
PROCESSOR_BOUND = "processor-bound"
TRAINER_BOUND = "trainer-bound"
BALANCED = "balanced"
IDLE = "idle"

# Window occupancies that count as empty and as full. Credits and reads come in quarters of a
# window, so a window is hardly ever quite empty or quite full.
_EMPTY, _FULL = (0.25, 0.75)
_MIN_ELAPSED_S = 0.1  # a shorter time says nothing about a rate


@dataclass(frozen=True, slots=True)
class SessionRates:
    """One session over its last ten seconds, or since it began.

    Attributes:
        batches_per_s: Batches that the trainer took.
        bytes_per_s: Payload of those batches.
        occupancy: The mean share of the prefetch window that was ready, in [0, 1]; None if there
            was no window.
        starved: The share of the time that the trainer had no batch to go on with, in [0, 1], as
            its client reports.
        wait_storage: The share of the time that the client had credit and no batch was ready
            because storage had not answered.
        wait_processor: The same, because no processor was free to copy or decode the batch.
        wait_trainer: The share of the time that a batch was ready and the client had no credit.
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
        """The bottleneck of the session.

        An empty window waits for storage or for a processor, a full one for its trainer.
        """
        if self.occupancy is None:
            return IDLE
        if self.occupancy <= _EMPTY:
            return PROCESSOR_BOUND if self.wait_processor > self.wait_storage else STORAGE_BOUND
        return TRAINER_BOUND if self.occupancy >= _FULL else BALANCED

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON-ready values."""
        return {**asdict(self), "meaning": self.meaning}


def session_rates(session: pb.SessionState) -> SessionRates | None:
    """Returns the rates of a session; None if it has just begun."""
    lately = session.lately
    elapsed_s = lately.elapsed_s
    if elapsed_s < _MIN_ELAPSED_S:
        return None
    size_s = lately.window_size_batch_s
    return SessionRates(
        batches_per_s=lately.batches_per_s,
        bytes_per_s=lately.bytes_per_s,
        occupancy=_share(lately.window_ready_batch_s, size_s) if size_s > 0 else None,
        starved=_share(lately.trainer_waited_s, elapsed_s),
        wait_storage=_share(lately.wait_storage_s, elapsed_s),
        wait_processor=_share(lately.wait_processor_s, elapsed_s),
        wait_trainer=_share(lately.wait_trainer_s, elapsed_s),
    )


def _share(part: float, whole: float) -> float:
    """Returns a share in [0, 1]: a wait is reported when it ends, so it may exceed the interval."""
    return min(max(part / whole, 0.0), 1.0)


def measuring_line(state: pb.MeasuringState) -> str:
    """Returns a line such as `wiki: 1,200 of 40,000 samples (3.0%), 85/s, 456 s left`."""
    done, whole = state.num_done, max(state.num_samples, 1)
    line = (
        f"{printable(state.dataset)}: {done:,} of {counted(state.num_samples, 'sample', ',')} "
        f"({done / whole:.1%})"
    )
    num_new = done - state.num_reused
    if num_new <= 0 or state.elapsed_s <= 0:
        return line
    rate = num_new / state.elapsed_s
    left_s = max(state.num_samples - done, 0) / rate
    return f"{line}, {rate:,.0f}/s, {left_s:,.0f} s left"
