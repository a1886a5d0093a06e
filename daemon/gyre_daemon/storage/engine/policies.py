"""The decisions of the engine: how many requests at once, which are sent again, and when. Pure.

The caller brings the clock.

[Note: Refused credentials]

The first refused request refreshes the credentials and is sent again as a probe. All other requests
of the source wait until the probe is answered. If its new credentials are accepted, all of them are
sent. If they are refused, that request has failed, and the next probe refreshes again after a
pause. So refused credentials cost one request and one refresh per pause, however many jobs need
them and however often they come back, and one forbidden object delays others for one pause.

[Note: How many requests at once]

As TCP finds a rate, time passes in rounds of as many responses as the limit allows in flight. A
round that used the whole limit and was never throttled raises it: it doubles until the first sign
of overload, grows by a quarter where first bytes come later already, and by a constant afterwards.
A throttled round lowers the limit to what got through. A round whose first bytes came much later
than at their best lowers it by a tenth. Responses to requests sent before the limit was changed are
ignored.

[Note: How many retries]

A failed request is sent again after a random pause (full jitter), as long as the budget lasts: a
small part of all requests, and everything that can be in flight once in half a minute. So a storage
in trouble is not drowned in retries, and one that failed for a moment loses nothing. A new endpoint
has less: a short run whose storage is in trouble from the start would otherwise retry more than a
small part of what it reads. Once such a storage answers, the budget starts over, because the
waiting requests would otherwise return one by one.

[Note: Hedges]

Dean and Barroso, "The Tail at Scale", 2013. A response is late once 95 of 100 recent responses of
its size have come sooner. Then it is requested a second time, and the first of the two attempts to
arrive counts. A budget limits hedges to one request in twenty, so that a storage that is slow
throughout is not asked for everything twice. The oldest go first: they were needed first.
"""

import itertools
import statistics
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_daemon.errors import GyreError
from gyre_daemon.runtime.threads import Flow, Turn
from gyre_daemon.storage.reads import Delays, RequestDelays
from gyre_daemon.storage.response import Body, ByteRange, Response, SentRequest, Source
from gyre_daemon.storage.shard import UNKNOWN, Validators

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
        flow: the job that needs it.
        urgency: among the job's requests the lowest goes first.
        asked_at: when it was needed.
        finish: called once, with the bytes or the error, unless the request is abandoned.
        turns: its places in the queue, while it waits there: one for each job that asked for the
            range in the meantime. The first to be granted is used.
        hedge_turn: the same for a second attempt while one is in flight.
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
        sent: the request in flight.
    """

    request: RangeRequest
    sent_at: float
    of_round: int
    is_hedge: bool
    sent: SentRequest = field(init=False)

    @property
    def first_byte_at(self) -> float | None:
        """See `SentRequest.first_byte_at`."""
        return self.sent.first_byte_at


_START = 256  # any object storage takes these
_FLOOR = 4
# Latency alone lowers the limit no further than this: long tails and busy processors look slow too.
_SLOW_FLOOR = 64
_STEP = 8
# While the limit doubles: a round this much later than the best grows by less, since twice as many
# requests would bring no more. Without it, cold starts overshoot what the network carries.
_GENTLY, _LATER, _JITTER_S = (1.25, 1.5, 0.005)
# A round is slow beyond this factor and slack. Responses wait tens of milliseconds for a busy event
# loop; with less slack, that would be taken for a slow storage.
_SLOWER, _SLACK_S, _SHRINK = (2.0, 0.06, 0.9)
_MAX_SAMPLES = 64  # of latency in a round
_MEMORY_ROUNDS = 500  # for which the best round is remembered

# Each request earns this part of a retry. Twice as much doubles the load on a storage that fails.
_SHARE = 0.15
# The whole reserve returns in this time, and requests then retry at least this often.
_REFILL_S, _LEAST_PER_S = 30.0, 0.5
# A new endpoint starts with this part of its reserve, and at least this number of retries. Time
# brings the full rate only after it has been sent this many times the reserve.
_FIRST, _MIN_FIRST, _KNOWN_AFTER = 1 / 16, 16.0, 16.0
# The longest pause before the first retry, doubled for each further one, and its bound.
_BASE_S, _MAX_S = 0.1, 5.0


class AdaptiveLimit:
    """The number of requests that may be in flight to one endpoint.

    Attributes:
        round: the number of the present round.
        num_failed_rounds: how many rounds, up to now, had no response that was not throttled.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._floor = min(_FLOOR, ceiling)
        self._limit = float(min(_START, ceiling))
        self._doubles = True
        self._best = _Best()
        self.num_failed_rounds = 0
        self.round = 0
        self._counts_from = 0  # requests of earlier rounds are ignored
        self._was_throttled = False
        self._num_done = self._num_throttled = self._most_in_flight = 0
        self._latencies_s: list[float] = []

    @property
    def limit(self) -> int:
        """The most requests at once."""
        return int(self._limit)

    @property
    def is_throttled(self) -> bool:
        """Whether some of the last requests were throttled."""
        return self._was_throttled or self._num_throttled > 0

    def lower_ceiling(self, ceiling: int) -> None:
        """Never exceed this from now on."""
        self._ceiling = min(self._ceiling, ceiling)
        self._floor = min(self._floor, self._ceiling)
        self._limit = min(self._limit, float(self._ceiling))

    def done(self, of_round: int, num_in_flight: int, first_byte_s: float | None) -> bool:
        """A request was answered.

        Args:
            of_round: `round` when it was sent.
            num_in_flight: requests in flight when it was answered, this one included.
            first_byte_s: the time to its first byte; None if it was throttled.

        Returns:
            Whether the limit may have changed.
        """
        if of_round < self._counts_from:
            return False
        self._num_done += 1
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if first_byte_s is None:
            self._num_throttled += 1
        elif len(self._latencies_s) < _MAX_SAMPLES:
            self._latencies_s.append(first_byte_s)
        if self._num_done < self.limit and self._num_throttled * 2 < self.limit:
            return False
        self._end_round()
        return True

    def _begin_round(self) -> None:
        self._num_done = self._num_throttled = self._most_in_flight = 0
        self._latencies_s.clear()

    def _end_round(self) -> None:
        self.round += 1
        self._was_throttled = self._num_throttled > 0
        through = 1 - self._num_throttled / self._num_done
        self.num_failed_rounds = 0 if through else self.num_failed_rounds + 1
        median_s = statistics.median(self._latencies_s) if self._latencies_s else 0.0
        is_slow = bool(self._latencies_s) and self._best.is_slower(median_s)
        if self._was_throttled:
            self._lower(self._limit * through, self._floor)
        elif is_slow and self._limit > _SLOW_FLOOR:
            self._lower(self._limit * _SHRINK, _SLOW_FLOOR)
        elif self._most_in_flight * 8 >= self.limit * 7:
            self._raise(median_s)
        self._begin_round()

    def _raise(self, median_s: float) -> None:
        if self._doubles:
            limit = self._limit * (2 if self._best.is_near(median_s) else _GENTLY)
            self._counts_from = self.round
        else:
            limit = self._limit + _STEP
        self._limit = min(self._ceiling, limit)

    def _lower(self, limit: float, floor: int) -> None:
        self._doubles = False
        if limit < self._limit:
            self._limit = min(self._limit, max(floor, limit))
            self._counts_from = self.round


