"""Which rank is at fault when a wait fails: the ranks call the roll in the store through which they met.

The neighbour that did not answer in time may itself have waited for another. So a rank notes in memory what it waits for and
how many waits it has behind it, and a thread of it looks now and then whether the roll is called. Who does not answer has
ended or was stopped; where all answer, the one that stands behind the others and waits for none of them holds them up.
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

_LOOK_S = 0.5  # between two looks whether the roll is called: one small request to the store
_ANSWER_S = 5.0  # ten looks: also a rank on a busy machine has answered by then
_CALLED = "called"
_SERVED = "rank 0 is at fault, which serves it, unless torchrun or gyre-train do"


@dataclass(slots=True)
class Standing:
    """Where a rank stands.

    Attributes:
        num_passed: waits that it has behind it.
        waits: what it waits for; "" while it does something else. After a wait that failed it stays.
    """

    num_passed: int = 0
    waits: str = ""


class RollCall:
    """One rank's part in the roll call of a group; as long as it lives, it answers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._here = dist.get_rank()
        self._standing = Standing()
        self._store: Store | None = None
        self._found = ""
        if len(self._ranks) > 1 and dist.get_backend(group) != "fake":
            # A connection of its own: torch's may be blocked in a wait for another rank.
            self._store = PrefixStore(f"gyre roll call of {group.group_name}", _get_default_store().clone())  # type: ignore[attr-defined]
            self._store.delete_key(str(self._here))  # of a group before that had this store and this name
            stop = threading.Event()
            answers = threading.Thread(target=_answer, args=(self._store, self._here, self._standing, stop), daemon=True)
            answers.start()
            weakref.finalize(self, _end, answers, stop)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside, this rank waits for others; every rank of the group makes the same waits in the same order."""
        self._standing.waits = what
        yield
        self._standing.waits = ""
        self._standing.num_passed += 1

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Inside is a collective.

        Raises:
            RingError: it failed; names the rank at fault.
        """
        try:
            with self.waiting(f"rank {self._here}: {what}"):
                yield
        except RingError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.error(f"rank {self._here}: {what}", error) from error

    def error(self, what: str, cause: Exception) -> RingError:
        """What to raise where waiting for ``what`` ended in ``cause``; calls the roll, which takes up to some seconds."""
        return RingError(f"{self._fault()}; {what} failed: {' '.join(str(cause).split())}")

    def _fault(self) -> str:
        """Who is at fault; asked once, for what fails afterwards fails because of it."""
        if self._store is not None and not self._found:
            found: SimpleQueue[str] = SimpleQueue()
            threading.Thread(target=lambda store: found.put(self._call(store)), args=(self._store,), daemon=True).start()
            try:
                self._found = found.get(timeout=2 * _ANSWER_S)
            except Empty:
                self._found = f"the process group's store does not answer; {_SERVED}"
        return self._found or "there is no other rank to ask"

    def _call(self, store: Store) -> str:
        """Call the roll, and tell who is at fault."""
        try:
            _note(store, self._here, self._standing)
            store.set(_CALLED, "yes")
            missing, deadline_s = self._ranks, time.monotonic() + _ANSWER_S
            while missing and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S / 10)
                missing = [rank for rank in missing if not store.check([str(rank)])]
            there = {rank: Standing(**json.loads(store.get(str(rank)))) for rank in self._ranks if rank not in missing}
        except RuntimeError:
            return f"the process group's store is gone; {_SERVED}"
        return verdict(there, missing)


def _answer(store: Store, rank: int, standing: Standing, stop: threading.Event) -> None:
    """Note the rank's standing again and again once the roll was called, until told to stop."""
    try:
        while not stop.wait(_LOOK_S) and dist.is_initialized():
            if store.check([_CALLED]):
                _note(store, rank, standing)
    except RuntimeError:
        return  # the store is gone, and with it whoever might call


def _end(answers: threading.Thread, stop: threading.Event) -> None:
    """Stop the thread and see it end: one that an interpreter's end finds inside of torch may take the process down."""
    stop.set()
    answers.join(_LOOK_S)


def _note(store: Store, rank: int, standing: Standing) -> None:
    store.set(str(rank), json.dumps(asdict(standing)))


def verdict(there: dict[int, Standing], missing: Sequence[int]) -> str:
    """Who is at fault, of ranks that answered and ranks that did not."""
    if missing:
        return f"{_named(missing)} at fault: no sign of life within {_ANSWER_S:.0f} s, so it has ended or was stopped"
    idle = {rank: standing for rank, standing in there.items() if not standing.waits}
    candidates = idle or there
    fewest, most = (choose(standing.num_passed for standing in candidates.values()) for choose in (min, max))
    behind = [rank for rank, standing in candidates.items() if standing.num_passed == fewest]
    if idle:
        return f"{_named(behind)} at fault: alive, but it stands still after {fewest} waits and keeps the others waiting"
    if fewest < most:
        return f"{_named(behind)} at fault: it came too late, after {fewest} waits where another rank had {most} behind it"
    return "all ranks are alive and wait for each other; do all make the same calls in the same order?"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
