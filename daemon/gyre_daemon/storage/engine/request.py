"""One range that is needed, from being asked for to being there."""

from collections.abc import Callable

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.metrics import RequestKind
from gyre_daemon.runtime.fair import Flow, Turn
from gyre_daemon.storage.answer import Answer, Range
from gyre_daemon.storage.delays import Delays, RequestDelays
from gyre_daemon.storage.engine.hedges import size_class
from gyre_daemon.storage.source import Sent, Source


class Request:
    """What is needed and how far it is. Its tries may be several, also at the same time.

    Attributes:
        source: who carries it.
        path: of the object, as the source knows it.
        wanted: which bytes of which shard.
        kind: for the counters.
        flow: for which job.
        urgency: among the job's requests the lowest goes first.
        finish: called once, with the bytes or the error, unless it is abandoned.
        turn: it waits for one.
        tries: under way.
        asked_at: when it was needed.
        begun_at: when its first try was sent; 0 before.
        last: the answer to its last try that failed.
        refreshed_at: when credentials were read again for it; a try sent since then has the new ones; 0 before.
        num_bytes: how many are needed.
        sent_at: when the try was sent that succeeded.
        first_byte_at: when its answer began.
        ended_at: and when it was whole; 0 before.
        is_over: it is there, has failed, or is abandoned.
    """

    __slots__ = (
        "asked_at", "begun_at", "ended_at", "finish", "first_byte_at", "flow", "is_over", "kind", "last", "num_bytes",
        "num_hedges", "num_refused", "num_retries", "num_tries", "path", "refreshed_at", "sent_at", "source", "tries", "turn",
        "urgency", "wanted",
    )  # fmt: skip

    def __init__(self, source: Source, path: str, wanted: Range, kind: RequestKind, flow: Flow, urgency: int) -> None:
        self.source = source
        self.path = path
        self.wanted = wanted
        self.kind: RequestKind = kind
        self.flow = flow
        self.urgency = urgency
        self.finish: Callable[[bytes, GyreError | None], None]
        self.turn: Turn | None = None
        self.tries: list[Try] = []
        self.asked_at = 0.0
        self.begun_at = 0.0
        self.last: Answer | None = None
        self.is_over = False
        self.refreshed_at = 0.0
        self.num_tries = 0
        self.num_retries = 0
        self.num_hedges = 0
        self.num_refused = 0
        self.num_bytes = wanted.stop - wanted.start
        self.sent_at = self.first_byte_at = self.ended_at = 0.0

    def succeed(self, successful: "Try", first_byte_at: float, now: float) -> None:
        """It is there."""
        self.sent_at, self.first_byte_at, self.ended_at = successful.sent_at, first_byte_at, now

    @property
    def total_s(self) -> float:
        """From being asked for to being there; 0 before."""
        return self.ended_at - self.asked_at if self.ended_at else 0.0

    def account(self) -> RequestDelays:
        """Where the time went, now that it is there."""
        return RequestDelays(
            shard=self.wanted.shard.name,
            start=self.wanted.start,
            stop=self.wanted.stop,
            queue_s=self.begun_at - self.asked_at,
            tried_s=self.sent_at - self.begun_at,
            first_byte_s=self.first_byte_at - self.sent_at,
            body_s=self.ended_at - self.first_byte_at,
            num_tries=self.num_tries,
        )

    def add_to(self, delays: Delays) -> None:
        """Tell those who waited what it took, but for `account`."""
        delays.num_bytes += self.num_bytes
        if self.num_tries > 1:
            delays.num_refused += self.num_refused
            delays.num_retries += self.num_retries
            delays.num_hedges += self.num_hedges


class Try:
    """One request that was sent."""

    __slots__ = ("is_early", "is_hedge", "of_round", "request", "sent", "sent_at", "size")

    def __init__(self, request: Request, sent_at: float, of_round: int, *, is_hedge: bool) -> None:
        self.request = request
        self.sent_at = sent_at
        self.of_round = of_round
        self.is_hedge = is_hedge
        self.is_early = False  # one of the first of its size
        self.size = size_class(request.num_bytes)
        self.sent: Sent

    @property
    def first_byte_at(self) -> float | None:
        """See `Sent.first_byte_at`."""
        return self.sent.first_byte_at