class _Best:
    """The lowest median time to the first byte in recent rounds, forgotten in steps."""

    def __init__(self) -> None:
        self._recent_s = self._older_s = float("inf")
        self._num_rounds = 0

    def is_near(self, median_s: float) -> bool:
        """Whether a round was about as fast as the best."""
        return median_s <= min(self._recent_s, self._older_s) * _LATER + _JITTER_S

    def is_slower(self, median_s: float) -> bool:
        """Whether a round was much slower than the best; remembers the round."""
        best_s = min(self._recent_s, self._older_s)
        self._num_rounds += 1
        if self._num_rounds % _MEMORY_ROUNDS == 0:
            self._older_s, self._recent_s = self._recent_s, median_s
        self._recent_s = min(self._recent_s, median_s)
        return median_s > best_s * _SLOWER + _SLACK_S


class RetryBudget:
    """Tokens, each worth one retry. Requests and time earn them; a retry that succeeds is free."""

    def __init__(self, reserve: int, now: float) -> None:
        """Start with the tokens of a new endpoint.

        Args:
            reserve: the most tokens that it can hold.
            now: the time.
        """
        self._reserve = float(reserve)
        self._first = min(self._reserve, max(self._reserve * _FIRST, _MIN_FIRST))
        self._tokens = self._first
        self._known = 0.0  # how well the endpoint is known, from 0 to 1
        self._at = now
        self._restored_at = now - _REFILL_S

    def num_left(self, now: float) -> int:
        """How many retries could be sent now."""
        per_s = max(_LEAST_PER_S, self._known * self._reserve / _REFILL_S)
        self._tokens = min(self._reserve, self._tokens + (now - self._at) * per_s)
        self._at = now
        return int(self._tokens)

    def earn(self) -> None:
        """A range was requested for the first time."""
        self._tokens = min(self._reserve, self._tokens + _SHARE)
        self._known = min(1.0, self._known + 1 / (_KNOWN_AFTER * self._reserve))

    def take(self, now: float) -> bool:
        """Take a token for a retry; False if there is none."""
        if not self.num_left(now):
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """A retry succeeded.

        Were it to count, a storage that has recovered would be asked again only slowly.
        """
        self._tokens = min(self._reserve, self._tokens + 1)

    def restore(self, now: float) -> None:
        """The storage answers again after nothing but failures; counts once in half a minute."""
        if now - self._restored_at >= _REFILL_S:
            self._restored_at = now
            self._tokens = max(self.num_left(now), self._first)


