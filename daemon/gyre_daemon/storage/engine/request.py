"""One range that a job needs, from its request to its bytes, and the credentials that carry it.

[Note: Refused credentials]

The first refused request refreshes the credentials and is sent again as a probe. All other requests
of the source wait until the probe is answered. If its new credentials are accepted, all of them are
sent. If they are refused, that request has failed, and the next probe refreshes again after a
pause. So refused credentials cost one request and one refresh per pause, however many jobs need
them and however often they come back, and one forbidden object delays others for one pause.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.metrics import RequestKind
from gyre_daemon.runtime.threads import Flow, Turn
from gyre_daemon.storage.delays import Delays, RequestDelays
from gyre_daemon.storage.response import Body, ByteRange, Response
from gyre_daemon.storage.shard import UNKNOWN, Validators
from gyre_daemon.storage.source import SentRequest, Source

# Between two probes; each pause is twice the one before. Shorter ones ask a storage that refuses
# more often; longer ones notice later that new credentials are there.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


class CredentialRefresh:
    """The credentials of one source. It sends nothing itself.

    Attributes:
        source: whose credentials these are.
        is_under_way: they were refused, and no response has accepted new ones yet.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.is_under_way = False
        self._status = 0
        self._since = 0.0  # when they were first refreshed
        self._refreshed_at = 0.0
        self._pause_s = 0.0
        self._probe: RangeRequest | None = None
        self._waiting: deque[RangeRequest] = deque()

    def refused(self, request: "RangeRequest", sent_at: float, status: int, now: float) -> None:
        """A request was refused for its credentials; refresh them unless they were old ones."""
        request.refreshed_at = now
        if self.is_under_way or sent_at < self._refreshed_at:
            return
        self.is_under_way = True
        self._status, self._since, self._pause_s = status, now, _FIRST_PAUSE_S / 2
        self._start_probe(request, now)

    def holds(self, request: "RangeRequest", now: float) -> bool:
        """Whether a request must wait; `accepted` or `next_probe` returns it unless it is over."""
        if not self.is_under_way or request is self._probe:
            return False
        if self._may_probe(now):
            self._start_probe(request, now)
            return False
        self._waiting.append(request)
        return True

    def accepted(self, sent_at: float) -> list["RangeRequest"]:
        """A response accepted the credentials of a request sent at `sent_at`.

        Returns:
            The requests that need not wait any longer.
        """
        if not self.is_under_way or sent_at < self._since:
            return []
        self.is_under_way, self._probe = False, None
        released = [request for request in self._waiting if not request.is_over]
        self._waiting.clear()
        return released

    def next_probe(self, now: float) -> "RangeRequest | None":
        """A waiting request that should be sent now to probe the credentials."""
        while self._waiting and self._may_probe(now):
            request = self._waiting.popleft()
            if not request.is_over:
                self._start_probe(request, now)
                return request
        return None

    def forget_waiting(self) -> None:
        """All waiting requests are over."""
        self._probe = None
        self._waiting.clear()

    def _may_probe(self, now: float) -> bool:
        is_probed = self._probe is not None and not self._probe.is_over
        return not is_probed and now >= self._refreshed_at + self._pause_s

    def _start_probe(self, request: "RangeRequest", now: float) -> None:
        self._probe = request
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)
        self._refreshed_at = request.refreshed_at = now
        self.source.refresh(self._status)


@dataclass(slots=True, eq=False, repr=False)
class RangeRequest:
    """A range, and how far its request has come. Several attempts may be in flight at once.

    Attributes:
        credentials: those of the source that carries it.
        path: of the object, as the source knows it.
        wanted: the bytes, and their shard.
        kind: for the counters.
        flow: the job that needs it.
        urgency: among the job's requests the lowest goes first.
        asked_at: when it was needed.
        finish: called once, with the bytes or the error, unless the request is abandoned.
        turns: its places in the queue, while it waits there: one for each job that asked for the
            range in the meantime. The first that is granted is used.
        hedge_turn: the same for a second attempt beside one in flight.
        attempts: those in flight.
        begun_at: when its first attempt was sent; 0 before.
        last_failure: the response to its last failed attempt.
        refreshed_at: when credentials were last refreshed for it; an attempt sent since then uses
            the new ones; 0 before.
        num_bytes: how many bytes are needed.
        sent_at: when the successful attempt was sent.
        first_byte_at: when its response began.
        ended_at: when its last byte arrived; 0 before.
        is_over: it succeeded, failed, or was abandoned.
        told: by the answer that succeeded, of the object.
    """

    credentials: CredentialRefresh
    path: str
    wanted: ByteRange
    kind: RequestKind
    flow: Flow
    urgency: int
    asked_at: float
    finish: Callable[[Body, GyreError | None], None] = field(init=False)
    turns: tuple[Turn, ...] = ()
    hedge_turn: Turn | None = None
    attempts: "list[Attempt]" = field(default_factory=list)
    begun_at: float = 0.0
    last_failure: Response | None = None
    refreshed_at: float = 0.0
    num_attempts: int = 0
    num_retries: int = 0
    num_hedges: int = 0
    num_throttled: int = 0
    num_bytes: int = field(init=False)
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    ended_at: float = 0.0
    is_over: bool = False
    told: Validators = UNKNOWN

    def __post_init__(self) -> None:
        """Count the bytes."""
        self.num_bytes = self.wanted.stop - self.wanted.start

    @property
    def total_s(self) -> float:
        """Time from the request to the last byte; 0 before."""
        return self.ended_at - self.asked_at if self.ended_at else 0.0

    def leave_queue(self) -> None:
        """Wait for no turn, but for that of a hedge."""
        for turn in self.turns:
            turn.cancel()
        self.turns = ()

    def timing(self) -> RequestDelays:
        """Where the time of a successful request went."""
        return RequestDelays(
            shard=self.wanted.shard.name,
            start=self.wanted.start,
            stop=self.wanted.stop,
            queue_s=self.begun_at - self.asked_at,
            tried_s=self.sent_at - self.begun_at,
            first_byte_s=self.first_byte_at - self.sent_at,
            body_s=self.ended_at - self.first_byte_at,
            num_tries=self.num_attempts,
        )

    def count_in(self, delays: Delays) -> None:
        """Add its counts to the delays of a read that waited for it."""
        delays.num_bytes += self.num_bytes
        delays.num_refused += self.num_throttled
        delays.num_retries += self.num_retries
        delays.num_hedges += self.num_hedges


@dataclass(slots=True, eq=False, repr=False)
class Attempt:
    """A request that was sent once for a range.

    Attributes:
        request: the read it was sent for.
        sent_at: when.
        of_round: the limit's round when it was sent.
        is_hedge: another attempt was in flight, and late.
        is_early: one of the first of its size; see `hedges`.
        sent: the request in flight.
    """

    request: RangeRequest
    sent_at: float
    of_round: int
    is_hedge: bool
    is_early: bool = False
    sent: SentRequest = field(init=False)

    @property
    def first_byte_at(self) -> float | None:
        """See `SentRequest.first_byte_at`."""
        return self.sent.first_byte_at
