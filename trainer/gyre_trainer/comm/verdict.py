"""Why a ring failed, as the first rank that knows it tells all others through their store.

A rank that ends because of a failure is itself missing to the others, so what they would find out
later is about the consequences.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

_VERDICT = "verdict"  # this key of the store exists once a rank knows
_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a ring failed.

    Attributes:
        text: the same on every rank; names the rank at fault, or the modules that differ.
        is_mispaired: whether ranks call different modules; else a rank is gone or too late.
        missing: the ranks that have ended or were stopped, so that they read no verdict.
    """

    text: str
    is_mispaired: bool = False
    missing: Sequence[int] = ()


class Verdicts:
    """One rank's view of the one verdict of a group. Several threads may use it.

    Attributes:
        seen: the verdict, once this rank has read it.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        """``store`` belongs to this group alone; an earlier one may have left keys in it."""
        self.seen: Verdict | None = None
        self._store = store
        self._rank = rank
        self._ranks = ranks
        store.delete_key(_read_by(rank))
        if rank == ranks[0]:
            store.delete_key(_VERDICT)

    def first(self) -> Verdict | None:
        """The verdict, or None where no rank has published one yet.

        Raises:
            RuntimeError: the store is gone.
        """
        if self.seen is None and self._store.check([_VERDICT]):
            self.seen = Verdict(**json.loads(self._store.get(_VERDICT)))
            self._store.set(_read_by(self._rank), "yes")
        return self.seen

    def publish(self, verdict: Verdict) -> Verdict:
        """Publish a verdict unless there is one; returns the one that stays.

        Raises:
            RuntimeError: the store is gone.
        """
        self._store.compare_set(_VERDICT, "", json.dumps(asdict(verdict)))
        return self.first() or verdict

    def wait_until_read(self, verdict: Verdict, timeout_s: float) -> None:
        """Return when all ranks that live have read the verdict, or at the timeout.

        Raises:
            RuntimeError: the store is gone.
        """
        waiting = [rank for rank in self._ranks if rank not in verdict.missing]
        deadline_s = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline_s:
            waiting = [rank for rank in waiting if not self._store.check([_read_by(rank)])]
            if waiting:
                time.sleep(_POLL_INTERVAL_S)


def _read_by(rank: int) -> str:
    return f"verdict read by {rank}"
