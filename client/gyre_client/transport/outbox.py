"""The client's side of a session's control stream: credits, releases and heartbeats.

Credits and releases are coalesced: everything that came up since the last message travels in the
next one.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gyre_protos.v1 import loader_pb2 as pb

# Credits that are fewer than `num_together` wait this long for more before they travel. Shorter
# wakes a thread here and one in the daemon for every batch; longer delays a slow trainer's credit.
LONG_WAIT_S = 0.25
# While batches are taken, the daemon is told how many at least this often, so that it can show a
# rate. Each message wakes a thread on both sides; after a few of these intervals without a message
# the daemon takes it that no batch was taken.
REPORT_S = 1.0
# In one message: about three bytes per step, well below the limit of a control message.
MAX_RELEASES = 4096


class Outbox:
    """Filled by the consumer and the receiver, drained by gRPC's sending thread."""

    def __init__(
        self,
        session_id: str,
        num_credits: int,
        num_together: int = 1,
        num_taken: Callable[[], int] = lambda: 0,
    ) -> None:
        """Queues the first credits.

        Args:
            session_id: The session to attach to.
            num_credits: The first credits; they are sent at once.
            num_together: How many later credits, or released batches, are worth a message of
                their own. Half of what the daemon granted leaves it the other half to go on with.
            num_taken: Returns how many batches of the session the consumer has taken.
        """
        self._session_id = session_id
        self._num_credits = num_credits
        self._num_sent = 0  # credits
        self._waited_s = 0.0
        self._num_together = num_together
        self._num_taken = num_taken
        self._is_due = num_credits > 0
        self._released: list[int] = []
        self._num_released = 0  # batches
        self._unmapped: list[int] = []
        self._sent_at_s = -math.inf  # when a message last had credits or releases
        self._closed = False
        self._changed = threading.Condition()

    @property
    def num_given(self) -> int:
        """How many batches in all the daemon may have sent by now, at most."""
        return self._num_sent + max(0, self._num_credits)

    def credit(self, num_batches: int, waited_s: float = 0.0) -> None:
        """Lets the daemon send `num_batches` more.

        Args:
            num_batches: How many batches the consumer took out of the queue.
            waited_s: How long it had no batch to go on with, beyond what `note_wait` was told.
        """
        with self._changed:
            self._num_credits += num_batches
            self._waited_s += waited_s
            self._notify_if_due(self._num_credits)

    def grant(self, num_more: int, num_together: int) -> None:
        """Changes the number of batches that may be under way by `num_more`.

        If it is negative, that many of the next credits are kept back.
        """
        with self._changed:
            self._num_credits += num_more
            self._num_together = num_together
            self._notify_if_due(self._num_credits)

    def note_wait(self, seconds: float) -> None:
        """Adds to the time that the consumer had no batch to go on with.

        It travels with the next credit, or at once when it has added up to `LONG_WAIT_S`.
        """
        with self._changed:
            self._waited_s += seconds
            if self._waited_s >= LONG_WAIT_S:
                self._is_due = True
                self._changed.notify()

    def release(self, first_step: int, num_batches: int = 1) -> None:
        """Gives the memory of a batch group back: `num_batches` that begin with `first_step`."""
        with self._changed:
            self._released.append(first_step)
            self._num_released += num_batches
            self._notify_if_due(self._num_released)

    def unmapped(self, arenas: Sequence[int]) -> None:
        """Tells the daemon that this process no longer maps these arenas."""
        with self._changed:
            self._unmapped += arenas
            self._is_due = True
            self._changed.notify()

    def close(self) -> None:
        """Ends the messages; the client then half-closes its stream."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def messages(
        self, heartbeat_s: float, on_wake: Callable[[], None]
    ) -> Iterator[pb.StreamRequest]:
        """Yields the attachment, then messages as they become due, until `close`.

        Args:
            heartbeat_s: The longest silence; a heartbeat ends it.
            on_wake: Called before each message, and at least every `heartbeat_s`.
        """
        yield pb.StreamRequest(attach=pb.Attach(session_id=self._session_id))
        sent_at_s, num_reported = time.monotonic(), 0
        while not self._closed:
            with self._changed:
                is_due = self._changed.wait_for(
                    lambda: self._is_due or self._closed, min(heartbeat_s, REPORT_S)
                )
                credit, unmapped = self._take_queued()
            on_wake()
            num_taken = self._num_taken()
            has_news = is_due or credit.ByteSize() or unmapped or num_taken != num_reported
            if not has_news and time.monotonic() < sent_at_s + heartbeat_s:
                continue
            sent_at_s, num_reported = time.monotonic(), num_taken
            if unmapped:
                yield pb.StreamRequest(unmapped=pb.Unmapped(arenas=unmapped), num_taken=num_taken)
            if credit.num_batches or credit.waited_s:
                yield pb.StreamRequest(credit=credit, num_taken=num_taken)
            elif credit.released_steps:
                release = pb.Release(steps=credit.released_steps)
                yield pb.StreamRequest(release=release, num_taken=num_taken)
            elif not unmapped:
                yield pb.StreamRequest(heartbeat=pb.Heartbeat(), num_taken=num_taken)

    def _take_queued(self) -> tuple[pb.Credit, list[int]]:
        """Returns what is queued, as one message; the caller holds the lock."""
        released, self._released = self._released[:MAX_RELEASES], self._released[MAX_RELEASES:]
        credit = pb.Credit(
            num_batches=max(0, self._num_credits), waited_s=self._waited_s, released_steps=released
        )
        self._num_sent += credit.num_batches
        self._num_credits -= credit.num_batches
        self._waited_s = 0.0
        unmapped, self._unmapped = self._unmapped, []
        self._is_due, self._num_released = bool(self._released), len(self._released)
        if released or credit.waited_s:
            self._sent_at_s = time.monotonic()
        return credit, unmapped

    def _notify_if_due(self, num_waiting: int) -> None:
        if num_waiting >= self._num_together or time.monotonic() > self._sent_at_s + LONG_WAIT_S:
            self._is_due = True
            self._changed.notify()
