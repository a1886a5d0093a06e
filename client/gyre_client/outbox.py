"""What a client has to say on a session's control stream: credits, releases, and that it is alive.

Credits and releases are coalesced: whatever came up since the last message travels in the next one.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from gyre_protos.v1 import loader_pb2 as pb

LONG_WAIT_S = 0.25
# While batches are taken the daemon is told how many, so that it can say how fast. Each word wakes a thread here and there;
# after some times as long as this the daemon believes that none was taken.
REPORT_S = 1.0
MAX_RELEASES = 4096  # in one message: three bytes a step or so, well below the limit of a control message


class Outbox:
    """Filled by the consumer and the receiver, drained by gRPC's sending thread."""

    def __init__(
        self, session_id: str, num_credits: int, num_together: int = 1, num_taken: Callable[[], int] = lambda: 0
    ) -> None:
        """Has the first credits to give.

        Args:
            session_id: Of the session to attach to.
            num_credits: The first credits; they wait for nothing.
            num_together: So many later credits, or releases, are worth a message, and whatever comes up a while after the last
                one is too: half of what the daemon granted leaves it the other half to go on with.
            num_taken: Tells how many batches of the session the consumer has taken.
        """
        self._session_id = session_id
        self._num_credits = num_credits
        self._waited_s = 0.0
        self._num_together = num_together
        self._num_taken = num_taken
        self._is_due = num_credits > 0
        self._released: list[int] = []
        self._num_released = 0  # batches
        self._unmapped: list[int] = []
        self._told_at_s = -math.inf  # of what the consumer did
        self._closed = False
        self._changed = threading.Condition()

    def credit(self, num_batches: int, waited_s: float = 0.0) -> None:
        """So many batches more may be sent; the consumer had nothing to go on with for so long, beside what was noted."""
        with self._changed:
            self._num_credits += num_batches
            self._waited_s += waited_s
            self._notify_if_due(self._num_credits)

    def grant(self, num_more: int, num_together: int) -> None:
        """So many batches more may be sent, or fewer where it is negative: so many credits that come up are kept back."""
        with self._changed:
            self._num_credits += num_more
            self._num_together = num_together
            self._notify_if_due(self._num_credits)

    def note_wait(self, seconds: float) -> None:
        """The consumer had nothing to go on with for so long; travels with the next credit, or at once where it adds up."""
        with self._changed:
            self._waited_s += seconds
            if self._waited_s >= LONG_WAIT_S:
                self._is_due = True
                self._changed.notify()

    def release(self, first_step: int, num_batches: int = 1) -> None:
        """The payloads of the strip that begins with `first_step`, so many, are no longer needed."""
        with self._changed:
            self._released.append(first_step)
            self._num_released += num_batches
            self._notify_if_due(self._num_released)

    def unmapped(self, arenas: Sequence[int]) -> None:
        """This process has these arenas no longer."""
        with self._changed:
            self._unmapped += arenas
            self._is_due = True
            self._changed.notify()

    def close(self) -> None:
        """Nothing more is to be said; the client half-closes its stream."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def messages(self, heartbeat_s: float, on_wake: Callable[[], None]) -> Iterator[pb.StreamRequest]:
        """Yields the attachment, then what there is to say; after `heartbeat_s` of silence a heartbeat. Ends once closed.

        Args:
            heartbeat_s: The longest silence.
            on_wake: Called before each message, and at least every `heartbeat_s`.
        """
        yield pb.StreamRequest(attach=pb.Attach(session_id=self._session_id))
        spoke_at_s, num_told = time.monotonic(), 0
        while not self._closed:
            with self._changed:
                is_due = self._changed.wait_for(lambda: self._is_due or self._closed, min(heartbeat_s, REPORT_S))
                num_credits = max(0, self._num_credits)
                self._num_credits -= num_credits
                waited_s, self._waited_s = self._waited_s, 0.0
                released, self._released = self._released[:MAX_RELEASES], self._released[MAX_RELEASES:]
                unmapped, self._unmapped = self._unmapped, []
                self._is_due, self._num_released = bool(self._released), len(self._released)
                if released or waited_s:
                    self._told_at_s = time.monotonic()
            on_wake()
            num_taken = self._num_taken()
            has_news = is_due or num_credits or waited_s or released or unmapped or num_taken != num_told
            if not has_news and time.monotonic() < spoke_at_s + heartbeat_s:
                continue
            spoke_at_s, num_told = time.monotonic(), num_taken
            if unmapped:
                yield pb.StreamRequest(unmapped=pb.Unmapped(arenas=unmapped), num_taken=num_taken)
            if num_credits or waited_s:
                credit = pb.Credit(num_batches=num_credits, waited_s=waited_s, released_steps=released)
                yield pb.StreamRequest(credit=credit, num_taken=num_taken)
            elif released:
                yield pb.StreamRequest(release=pb.Release(steps=released), num_taken=num_taken)
            elif not unmapped:
                yield pb.StreamRequest(heartbeat=pb.Heartbeat(), num_taken=num_taken)

    def _notify_if_due(self, num_waiting: int) -> None:
        if num_waiting >= self._num_together or time.monotonic() > self._told_at_s + LONG_WAIT_S:
            self._is_due = True
            self._changed.notify()