def pause_s(num_attempts: int, random: float) -> float:
    """How long to wait before the next attempt, in seconds.

    Args:
        num_attempts: the failed ones so far, at least 1.
        random: uniform in `[0, 1)`.
    """
    longest_s: float = min(_MAX_S, _BASE_S * 2 ** min(num_attempts - 1, 16))
    return random * longest_s


# The budget: each request earns this part of a hedge, up to the reserve. A larger share adds load
# to a slow storage; a smaller one leaves late responses that a batch waits for.
_HEDGE_SHARE, _HEDGE_RESERVE = 0.05, 16.0
# How lateness is estimated: the quantile of the last responses, how many must be known at least,
# and how often it is computed again. A lower quantile hedges responses that were about to arrive.
_QUANTILE = 0.95
_REMEMBERED, _MIN_KNOWN, _EVERY = 512, 32, 32
# For one request. Where one response in a hundred takes seconds, both of two are late in every
# fortieth batch of 256.
_MAX_HEDGES = 2
_MIN_SECOND_HEDGE_S = 0.1  # of waiting; a shorter delay of the first hedge is chance


class Hedges:
    """Lateness by size, the budget, and the newest attempt of each read in flight."""

    def __init__(self) -> None:
        self._by_size: defaultdict[int, _OfSize] = defaultdict(_OfSize)
        self._tokens = _HEDGE_RESERVE

    def begin(self, attempt: Attempt) -> None:
        """An attempt was sent."""
        request = attempt.request
        if request.num_hedges >= _MAX_HEDGES:
            return
        if not request.num_hedges:
            self.earn()
        self._by_size[size_class(request.num_bytes)].in_flight[attempt] = None

    def end(self, attempt: Attempt) -> None:
        """An attempt is over, however it ended."""
        self._by_size[size_class(attempt.request.num_bytes)].in_flight.pop(attempt, None)

    def record(self, num_bytes: int, duration_s: float) -> None:
        """A first attempt was answered, or was waited for this long until its hedge was."""
        self._by_size[size_class(num_bytes)].add(duration_s)

    def late_after_s(self, num_bytes: int) -> float | None:
        """After how long a response of this size is late; None while too little is known."""
        return self._by_size[size_class(num_bytes)].late_s

    def earn(self) -> None:
        """A read was sent."""
        if self._tokens < _HEDGE_RESERVE:
            self._tokens += _HEDGE_SHARE

    def take(self) -> bool:
        """Take a token for a hedge; False if there is none."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def take_late(self, now: float) -> list[RangeRequest]:
        """The requests to hedge now, of each size the oldest first; they count as sent."""
        taken: list[RangeRequest] = []
        if self._tokens < 1:
            return taken
        for of_size in self._by_size.values():
            for attempt in of_size.late(now):
                if not self.take():
                    return taken
                del of_size.in_flight[attempt]
                attempt.request.num_hedges += 1
                taken.append(attempt.request)
        return taken


class _OfSize:
    """The attempts of one size class: those in flight, and how long the last responses took.

    Attributes:
        in_flight: the oldest first.
        late_s: after which one is late; None while too little is known.
    """

    def __init__(self) -> None:
        self.in_flight: OrderedDict[Attempt, None] = OrderedDict()
        self.late_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_to_come = _MIN_KNOWN  # before the quantile is computed again

    def late(self, now: float) -> list[Attempt]:
        """The attempts in flight that are late, the oldest first."""
        if (late_s := self.late_s) is None:
            return []
        late = itertools.takewhile(lambda each: now - each.sent_at >= late_s, self.in_flight)
        return [
            each for each in late if not each.is_hedge or now - each.sent_at >= _MIN_SECOND_HEDGE_S
        ]

    def add(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        self._num_to_come -= 1
        if self._num_to_come <= 0:
            self.late_s = sorted(self._durations_s)[int(len(self._durations_s) * _QUANTILE)]
            self._num_to_come = _EVERY


def size_class(num_bytes: int) -> int:
    """The same number for sizes within a factor of four."""
    return num_bytes.bit_length() // 2
