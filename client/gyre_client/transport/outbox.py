"""The client's side of a session's control stream: credits, releases and heartbeats.

Credits and releases are coalesced: everything that came up since the last message travels in the
next one. Each number here is written by one thread: the consumer's totals are read by gRPC's
sending thread, so an interrupt of the consumer neither loses nor doubles a credit.

They also say how far the daemon may read ahead of the trainer: to its iteration's end, and for some
seconds.
"""

import contextlib
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gyre_protos.v1 import loader_pb2 as pb


class Wakeup:
    """Wakes one thread that waits; a call before it waits counts.

    A signal may end any line of Python in the main thread. `threading.Event` and `Condition` are
    written in Python and hold a lock meanwhile, never to be released. A `SimpleQueue` is not.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Wakes the thread; from any thread, and any finalizer."""
        if self._calls.empty():
            self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        """Waits for a call; it may also return early, so the caller looks for itself."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=max(0.0, timeout_s))


NEVER = (1 << 63) - 1
# A trainer that computes for longer than it waits has batches for these seconds at its pace.
# With more, a slow trainer has samples decoded that it may never use, and memory that it does not
# need; with less, batches that take longer than others stop it.
_AHEAD_S, _LEAST = 5.0, 2
# The pace is that of the last seconds, from this often on. In a longer time a pause counts for
# longer; a shorter one has few batches.
_MEMORY_S, _INTERVAL_S = 2.0, 0.2
# A trainer that waits for a larger part of the time has no pace.
_WAITS = 0.1


class ReadAhead:
    """The first batch that need not be read yet, from the batches that a trainer took lately."""

    def __init__(self) -> None:
        # each a time, the next batch, and how long the trainer has waited in all
        self._marks: deque[tuple[float, int, float]] = deque()
        self._first = -1

    def until(self, now_s: float, next_batch: int, waited_s: float, stop: int) -> int:
        """Returns the first batch that need not be read yet.

        Args:
            now_s: A time that never falls.
            next_batch: The batch that the trainer takes next.
            waited_s: How long it has waited in all.
            stop: The batch behind the last one of its iteration.
        """
        if self._first < 0:
            self._first = next_batch
        if next_batch == self._first:  # it has not begun
            return stop
        marks = self._marks
        if not marks or now_s - marks[-1][0] >= _INTERVAL_S:
            marks.append((now_s, next_batch, waited_s))
        while now_s - marks[0][0] > _MEMORY_S and len(marks) > 1:
            marks.popleft()
        since_s, first, had_waited_s = marks[0]
        passed_s, lately_s = now_s - since_s, waited_s - had_waited_s
        if passed_s < _INTERVAL_S or lately_s > _WAITS * passed_s:
            return stop
        pace = (next_batch - first + 1) / (passed_s - lately_s)  # the batch in hand counts, too
        return min(stop, next_batch + max(_LEAST, math.ceil(_AHEAD_S * pace)))


# Fewer credits than `num_together` wait this long for more before they travel. Shorter
# wakes a thread here and one in the daemon for every batch; longer delays a slow trainer's credit.
LONG_WAIT_S = 0.25
# While batches are taken, the daemon is told how many at least this often, so that it can show a
# rate. Each message wakes a thread on both sides; after a few of these intervals without a message
# the daemon takes it that no batch was taken.
REPORT_S = 1.0
# In one message: about three bytes per step, well below the limit of a control message.
MAX_RELEASES = 4096


@dataclass(frozen=True, slots=True)
class Consumed:
    """The consumer's totals since the session began.

    Attributes:
        num_dequeued: The batches that left the queue.
        num_taken: The batches that were handed to the script.
        waited_s: How long it had no batch to go on with.
        next_batch: The batch that the script takes next.
        stop: The batch behind the last one of the script's iteration.
    """

    num_dequeued: int = 0
    num_taken: int = 0
    waited_s: float = 0.0
    next_batch: int = 0
    stop: int = NEVER


class Returned(Protocol):
    """The unused memory of successive batches."""

    @property
    def first_step(self) -> int:
        """The first one's step."""

    @property
    def num_batches(self) -> int:
        """How many batches."""

    def take_back(self) -> None:
        """Makes it fit for other batches, before the daemon hears that it may write there."""


