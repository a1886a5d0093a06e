"""Finds the rank at fault when a wait fails: the ranks ask each other through their store.

[Note: Hang diagnosis]

A neighbour that did not answer in time may itself have waited for another rank. So each rank keeps
in memory what it waits for and how many waits it has completed. A thread of each rank checks twice
a second whether some rank asks for a diagnosis. If so, it writes its rank's progress to the store.

A rank that writes nothing has ended or was stopped. If all ranks answer, the rank at fault is the
one that waits for nobody and is behind the others. If all ranks wait, it is the one with the fewest
completed waits: it came too late.

The first rank that finds this out writes a verdict to the store, and all others take it. So does a
rank whose neighbour calls another module: it needs no diagnosis.

Tensors of different sizes never meet, so ranks that call modules of different sizes wait for each
other. A rank that has waited for the same hop at two looks writes its identity, and reads those of
others. All ranks make the same hops, so those of one number must have one identity. Once
there is a verdict, the thread of each rank ends its waits.

There is one verdict, the first: a rank that ends because of a failure is itself missing to the
others, which would later find out about the consequences.
"""

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gyre_trainer.comm.identity import Modules
from gyre_trainer.errors import RingError, RotationError

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


_log = logging.getLogger(__name__)
# A check of the store is one small request, so two per second cost nothing. A diagnosis waits for
# ten intervals. A shorter wait would accuse a rank that a busy machine delays; a longer wait delays
# every error message.
_LOOK_INTERVAL_S = 0.5
_ANSWER_TIMEOUT_S = 5.0
_ADVICE = "To evaluate, call the model on all ranks, or use gyre-train eval"
_ASKED = "asked"  # this key of the store exists once a rank has asked
_WHO_SERVES = "rank 0, which serves it, is at fault, unless torchrun or gyre-train serves it"


@dataclass(slots=True)
class RankProgress:
    """How far a rank has come.

    Attributes:
        num_waits_done: the number of waits that the rank has completed.
        waiting_for: its wait, such as "rank 0: receiving weights from rank 1"; "" while it
            does something else. It keeps its value after a wait that failed.
    """

    num_waits_done: int = 0
    waiting_for: str = ""


