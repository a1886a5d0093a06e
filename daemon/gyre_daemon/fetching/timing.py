"""How long batches took, and why: a bounded record, which `gyre why` reads. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_daemon.storage.delays import Delays

MAX_KEPT = 4096  # batch groups: some minutes of a busy daemon, in about 1 MiB


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """The record of the batches of steps `[first_step, stop_step)`, which were read together.

    Attributes:
        dataset: the name of the dataset.
        job: the job for which they were read: that of the shared stream's owner.
        user: whose job it is.
        readers: the users whose sessions read them from the shared stream; one that joins it later
            is added when it takes them.
        rank: the rank whose part of the global batches they are.
        world_size: the number of ranks.
        first_step: the first step.
        stop_step: the step after the last.
        begun_at: when they were begun, on the daemon's clock.
        total_s: the seconds from then until they were complete.
        is_awaited: whether a trainer had nothing to read when they were complete.
        delays: the waits of their reads.
        error: why one of them failed; empty if none did.
    """

    dataset: str
    job: str
    user: str
    readers: set[str]
    rank: int
    world_size: int
    first_step: int
    stop_step: int
    begun_at: float
    total_s: float
    is_awaited: bool
    delays: Delays
    error: str


class BatchTimings:
    """The timings of the last batch groups of all shared streams."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._kept: deque[BatchTiming] = deque(maxlen=max_kept)

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._kept)

    def add(self, timing: BatchTiming) -> None:
        """Keep one more; where there are too many, the oldest goes."""
        self._kept.append(timing)

    def find(
        self, dataset: str, step: int, job: str = "", reader: str | None = None
    ) -> Sequence[BatchTiming]:
        """The timings of a step, the newest first.

        Args:
            dataset: its name.
            step: one of those that were read together.
            job: of this job only; empty for all.
            reader: count this user's sessions alone; None for all users.
        """
        return [
            each
            for each in reversed(self._kept)
            if each.dataset == dataset
            and each.first_step <= step < each.stop_step
            and job in ("", each.job)
            and (reader is None or reader in each.readers)
        ]