class Outbox:
    """Filled by the consumer and the receiver, drained by gRPC's sending thread.

    Attributes:
        returned: The memory of batches gone but not reported to the daemon yet.
        is_closed: Whether the messages end.
    """

    def __init__(
        self,
        session_id: str,
        num_credits: int,
        num_together: int = 1,
        consumed: Callable[[], Consumed] = Consumed,
        returned: deque[Any] | None = None,
        read_until: int = NEVER,
    ) -> None:
        """Queues the first credits.

        Args:
            session_id: The session to attach to.
            num_credits: The first credits; they are sent at once.
            num_together: How many later credits, or released batches, are worth a
                message. Half of the daemon's grant leaves it the other half to go on with.
            consumed: Returns the consumer's totals.
            returned: Where finalizers put the memory of batches, each `Returned`.
            read_until: The batch up to which the daemon reads before it is told otherwise.
        """
        self._session_id = session_id
        self._num_granted = num_credits  # by the receiver
        self._num_together = num_together
        self._consumed = consumed
        self.returned: deque[Returned] = deque() if returned is None else returned
        self._unmapped: deque[int] = deque()
        self._wakeup = Wakeup()
        self.is_closed = False
        # of the sending thread
        self._released: list[int] = []
        self._num_sent = 0  # credits
        self._waited_s = 0.0
        self._sent_at_s = 0.0  # when a message last had credits or releases
        self._read_ahead = ReadAhead()
        self._read_until = read_until  # as the daemon knows
        self._wakeup.wake()

    @property
    def num_given(self) -> int:
        """How many batches in all the daemon may have sent by now, at most."""
        return max(self._num_sent, self._num_granted + self._consumed().num_dequeued)

    def send_if_due(self, num_per_group: int) -> None:
        """Wakes the sending thread if a message is due, with about this many batches a group."""
        num_credits = self._num_granted + self._consumed().num_dequeued - self._num_sent
        num_waiting = max(num_credits, len(self.returned) * num_per_group)
        if num_waiting >= self._num_together or (
            num_waiting > 0 and time.monotonic() > self._sent_at_s + LONG_WAIT_S
        ):
            self._wakeup.wake()

    def grant(self, num_more: int, num_together: int) -> None:
        """Changes the number of batches that may be under way by `num_more`.

        If it is negative, that many of the next credits are kept back.
        """
        self._num_granted += num_more
        self._num_together = num_together
        self._wakeup.wake()

    def wake(self) -> None:
        """Wakes the sending thread, because the script's iteration has begun or changed its end."""
        self._wakeup.wake()

    def release(self, returned: Returned) -> None:
        """Gives memory back that no finalizer returns."""
        self.returned.append(returned)
        self.send_if_due(returned.num_batches)

    def unmapped(self, arenas: Sequence[int]) -> None:
        """Tells the daemon that this process no longer maps these arenas."""
        self._unmapped += arenas
        self._wakeup.wake()

    def close(self) -> None:
        """Ends the messages; the client then half-closes its stream."""
        self.is_closed = True
        self._wakeup.wake()

    def messages(
        self, heartbeat_s: float, on_wake: Callable[[], None]
    ) -> Iterator[pb.StreamRequest]:
        """Yields the attachment, then messages as they become due, until `close`.

        Args:
            heartbeat_s: The longest silence; a heartbeat ends it.
            on_wake: Called before each message, at the end, and at least every `heartbeat_s`.
        """
        yield pb.StreamRequest(attach=pb.Attach(session_id=self._session_id))
        sent_at_s, num_reported = time.monotonic(), 0
        while not self.is_closed:
            if not self._released:
                self._wakeup.wait(min(heartbeat_s, LONG_WAIT_S))
            consumed = self._consumed()
            credit, unmapped = self._take_queued(consumed)
            on_wake()
            num_taken, silent_s = consumed.num_taken, time.monotonic() - sent_at_s
            until, told = self._until(consumed), self._read_until
            left, wanted = told - consumed.next_batch, until - consumed.next_batch
            moves_bound = until < told or 2 * left < wanted
            has_news = credit.ByteSize() or unmapped or moves_bound
            is_due = silent_s >= (REPORT_S if num_taken != num_reported else heartbeat_s)
            if not (has_news or is_due) or self.is_closed:
                continue
            sent_at_s, num_reported = time.monotonic(), num_taken
            about = {"num_taken": num_taken, "read_until": until if until != told else 0}
            self._read_until = until
            request = pb.StreamRequest(**about)  # type: ignore[arg-type]
            if unmapped:
                request.unmapped.arenas.extend(unmapped)
                yield request
                request = pb.StreamRequest(**about)  # type: ignore[arg-type]
            if credit.num_batches or credit.waited_s:
                request.credit.CopyFrom(credit)
                yield request
            elif credit.released_steps:
                request.release.steps.extend(credit.released_steps)
                yield request
            elif not unmapped:
                request.heartbeat.SetInParent()
                yield request
        on_wake()

    def _until(self, consumed: Consumed) -> int:
        """Returns the first batch that the daemon need not read yet."""
        now_s = time.monotonic()
        return self._read_ahead.until(now_s, consumed.next_batch, consumed.waited_s, consumed.stop)

    def _take_queued(self, consumed: Consumed) -> tuple[pb.Credit, list[int]]:
        """Returns all that waits, as one message."""
        while self.returned:
            returned = self.returned.popleft()
            returned.take_back()
            self._released.append(returned.first_step)
        released, self._released = self._released[:MAX_RELEASES], self._released[MAX_RELEASES:]
        num_credits = max(0, self._num_granted + consumed.num_dequeued - self._num_sent)
        waited_s = consumed.waited_s - self._waited_s
        if not num_credits and waited_s < LONG_WAIT_S:
            waited_s = 0.0  # it travels with the next credit
        self._num_sent += num_credits
        self._waited_s += waited_s
        unmapped = [self._unmapped.popleft() for _ in range(len(self._unmapped))]
        if released or num_credits or waited_s:
            self._sent_at_s = time.monotonic()
        credit = pb.Credit(num_batches=num_credits, waited_s=waited_s, released_steps=released)
        return credit, unmapped