class HangDiagnosis:
    """One rank's part in the diagnosis of a group. It answers other ranks as long as it lives."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        modules: Modules,
        replicas: Tensor | None = None,
    ) -> None:
        """The diagnosis of a group, or of all ``replicas`` of it: a matrix of ranks.

        ``modules`` has the names of those that rotate on the ring.
        """
        if replicas is None:
            self._ranks, name = dist.get_process_group_ranks(group), str(group.group_name)
        else:
            self._ranks, name = replicas.flatten().tolist(), str(replicas.tolist())
        self._rank = dist.get_rank()
        self._on_ring = dist.get_process_group_ranks(group)
        self._modules = modules
        self._progress = RankProgress()
        # How many waits for hops have ended, and the identity of the present one, or 0: one pair,
        # because a thread reads it at any time.
        self._hop = 0, 0
        self._end_waits: Callable[[], object] = lambda: None
        self._ends_hops_alone = True
        self._store: Store | None = None
        self._verdict: Verdict | None = None
        if len(self._ranks) > 1 and dist.get_backend(group) != "fake":
            # A connection of its own: torch's may be blocked in a wait for another rank.
            assert dist.group.WORLD is not None
            store = dist.group.WORLD.get_group_store().clone()  # type: ignore[attr-defined]
            self._store = PrefixStore(f"gyre hang diagnosis of {name}", store)
            # An earlier group with this store and this name may have left one.
            self._store.delete_key(str(self._rank))
            self._store.delete_key(_hop_of(self._rank))
            self._verdicts = Verdicts(self._store, self._rank, self._ranks)
            stop, name = threading.Event(), "gyre hang diagnosis"
            arguments = weakref.ref(self), stop
            thread = threading.Thread(target=_answer, args=arguments, name=name, daemon=True)
            thread.start()
            weakref.finalize(self, _end, thread, stop)

    def end_waits_by(self, give_up: Callable[[], object], *, hops_alone: bool) -> None:
        """Call this from a thread when there is a verdict: it lets the waits of this rank fail.

        With ``hops_alone``, only while this rank waits for a hop; others end by themselves.
        """
        self._end_waits, self._ends_hops_alone = give_up, hops_alone

    def look(self, before: tuple[int, int]) -> tuple[int, int]:
        """Write the rank's progress while some rank asks, and end its waits at a verdict.

        The verdict is read early, too: the store may be gone when this rank asks for it.

        Args:
            before: the result of the last look: the hop that this rank waited for then.

        Raises:
            RuntimeError: the store is gone.
        """
        assert self._store is not None
        now = self._hop
        if now[1] and now == before:
            self._compare(*now)
        if self._store.check([_ASKED]):
            _write(self._store, self._rank, self._progress)
            ends = self._hop[1] or not self._ends_hops_alone
            if self._verdicts.first() is not None and ends:
                self._end_waits()
        return now

    def _compare(self, num_hops: int, identity: int) -> None:
        """Publish a verdict where another rank waits for another hop of the same number."""
        assert self._store is not None
        self._store.set(_hop_of(self._rank), json.dumps([num_hops, identity]))
        for other in self._on_ring:
            if other == self._rank or not self._store.check([_hop_of(other)]):
                continue
            count, theirs = json.loads(self._store.get(_hop_of(other)))
            if count == num_hops and theirs != identity:
                text = self._modules.difference(self._rank, identity, other, theirs)
                self._store.set(_ASKED, "yes")
                self._verdicts.publish(Verdict(text, is_mispaired=True))

    @contextmanager
    def waiting(self, what: str, identity: int = 0) -> Iterator[None]:
        """A context in which this rank waits for others.

        Every rank of the group makes the same waits in the same order.

        Args:
            what: its description, such as "rank 0: receiving weights from rank 1".
            identity: of the hop that it waits for; 0 for other waits.
        """
        self._progress.waiting_for = what
        if identity:
            num_hops, _ = self._hop
            self._hop = num_hops, identity
        yield
        if identity:
            self._hop = num_hops + 1, 0
        self._progress.waiting_for = ""
        self._progress.num_waits_done += 1

    @contextmanager
    def collective(self, what: str, identity: int = 0) -> Iterator[None]:
        """A context for a collective of the group; ``identity`` is as in `waiting`.

        Raises:
            RingError: the collective failed; the message names the rank at fault.
            RotationError: another rank has found that ranks call different modules.
        """
        try:
            with self.waiting(f"rank {self._rank}: {what}", identity):
                yield
        except (RingError, RotationError):
            raise
        except (RuntimeError, OSError) as error:
            raise self.error(f"rank {self._rank}: {what}", error) from error

    def error(self, what: str, cause: Exception) -> RingError | RotationError:
        """The error for a wait for ``what`` that ended in ``cause``; takes up to 15 seconds.

        Another rank may have found out before why the ring failed: then the error says that. The
        words of a library are not in it, but in the log.
        """
        told = " ".join(str(cause).split())
        _log.info("%s failed: %s", what, told)
        self._progress.waiting_for = what  # where a transfer could not even start, too
        verdict = self._settled(self._diagnosed)
        if verdict.is_mispaired:
            return RotationError(f"{what}: {verdict.text}")
        reason = f": {told}" if isinstance(cause, OSError) else ""
        return RingError(f"{verdict.text}; {what} failed{reason}")

    def mispaired(self, what: str, text: str) -> RotationError:
        """The error for a wait for ``what`` whose neighbour makes another call.

        ``text`` names both ranks and both modules. All ranks end with the first such text.
        """
        verdict = self._settled(lambda _: Verdict(text, is_mispaired=True))
        return RotationError(f"{what}: {verdict.text if verdict.is_mispaired else text}")

    def _settled(self, own: Callable[[Store], Verdict]) -> Verdict:
        """The verdict in the store, or that of ``own``; found once: later failures follow from it.

        A store may not answer, so a thread asks it.
        """
        if self._verdict is None:
            if self._store is None:
                return Verdict("there is no other rank to ask")
            found: SimpleQueue[Verdict] = SimpleQueue()
            ask = threading.Thread(
                target=lambda store: found.put(self._ask(store, own)),
                args=(self._store,),
                daemon=True,
            )
            ask.start()
            try:
                self._verdict = found.get(timeout=3 * _ANSWER_TIMEOUT_S)
            except Empty:
                silent = f"the process group's store does not answer; {_WHO_SERVES}"
                self._verdict = self._verdicts.seen or Verdict(silent)
        return self._verdict

    def _ask(self, store: Store, own: Callable[[Store], Verdict]) -> Verdict:
        try:
            store.set(_ASKED, "yes")
            verdict = self._verdicts.first() or self._verdicts.publish(own(store))
            if self._rank == 0:  # where it serves the store, none can read it after its end
                self._verdicts.wait_until_read(verdict, _ANSWER_TIMEOUT_S)
        except RuntimeError:
            gone = f"the process group's store is gone; {_WHO_SERVES}"
            return self._verdicts.seen or Verdict(gone)
        return verdict

    def _diagnosed(self, store: Store) -> Verdict:
        """Ask all ranks for their progress, and say which one is at fault.

        Another rank may say so first.
        """
        _write(store, self._rank, self._progress)
        missing, deadline_s = self._ranks, time.monotonic() + _ANSWER_TIMEOUT_S
        while missing and time.monotonic() < deadline_s:
            time.sleep(_LOOK_INTERVAL_S / 10)
            if (found := self._verdicts.first()) is not None:
                return found
            missing = [rank for rank in missing if not store.check([str(rank)])]
        answered = [rank for rank in self._ranks if rank not in missing]
        progress = {rank: RankProgress(**json.loads(store.get(str(rank)))) for rank in answered}
        return Verdict(diagnose(progress, missing), missing=missing)


def _hop_of(rank: int) -> str:
    return f"hop of {rank}"


def _answer(diagnosis: "weakref.ref[HangDiagnosis]", stop: threading.Event) -> None:
    """The thread of a rank: look until told to stop; it holds the diagnosis only while it looks."""
    before = 0, 0
    while not stop.wait(_LOOK_INTERVAL_S) and dist.is_initialized():
        there = diagnosis()
        try:
            before = (0, 0) if there is None else there.look(before)
        except RuntimeError:
            return  # the store is gone, and so is every rank that might ask
        del there


def _end(answers: threading.Thread, stop: threading.Event) -> None:
    """Stop the thread and wait for its end. See [Note: The end of a rank].

    It is inside torch while the store answers, which a busy machine delays.
    """
    stop.set()
    if answers is not threading.current_thread():  # the collector may run in that thread, too
        answers.join(_ANSWER_TIMEOUT_S)


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
            f"while the other ranks wait for it. {_ADVICE}"
        )
    if fewest < most:
        return (
            f"{_named(behind)} at fault: it came too late; it had completed {fewest} waits "
            f"when another rank had completed {most}"
        )
    waits = ", ".join(sorted({each.waiting_for for each in progress.values()}))
    return (
        "all ranks are alive and wait for each other; do all make the same calls in the same "
        f"order? {_ADVICE} ({waits})"
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks))} are"
