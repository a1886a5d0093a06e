"""Finds the rank at fault when a wait fails: the ranks ask each other through their store.

[Note: Hang diagnosis]

A neighbour that did not answer in time may itself have waited for another rank. So each rank keeps
in memory what it waits for and how many waits it has completed. A thread of each rank checks twice
a second whether some rank asks for a diagnosis. If so, it writes its rank's progress to the store.

A rank that writes nothing has ended or was stopped. If all ranks answer, the rank at fault is the
one that waits for nobody and is behind the others. If all ranks wait, it is the one with the fewest
completed waits: it came too late.
"""

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from gyre_trainer.errors import RingError

# A check of the store is one small request, so two per second cost nothing. A diagnosis waits for
# ten intervals. A shorter wait would accuse a rank that a busy machine delays; a longer wait delays
# every error message.
_LOOK_INTERVAL_S = 0.5
_ANSWER_TIMEOUT_S = 5.0
_ASKED = "asked"  # this key of the store exists once a rank has asked
_WHO_SERVES = "rank 0, which serves it, is at fault, unless torchrun or gyre-train serves it"


@dataclass(slots=True)
class RankProgress:
    """How far a rank has come.

    Attributes:
        num_waits_done: the number of waits that the rank has completed.
        waiting_for: what it waits for, such as "rank 0: receiving weights from rank 1"; "" while it
            does something else. It keeps its value after a wait that failed.
    """

    num_waits_done: int = 0
    waiting_for: str = ""


class HangDiagnosis:
    """One rank's part in the diagnosis of a group. It answers other ranks as long as it lives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._progress = RankProgress()
        self._store: Store | None = None
        self._fault = ""
        if len(self._ranks) > 1 and dist.get_backend(group) != "fake":
            # A connection of its own: torch's may be blocked in a wait for another rank.
            store = _get_default_store().clone()  # type: ignore[attr-defined]
            self._store = PrefixStore(f"gyre hang diagnosis of {group.group_name}", store)
            # An earlier group with this store and this name may have left one.
            self._store.delete_key(str(self._rank))
            stop = threading.Event()
            arguments = self._store, self._rank, self._progress, stop
            answers = threading.Thread(target=_answer, args=arguments, daemon=True)
            answers.start()
            weakref.finalize(self, _end, answers, stop)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A context in which this rank waits for others.

        Every rank of the group makes the same waits in the same order.
        """
        self._progress.waiting_for = what
        yield
        self._progress.waiting_for = ""
        self._progress.num_waits_done += 1

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """A context for a collective of the group.

        Raises:
            RingError: the collective failed; the message names the rank at fault.
        """
        try:
            with self.waiting(f"rank {self._rank}: {what}"):
                yield
        except RingError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.error(f"rank {self._rank}: {what}", error) from error

    def error(self, what: str, cause: Exception) -> RingError:
        """The error for a wait for ``what`` that ended in ``cause``; takes up to ten seconds."""
        return RingError(f"{self._find_fault()}; {what} failed: {' '.join(str(cause).split())}")

    def _find_fault(self) -> str:
        """The rank at fault. The ranks are asked once: later failures follow from the first."""
        if self._store is not None and not self._fault:
            found: SimpleQueue[str] = SimpleQueue()
            ask = threading.Thread(
                target=lambda store: found.put(self._ask(store)), args=(self._store,), daemon=True
            )
            ask.start()
            try:
                self._fault = found.get(timeout=2 * _ANSWER_TIMEOUT_S)
            except Empty:
                self._fault = f"the process group's store does not answer; {_WHO_SERVES}"
        return self._fault or "there is no other rank to ask"

    def _ask(self, store: Store) -> str:
        """Ask all ranks for their progress, and say which one is at fault."""
        try:
            _write(store, self._rank, self._progress)
            store.set(_ASKED, "yes")
            missing, deadline_s = self._ranks, time.monotonic() + _ANSWER_TIMEOUT_S
            while missing and time.monotonic() < deadline_s:
                time.sleep(_LOOK_INTERVAL_S / 10)
                missing = [rank for rank in missing if not store.check([str(rank)])]
            answered = [rank for rank in self._ranks if rank not in missing]
            progress = {rank: RankProgress(**json.loads(store.get(str(rank)))) for rank in answered}
        except RuntimeError:
            return f"the process group's store is gone; {_WHO_SERVES}"
        return diagnose(progress, missing)


def _answer(store: Store, rank: int, progress: RankProgress, stop: threading.Event) -> None:
    """Write the rank's progress at every look while some rank asks, until told to stop."""
    try:
        while not stop.wait(_LOOK_INTERVAL_S) and dist.is_initialized():
            if store.check([_ASKED]):
                _write(store, rank, progress)
    except RuntimeError:
        return  # the store is gone, and so is every rank that might ask


def _end(answers: threading.Thread, stop: threading.Event) -> None:
    """Stop the thread and wait for its end: an exit while it is inside torch could crash."""
    stop.set()
    answers.join(_LOOK_INTERVAL_S)


def _write(store: Store, rank: int, progress: RankProgress) -> None:
    store.set(str(rank), json.dumps(asdict(progress)))


def diagnose(progress: dict[int, RankProgress], missing: Sequence[int]) -> str:
    """Name the rank at fault, from the progress of those that answered and the ``missing`` ones."""
    if missing:
        return (
            f"{_named(missing)} at fault: no sign of life within {_ANSWER_TIMEOUT_S:.0f} s, "
            "so it has ended or was stopped"
        )
    idle = {rank: each for rank, each in progress.items() if not each.waiting_for}
    candidates = idle or progress
    fewest, most = (
        choose(each.num_waits_done for each in candidates.values()) for choose in (min, max)
    )
    behind = [rank for rank, each in candidates.items() if each.num_waits_done == fewest]
    if idle:
        return (
            f"{_named(behind)} at fault: alive, but it stands still after {fewest} waits "
            "while the other ranks wait for it"
        )
    if fewest < most:
        return (
            f"{_named(behind)} at fault: it came too late; it had completed {fewest} waits "
            f"when another rank had completed {most}"
        )
    return (
        "all ranks are alive and wait for each other; do all make the same calls in the same order?"
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
