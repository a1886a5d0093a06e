"""One endpoint's requests: how many are in flight, who goes first, what is tried again, and when it is given up.

A request waits for its turn in a fair queue whose capacity is the adaptive limit. What fails waits, without a turn, for a pause
that is drawn at random and for a token of the retry budget. What is late is sent again, and the first answer counts. Nothing
here knows what carries the requests, and no task is spent on one: callbacks, and one timer for all.
"""

import asyncio
import contextlib
import functools
import heapq
import itertools
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestCount, RequestKind, RequestLabels
from gyre_daemon.runtime.fair import FairQueue, Flow
from gyre_daemon.storage.answer import Answer, Meaning, failure, final_error, meaning, not_let_in, too_late
from gyre_daemon.storage.engine.doubts import Doubts
from gyre_daemon.storage.engine.entrance import Entrance
from gyre_daemon.storage.engine.limit import AdaptiveLimit
from gyre_daemon.storage.engine.request import Request, Try
from gyre_daemon.storage.engine.retries import RetryBudget, pause_s
from gyre_daemon.storage.engine.watch import Watch
from gyre_daemon.storage.source import NotSent

_TICK_S = 0.005
_TICKS_PER_LOOK = 20  # at deadlines
_MIN_WAITING = 64  # for their turn, before others are kept from waiting, too
_NO_TOKEN_S = 0.05  # until the budget is asked again
_SILENCE = 1 / 3  # of the deadline: a try without a first byte for as long is given up
_BASE_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How an endpoint is treated.

    Attributes:
        max_requests: in flight at most, whatever it would take.
        deadline_s: of a request, from its first try on.
        hedges: late requests are sent again.
    """

    max_requests: int
    deadline_s: float
    hedges: bool = True


class Endpoint:
    """All requests to one endpoint, of all datasets and jobs. Used from one event loop."""

    def __init__(self, name: str, scheme: str, terms: Terms, metrics: Metrics) -> None:
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.queue = FairQueue(0)
        self.limit = AdaptiveLimit(terms.max_requests)
        self.budget = RetryBudget(terms.max_requests, time.monotonic(), is_new=True)
        self._scheme = scheme
        self._terms = terms
        self._metrics = metrics
        self._counts: dict[tuple[RequestKind, Outcome], RequestCount] = {}
        self._live: dict[Request, None] = {}
        self._entrance = Entrance(self._is_roomy, self._left_s)
        self._watch = Watch()
        self._doubts = Doubts()
        self._to_retry: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_down = False
        self._good_at = time.monotonic()
        self._last_failure: Answer | None = None
        self.queue.resize(self.limit.limit)

    def lower_ceiling(self, max_requests: int) -> None:
        """At most so many requests in flight from now on, if that is fewer than before; those that are, go on."""
        self.limit.lower_ceiling(max_requests)
        if not self._is_down:  # otherwise the queue is resized when the pause is over
            self.queue.resize(self.limit.limit)

    @contextlib.asynccontextmanager
    async def reading(self, flow: Flow, urgency: int, asked_at: float) -> AsyncIterator[None]:
        """Submit requests inside; the way in is free when few requests wait for their turn.

        Args:
            flow: the job that has more to submit; the jobs come in fairly.
            urgency: among the job's the lowest comes first.
            asked_at: when the job asked for it.

        Raises:
            StorageUnavailable: nothing was answered for the time that a request has.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._entrance.reading(flow, urgency, asked_at))
            except TimeoutError:
                raise not_let_in(self.name, self._terms.deadline_s, self._last_failure) from None
            yield

    def _is_roomy(self) -> bool:
        num_waiting = self.queue.num_waiting
        if num_waiting > _MIN_WAITING:
            num_waiting = min(num_waiting, len(self._live))  # the queue counts some who gave up
        return num_waiting <= _MIN_WAITING or num_waiting <= self.limit.limit // 2

    def _left_s(self, asked_at: float) -> float:
        """Until what is not even sent is given up."""
        return max(asked_at, self._good_at) + self._terms.deadline_s - time.monotonic()

    def submit(self, request: Request) -> None:
        """Have a range brought; `request.finish` is told."""
        self.budget.earn()
        self._live[request] = None
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._ask(request, is_hedge=False)

    def abandon(self, request: Request) -> None:
        """Nobody needs it any more."""
        if not request.is_over:
            self._end(request, "abandoned")
            self._entrance.look_again()
            del request.finish

    def _ask(self, request: Request, *, is_hedge: bool) -> None:
        if self._doubts and not is_hedge and self._doubts.holds(request, time.monotonic()):
            return
        turn = self.queue.ask(request.flow, 1, request.urgency - is_hedge, functools.partial(self._granted, request, is_hedge))
        if turn is None:
            self._send(request, is_hedge=is_hedge)
        else:
            request.turn = turn

    def _granted(self, request: Request, is_hedge: bool) -> None:
        if request.is_over or (is_hedge and not request.tries):
            self.queue.release()
        else:
            self._send(request, is_hedge=is_hedge)

    def _send(self, request: Request, *, is_hedge: bool) -> None:
        now = time.monotonic()
        if request.begun_at and not is_hedge:
            if not self.budget.take(now):
                self.queue.release()
                self._retry_at(now + _NO_TOKEN_S, request)
                return
            request.num_retries += 1
        request.begun_at = request.begun_at or now
        request.num_tries += 1
        try_ = Try(request, now, self.limit.round, is_hedge=is_hedge)
        request.tries.append(try_)
        self._watch.begin(try_)
        wanted, done = request.wanted, functools.partial(self._done, try_)
        try:
            try_.sent = request.source.get(request.path, wanted.start, wanted.stop, done)
        except Exception as error:  # a client that cannot even begin
            try_.sent = NotSent(self._loop.call_soon(done, failure(error)))

    def _done(self, try_: Try, answer: Answer) -> None:
        request = try_.request
        now = time.monotonic()
        means = meaning(request.wanted, answer, request.num_tries)
        if means is Meaning.GOOD:
            self._succeed(try_, answer, now)
            return
        if means is Meaning.REFUSED and self.limit.done(try_.of_round, self.queue.num_taken, None):
            self._resize()
        self._give_back(try_)
        if means is Meaning.FINAL or (means is Meaning.REFRESH and 0 < request.refreshed_at <= try_.sent_at):
            self._count("error", request, len(answer.data))
            if means is Meaning.FINAL:
                self._trust(try_)
            self._fail(request, final_error(request.wanted, answer), "abandoned")
        else:
            request.num_refused += means is Meaning.REFUSED
            self._count("refused" if means is Meaning.REFUSED else "retried", request, len(answer.data))
            self._try_again(request, try_, answer, now, at_once=means is Meaning.REFRESH)

    def _succeed(self, try_: Try, answer: Answer, now: float) -> None:
        request, first_byte_at = try_.request, try_.first_byte_at or now
        first_byte_s = first_byte_at - try_.sent_at
        self._watch.note(try_, now)
        if self.limit.done(try_.of_round, self.queue.num_taken, first_byte_s):
            self._resize()
        self._give_back(try_)
        self._good_at = now
        if self._doubts:
            self._trust(try_)
        if request.num_retries:
            self.budget.give_back()
        request.succeed(try_, first_byte_at, now)
        self._end(request, "hedged")
        count = self._count("ok", request, request.num_bytes)
        count.first_byte_s += first_byte_s
        count.body_s += now - first_byte_at
        self._tell(request, answer.data, None)

    def _trust(self, try_: Try) -> None:
        """Its credentials were accepted."""
        for request in self._doubts.released(try_):
            if not request.is_over:
                self._ask(request, is_hedge=False)

    def _resize(self) -> None:
        """Let as many in as the limit says; after rounds that brought nothing at all, none for a while."""
        failed = self.limit.num_failed_rounds
        if self._is_down and not failed:
            self.budget.restore(time.monotonic())
        self._is_down = failed > 0
        if self._pause:
            self._pause.cancel()
            self._pause = None
        if failed:
            pause = random.random() * min(_MAX_PAUSE_S, _BASE_PAUSE_S * 2 ** min(failed, 16))
            self._pause = self._loop.call_later(pause, self.queue.resize, self.limit.limit)
        self.queue.resize(0 if failed else self.limit.limit)

    def _try_again(self, request: Request, try_: Try, answer: Answer, now: float, *, at_once: bool) -> None:
        request.last = self._last_failure = answer
        if at_once:
            self._doubts.refused(request, try_.sent_at, answer.status, now)
        if not request.tries:
            pause = 0.0 if at_once else pause_s(request.num_tries, random.random())
            self._retry_at(now + pause, request)

    def _retry_at(self, when: float, request: Request) -> None:
        heapq.heappush(self._to_retry, (when, next(self._numbers), request))

    def _tick(self) -> None:
        now = time.monotonic()
        self._ticks += 1
        self._retry(now)
        if self._terms.hedges and not self.limit.is_refused:
            for request in self._watch.take_late(now, self._entrance.needed_first()):
                self._ask(request, is_hedge=True)
        if self._ticks % _TICKS_PER_LOOK == 0:
            self._look_at_deadlines(now)
        if not self._live:
            self._doubts.forget_waiting()
        self._timer = self._loop.call_later(_TICK_S, self._tick) if self._live else None

    def _retry(self, now: float) -> None:
        """What has paused waits for its turn again; the token of the budget is taken when it is sent."""
        while self._to_retry and self._to_retry[0][0] <= now:
            _, _, request = heapq.heappop(self._to_retry)
            if not request.is_over:
                self._ask(request, is_hedge=False)
        for request in self._doubts.ready(now) if self._doubts else ():
            self._ask(request, is_hedge=False)

    def _look_at_deadlines(self, now: float) -> None:
        deadline_s = self._terms.deadline_s
        for request in list(self._live):
            since = request.begun_at or max(request.asked_at, self._good_at)
            if now - since > deadline_s:
                last = request.last or self._last_failure
                error = too_late(self.name, request.wanted, deadline_s, request.num_tries, last)
                self._fail(request, error, "error")
                continue
            for try_ in list(request.tries):
                if try_.first_byte_at == 0 and now - try_.sent_at > deadline_s * _SILENCE:
                    try_.sent.cancel()
                    silence = f"no answer within {deadline_s * _SILENCE:g} s"
                    self._done(try_, Answer(0, detail=silence, unreachable=True))

    def _fail(self, request: Request, error: GyreError, under_way: Outcome) -> None:
        self._end(request, under_way)
        self._entrance.look_again()
        self._tell(request, b"", error)

    def _tell(self, request: Request, data: bytes, error: GyreError | None) -> None:
        finish = request.finish
        del request.finish  # whoever is told holds the request: cycles would wait for the collector
        finish(data, error)

    def _end(self, request: Request, outcome: Outcome) -> None:
        """It is over; what is still under way for it has this outcome."""
        request.is_over = True
        del self._live[request]
        if request.turn:
            request.turn.cancel()
        for try_ in request.tries[:]:
            try_.sent.cancel()
            self._count(outcome, request, 0)
            if outcome == "hedged":
                self._watch.note(try_, time.monotonic())
            self._give_back(try_)

    def _give_back(self, try_: Try) -> None:
        try_.request.tries.remove(try_)
        del try_.sent  # which has a callback that has the try
        self._watch.end(try_)
        self.queue.release()
        self._entrance.look_again()

    def _count(self, outcome: Outcome, request: Request, num_bytes: int) -> RequestCount:
        count = self._counts.get((request.kind, outcome))
        if count is None:
            count = self._metrics.requests(RequestLabels(self._scheme, request.kind, outcome))
            self._counts[request.kind, outcome] = count
        count.num_requests += 1
        count.num_bytes += num_bytes
        return count
