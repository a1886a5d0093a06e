"""Why batches took as long as they did: a bounded record, which `gyre why` reads. Pure: the caller brings the clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_daemon.storage.delays import Delays

MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class BatchAccount:
    """What became of the batches that were read together, in most storages one.

    Attributes:
        dataset: its name.
        job: of the feed's owner.
        rank: whose part of the global batches.
        world_size: of how many ranks.
        first_step: of the batches of steps `[first_step, stop_step)`.
        stop_step: see there.
        begun_at: on the caller's clock.
        total_s: from being begun to being whole.
        is_awaited: a trainer had nothing to read when it came.
        delays: of its reads.
        error: why it failed; empty if it did not.
    """

    dataset: str
    job: str
    rank: int
    world_size: int
    first_step: int
    stop_step: int
    begun_at: float
    total_s: float
    is_awaited: bool
    delays: Delays
    error: str


class Accounts:
    """The last accounts of all feeds."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._kept: deque[BatchAccount] = deque(maxlen=max_kept)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._kept)

    def add(self, account: BatchAccount) -> None:
        """Keep one more; the oldest goes."""
        self._kept.append(account)

    def find(self, dataset: str, step: int, job: str = "") -> Sequence[BatchAccount]:
        """Those of a step, the newest first; of all jobs unless one is named."""
        return [
            each
            for each in reversed(self._kept)
            if each.dataset == dataset and each.first_step <= step < each.stop_step and job in ("", each.job)
        ]
