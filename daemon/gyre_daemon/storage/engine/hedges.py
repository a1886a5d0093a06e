"""Which requests are sent a second time because their response is late.

Dean and Barroso, "The Tail at Scale", 2013. Pure: the caller brings the clock.

A response is late once 95 of 100 recent responses of its size have come sooner. The first of the
two attempts to arrive counts. A budget limits hedges to one request in twenty, so that a storage
that is slow throughout is not asked for everything twice, and prefers the batch that a job needs
first.

While many requests are in flight, the responses so far say little: the fast ones come first. So at
first only the 64 earliest requests count, and a response is late once all but three of them came.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping

from gyre_daemon.runtime.threads import Flow
from gyre_daemon.storage.engine.request import Attempt, RangeRequest

# The budget: each request earns this part of a hedge, up to the reserve, of which a part is kept
# for what is needed first. A larger share adds load to a slow storage; a smaller one leaves late
# responses that a batch waits for.
_SHARE = 0.05
_RESERVE, _KEPT = 16.0, 8.0
# How lateness is estimated: the quantile of the last responses, how many must be known at least,
# and how often it is computed again. A lower quantile hedges responses that were about to arrive.
_QUANTILE = 0.95
_MEMORY, _MIN_KNOWN, _EVERY = 512, 32, 32
_COHORT = 64  # the earliest requests, see above
# For one request. Where one response in a hundred takes seconds, both of two are late in every
# fortieth batch of 256.
_MAX_HEDGES = 2
_MIN_SECOND_HEDGE_S = 0.1  # of waiting; a shorter delay of the first hedge is chance
# Lateness counts this many times for requests that are not needed first: most of them arrive
# before anybody waits for them.
_NOT_FIRST_FACTOR = 1.5


class Hedges:
    """Lateness by size, the budget, and the newest attempt of each read in flight."""

    def __init__(self) -> None:
        self._latencies: dict[int, _Latencies] = {}  # by size class
        self._in_flight: dict[int, OrderedDict[Attempt, None]] = {}  # likewise, the oldest first
        self._tokens = _RESERVE

    def begin(self, attempt: Attempt) -> None:
        """An attempt was sent."""
        request = attempt.request
        if request.kind != "read" or request.num_hedges >= _MAX_HEDGES:
            return
        size = size_class(request.num_bytes)
        if not request.num_hedges:
            self.earn()
            attempt.is_early = self._of(size).begin()
        self._in_flight.setdefault(size, OrderedDict())[attempt] = None

    def end(self, attempt: Attempt) -> None:
        """An attempt is over, however it ended."""
        size = size_class(attempt.request.num_bytes)
        if attempts := self._in_flight.get(size):
            attempts.pop(attempt, None)
        if attempt.is_early:
            self._of(size).end_early()

    def record(self, num_bytes: int, duration_s: float) -> None:
        """A first attempt was answered, or was waited for this long until its hedge was."""
        self._of(size_class(num_bytes)).add(duration_s)

    def late_after_s(self, num_bytes: int) -> float | None:
        """After how long a response of this size is late; None while too little is known."""
        return self._of(size_class(num_bytes)).quantile_s

    def earn(self) -> None:
        """A read was sent."""
        if self._tokens < _RESERVE:
            self._tokens += _SHARE

    def take(self, *, is_needed_first: bool = True) -> bool:
        """Take a token for a hedge; False if there is none.

        Some tokens are kept for what is needed first: while that is late, nothing else is sent that
        would earn one.
        """
        if self._tokens < (1 if is_needed_first else 1 + _KEPT):
            return False
        self._tokens -= 1
        return True

    def take_late(self, now: float, needed_first: Mapping[Flow, int]) -> list[RangeRequest]:
        """The requests to hedge now, the most needed first; they count as sent.

        Args:
            now: the time.
            needed_first: the lowest urgency that each job is reading.
        """
        return [
            request
            for size in self._in_flight
            for request in self._take_late(size, now, needed_first)
        ]

    def _take_late(
        self, size: int, now: float, needed_first: Mapping[Flow, int]
    ) -> list[RangeRequest]:
        late_s = self._of(size).quantile_s
        if late_s is None or self._tokens < 1:
            return []
        late = {}
        for attempt in self._in_flight[size]:
            waited_s, request = now - attempt.sent_at, attempt.request
            if waited_s < late_s:
                break
            is_late = waited_s >= late_s * _NOT_FIRST_FACTOR or _is_first(request, needed_first)
            if is_late and not (attempt.is_hedge and waited_s < _MIN_SECOND_HEDGE_S):
                late[request] = attempt
        taken = []
        for request in most_needed_first(late):
            if self.take(is_needed_first=_is_first(request, needed_first)):
                del self._in_flight[size][late[request]]
                request.num_hedges += 1
                taken.append(request)
        return taken

    def _of(self, size: int) -> "_Latencies":
        latencies = self._latencies.get(size)
        if latencies is None:
            latencies = self._latencies[size] = _Latencies()
        return latencies


class _Latencies:
    """How long the last responses of one size class took."""

    def __init__(self) -> None:
        self.quantile_s: float | None = None
        self._num_early = 0
        self._num_early_ended = 0
        self._durations_s: deque[float] = deque(maxlen=_MEMORY)
        self._num_to_come = _MIN_KNOWN  # before the quantile is computed again

    def begin(self) -> bool:
        """A request was sent; returns whether it is an early one."""
        if self._num_early >= _COHORT:
            return False
        self._num_early += 1
        return True

    def end_early(self) -> None:
        self._num_early_ended += 1
        if self.quantile_s is None and self._num_to_come <= 0:
            self._compute()

    def add(self, duration_s: float) -> None:
        self._durations_s.append(duration_s)
        self._num_to_come -= 1
        if self._num_to_come <= 0:
            self._compute()

    def _compute(self) -> None:
        if self._num_early_ended < self._num_early * _QUANTILE:
            return
        durations_s = sorted(self._durations_s)
        if self.quantile_s is None and self._num_early:
            # The slowest response so far is the slowest of all but the late ones.
            self.quantile_s, self._num_to_come = durations_s[-1], _MEMORY
        else:
            self.quantile_s = durations_s[int(len(durations_s) * _QUANTILE)]
            self._num_to_come = _EVERY


def most_needed_first(late: Iterable[RangeRequest]) -> list[RangeRequest]:
    """Late requests, taking turns among jobs, each job's most urgent first."""
    turns: Counter[Flow] = Counter()
    in_turns = []
    for request in sorted(late, key=lambda each: each.urgency):
        in_turns.append((turns[request.flow], request))
        turns[request.flow] += 1
    return [request for _, request in sorted(in_turns, key=lambda each: each[0])]


def size_class(num_bytes: int) -> int:
    """The same number for sizes within a factor of four."""
    return num_bytes.bit_length() // 2


def _is_first(request: RangeRequest, needed_first: Mapping[Flow, int]) -> bool:
    return request.urgency <= needed_first.get(request.flow, request.urgency)
