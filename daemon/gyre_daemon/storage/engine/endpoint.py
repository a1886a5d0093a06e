"""The requests to one endpoint, and the storages that are read through it.

About one request per sample, many in flight: how many, which goes first, which is sent again.

[Note: The life of a request]

Reads are admitted one after another, so that the request queue stays short. A range waits for its
turn in a fair queue whose capacity is the adaptive limit. A failed attempt is followed, after a
random pause and for a token of the retry budget, by another turn in the queue. A late attempt gets
a hedge, and the first response counts. A refused attempt waits for the source's credentials. A
range that has not arrived by its deadline fails. Nothing here knows what carries the requests, and
no range costs a task: there are callbacks, and one timer for all. `policies` decides all this.

[Note: Answers that tell nothing]

Most storages send a validator with each answer, and it is compared with that of the listing. Some
do not, and drivers of fsspec return bytes alone: then the object is looked at again after its bytes
have come, once for all reads of it that wait, and what is told now must agree with the listing.
Where a listing tells nothing, the first answer counts in its place. Where nothing is told at all, a
change cannot be noticed, and the log says so once.
"""

import asyncio
import ctypes
import functools
import heapq
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.events import debug_event, log_event
from gyre_daemon.runtime.threads import Claims, FairQueue, Flow
from gyre_daemon.storage.engine.policies import (
    AdaptiveLimit,
    Attempt,
    CredentialRefresh,
    Hedges,
    RangeRequest,
    RetryBudget,
    pause_s,
)
from gyre_daemon.storage.reads import MAX_GAP_BYTES, ReadPlan, Reads, ShardBounds, Storage
from gyre_daemon.storage.response import (
    Body,
    ByteRange,
    Response,
    Source,
    Verdict,
    classify,
    deadline_error,
    describe,
    final_error,
    stalled_error,
)
from gyre_daemon.storage.shard import UNKNOWN, Shard, Validators, changed, is_same

# The timer: a longer tick delays retries and hedges, a shorter one costs processor time while
# anything is in flight. Deadlines are checked once in this many ticks.
_TICK_S, _TICKS_PER_DEADLINE_CHECK = 0.005, 20
# Requests that may wait for their turn before reads wait for admission. More make a new urgent read
# wait behind them; fewer leave turns unused between two reads.
_MIN_WAITING = 64
_NO_TOKEN_S = 0.05  # until a retry without a token asks again
# An attempt without a first byte for this part of the deadline is given up. A larger part leaves no
# time for another attempt; a smaller one gives up on a storage that is only slow.
_SILENCE = 1 / 3
# While every request is throttled nothing is sent for a random pause, doubled for each such round.
_BASE_PAUSE_S, _MAX_PAUSE_S = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """How an endpoint is used.

    Attributes:
        max_requests: the most requests in flight.
        deadline_s: of a range, from its first attempt.
        hedges: whether late requests are sent again.
        hub_requests_per_s: to the Hugging Face Hub, in the long run, of all endpoints together.
        mount_threads: the most reads in flight of a slow mount.
    """

    max_requests: int
    deadline_s: float
    hedges: bool = True
    hub_requests_per_s: float = 10.0
    mount_threads: int = 64


class Endpoint:
    """All requests to one endpoint, of all datasets and jobs. Used from one event loop.

    Attributes:
        num_answered: requests whose bytes were used.
        first_byte_s: the sum of their times until the first byte.
    """

    def __init__(self, name: str, scheme: str, options: EndpointOptions, metrics: Metrics) -> None:
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.queue = FairQueue(0)
        self.limit = AdaptiveLimit(options.max_requests)
        self.budget = RetryBudget(options.max_requests, time.monotonic())
        self._scheme = scheme
        self._options = options
        self._metrics = metrics
        self._live: dict[RangeRequest, None] = {}
        self._line = FairQueue(1)  # of reads that wait for admission
        self._room = asyncio.Event()
        self._hedges = Hedges()
        self._refreshing: dict[CredentialRefresh, None] = {}
        self._to_retry: list[tuple[float, int, RangeRequest]] = []  # a heap by time
        self._numbers = itertools.count()
        self._num_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_down = False
        self.num_answered, self.first_byte_s = 0, 0.0
        self._succeeded_at = time.monotonic()
        self._last_failure: Response | None = None
        self.queue.resize(self.limit.limit)

    def lower_ceiling(self, max_requests: int) -> None:
        """Lower the most requests in flight; those in flight continue."""
        self.limit.lower_ceiling(max_requests)
        if not self._is_down:  # otherwise the queue is resized when the pause is over
            self.queue.resize(self.limit.limit)

    async def admit(self, claims: Claims, asked_at: float) -> None:
        """Wait until few requests wait for their turn; those of the read are submitted then.

        Queueing more requests would only cost time that those in flight need.

        Args:
            claims: the jobs that need it; jobs are admitted fairly, and among a job's reads the
                most urgent is admitted first.
            asked_at: when the read was asked for.

        Raises:
            StorageUnavailable: nothing was answered for as long as a range may take.
        """
        async with self._line.turn_of(claims, 1):
            while not self._has_room():
                self._room.clear()
                try:
                    async with asyncio.timeout(self._left_s(asked_at)):
                        await self._room.wait()
                except TimeoutError:
                    if self._left_s(asked_at) <= 0:  # it grows whenever a response arrives
                        raise stalled_error(
                            self.name, self._options.deadline_s, self._last_failure
                        ) from None

    def submit(self, request: RangeRequest) -> None:
        """Request a range; its `finish` is called with the result."""
        self.budget.earn()
        self._live[request] = None
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._enqueue(request, is_hedge=False)

    def join(self, request: RangeRequest, flow: Flow, urgency: int) -> None:
        """A read needs the range, too: it is sent at whichever turn comes first; see `Claims`."""
        if request.turns and (flow is not request.flow or urgency < request.urgency):
            self._ask(request, flow, urgency, is_hedge=False)
        elif urgency < request.urgency:
            request.flow, request.urgency = flow, urgency  # for its hedge

    def abandon(self, request: RangeRequest) -> None:
        """Nobody needs the range any more."""
        if not request.is_over:
            self._end(request, "abandoned")
            self._look_for_room()
            del request.finish

    def _has_room(self) -> bool:
        num_waiting = self.queue.num_waiting
        if num_waiting > _MIN_WAITING:
            num_waiting = min(num_waiting, len(self._live))  # the queue counts abandoned ones
        return num_waiting <= _MIN_WAITING or num_waiting <= self.limit.limit // 2

    def _left_s(self, asked_at: float) -> float:
        """How long a read that was asked for at `asked_at` may still wait for admission."""
        return max(asked_at, self._succeeded_at) + self._options.deadline_s - time.monotonic()

    def _look_for_room(self) -> None:
        if self._has_room():
            self._room.set()

    def _enqueue(self, request: RangeRequest, *, is_hedge: bool) -> None:
        if not is_hedge and request.credentials.holds(request, time.monotonic()):
            self._refreshing[request.credentials] = None
            return
        self._ask(request, request.flow, request.urgency - is_hedge, is_hedge=is_hedge)

    def _ask(self, request: RangeRequest, flow: Flow, urgency: int, *, is_hedge: bool) -> None:
        granted = functools.partial(self._granted, request, flow, urgency, is_hedge)
        turn = self.queue.ask(flow, 1, urgency, granted)
        if turn is None:
            self._send(request, is_hedge=is_hedge)
        elif is_hedge:
            request.hedge_turn = turn
        else:
            request.turns += (turn,)

    def _granted(self, request: RangeRequest, flow: Flow, urgency: int, is_hedge: bool) -> None:
        if request.is_over or (is_hedge and not request.attempts):
            self.queue.release()
            return
        if not is_hedge:
            request.leave_queue()
            request.flow, request.urgency = flow, urgency
        self._send(request, is_hedge=is_hedge)

    def _send(self, request: RangeRequest, *, is_hedge: bool) -> None:
        now = time.monotonic()
        if request.begun_at and not is_hedge:
            if not self.budget.take(now):
                self.queue.release()
                self._retry_at(now + _NO_TOKEN_S, request)
                return
            request.num_retries += 1
        request.begun_at = request.begun_at or now
        request.num_attempts += 1
        attempt = Attempt(request, now, self.limit.round, is_hedge=is_hedge)
        request.attempts.append(attempt)
        self._hedges.begin(attempt)
        wanted, received = request.wanted, functools.partial(self._received, attempt)
        source = request.credentials.source
        attempt.sent = source.get(request.path, wanted.start, wanted.stop, received)

    def _received(self, attempt: Attempt, response: Response) -> None:
        request, now = attempt.request, time.monotonic()
        verdict = classify(request.wanted, response, request.num_attempts)
        if verdict is Verdict.OK:
            self._succeed(attempt, response, now)
            return
        is_throttled = verdict is Verdict.THROTTLED
        if is_throttled and self.limit.done(attempt.of_round, self.queue.num_taken, None):
            self._resize()
        self._give_back(attempt)
        was_refreshed = 0 < request.refreshed_at <= attempt.sent_at
        if verdict is Verdict.FAILED or (verdict is Verdict.REFRESH and was_refreshed):
            self._count("error", len(response.data))
            if verdict is Verdict.FAILED:
                self._accept_credentials(attempt)
            self._fail(request, final_error(request.wanted, response), "abandoned")
            return
        request.num_throttled += is_throttled
        self._count("refused" if is_throttled else "retried", len(response.data))
        request.last_failure = self._last_failure = response
        if verdict is Verdict.REFRESH:
            request.credentials.refused(request, attempt.sent_at, response.status, now)
        if not request.attempts:
            is_refresh = verdict is Verdict.REFRESH
            pause = 0.0 if is_refresh else pause_s(request.num_attempts, random.random())
            facts: dict[str, object] = {
                "endpoint": self.name,
                "shard": request.wanted.shard.name,
                "attempt": request.num_attempts,
                "reason": describe(response),
            }
            debug_event("request is sent again", facts)
            self._retry_at(now + pause, request)

    def _succeed(self, attempt: Attempt, response: Response, now: float) -> None:
        request, first_byte_at = attempt.request, attempt.first_byte_at or now
        first_byte_s = first_byte_at - attempt.sent_at
        self._record_latency(attempt, now)
        if self.limit.done(attempt.of_round, self.queue.num_taken, first_byte_s):
            self._resize()
        self._give_back(attempt)
        self._succeeded_at = now
        self._accept_credentials(attempt)
        if request.num_retries:
            self.budget.give_back()
        request.sent_at, request.first_byte_at = attempt.sent_at, first_byte_at
        request.ended_at, request.told = now, response.told
        self._end(request, "hedged")
        self._count("ok", request.num_bytes)
        self.num_answered += 1
        self.first_byte_s += first_byte_s
        self._finish(request, response.data, None)

    def _record_latency(self, attempt: Attempt, now: float) -> None:
        if not attempt.is_hedge:
            self._hedges.record(attempt.request.num_bytes, now - attempt.sent_at)

    def _accept_credentials(self, attempt: Attempt) -> None:
        """A response came that the storage gives only to accepted credentials."""
        for request in attempt.request.credentials.accepted(attempt.sent_at):
            self._enqueue(request, is_hedge=False)

    def _resize(self) -> None:
        """Let as many requests in as the limit says.

        After rounds without any success, none for a random pause.
        """
        num_failed = self.limit.num_failed_rounds
        if self._is_down and not num_failed:
            self.budget.restore(time.monotonic())
        self._is_down = num_failed > 0
        if self._pause:
            self._pause.cancel()
            self._pause = None
        if num_failed:
            pause = random.random() * min(_MAX_PAUSE_S, _BASE_PAUSE_S * 2 ** min(num_failed, 16))
            self._pause = self._loop.call_later(pause, self.queue.resize, self.limit.limit)
        self.queue.resize(0 if num_failed else self.limit.limit)

    def _retry_at(self, when: float, request: RangeRequest) -> None:
        heapq.heappush(self._to_retry, (when, next(self._numbers), request))

    def _tick(self) -> None:
        now = time.monotonic()
        self._num_ticks += 1
        self._retry(now)
        if self._options.hedges and not self.limit.is_throttled:
            for request in self._hedges.take_late(now):
                self._enqueue(request, is_hedge=True)
        if self._num_ticks % _TICKS_PER_DEADLINE_CHECK == 0:
            self._check_deadlines(now)
        self._timer = self._loop.call_later(_TICK_S, self._tick) if self._live else None

    def _retry(self, now: float) -> None:
        """Enqueue requests whose pause is over; the budget's token is taken when they are sent."""
        while self._to_retry and self._to_retry[0][0] <= now:
            _, _, request = heapq.heappop(self._to_retry)
            if not request.is_over:
                self._enqueue(request, is_hedge=False)
        for credentials in list(self._refreshing):
            if probe := credentials.next_probe(now):
                self._enqueue(probe, is_hedge=False)
            if not self._live:
                credentials.forget_waiting()
            if not (self._live and credentials.is_under_way):
                del self._refreshing[credentials]

    def _check_deadlines(self, now: float) -> None:
        deadline_s = self._options.deadline_s
        silence_s = deadline_s * _SILENCE
        for request in list(self._live):
            since = request.begun_at or max(request.asked_at, self._succeeded_at)
            if now - since > deadline_s:
                last = request.last_failure or self._last_failure
                error = deadline_error(
                    self.name, request.wanted, deadline_s, request.num_attempts, last
                )
                self._fail(request, error, "error")
                continue
            for attempt in list(request.attempts):
                if attempt.first_byte_at == 0 and now - attempt.sent_at > silence_s:
                    attempt.sent.cancel()
                    detail = f"no answer within {silence_s:g} s"
                    self._received(attempt, Response(0, detail=detail, unreachable=True))

    def _fail(self, request: RangeRequest, error: GyreError, in_flight: Outcome) -> None:
        self._end(request, in_flight)
        self._look_for_room()
        self._finish(request, b"", error)

    def _finish(self, request: RangeRequest, data: Body, error: GyreError | None) -> None:
        finish = request.finish
        del request.finish  # it refers to the request: a cycle would wait for the collector
        finish(data, error)

    def _end(self, request: RangeRequest, outcome: Outcome) -> None:
        """The range is no longer needed; its attempts in flight are counted with this outcome."""
        request.is_over = True
        del self._live[request]
        request.leave_queue()
        if request.hedge_turn:
            request.hedge_turn.cancel()
        for attempt in request.attempts[:]:
            attempt.sent.cancel()
            self._count(outcome, 0)
            if outcome == "hedged":
                self._record_latency(attempt, time.monotonic())
            self._give_back(attempt)

    def _give_back(self, attempt: Attempt) -> None:
        attempt.request.attempts.remove(attempt)
        sent = attempt.sent
        del attempt.sent  # its callback refers to the attempt
        self._hedges.end(attempt)
        sent.when_free(self._release)

    def _release(self) -> None:
        self.queue.release()
        self._look_for_room()

    def _count(self, outcome: Outcome, num_bytes: int) -> None:
        self._metrics.count_requests(RequestLabels(self._scheme, "read", outcome), 1, num_bytes)


# `ctypes.memmove` gives up the interpreter's lock, and waits for it among all threads that read.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_Key = tuple[int, int, int]  # shard, start, stop
# Where the pieces of a range go: each one's begin within the range, its size and its address.
_Pieces = tuple[tuple[int, int, int], ...]

# The size and the validators of an object as it is now.
Look = Callable[[str], Awaitable[tuple[int, Validators]]]
# Called with the error, or None if the bytes are those of the listed version.
Decide = Callable[[GyreError | None], None]

_MAX_LOOK_S = 20.0  # after which a look that fails is not tried again


class RemoteStorage(Storage):
    """Shards behind an endpoint that many datasets may share.

    Concurrent reads of the same range share one request.
    """

    def __init__(
        self,
        source: Source,
        endpoint: Endpoint,
        paths: Sequence[str],
        shards: Sequence[Shard],
        look: Look | None = None,
        *,
        is_compared: bool = False,
    ) -> None:
        """Read listed objects.

        Args:
            source: carries the requests.
            endpoint: sends them.
            paths: of the objects, as the source knows them.
            shards: as listed.
            look: see `ChangeCheck`.
            is_compared: whether the source itself refuses changed objects.
        """
        self.shards = shards
        self._changes = None if is_compared else ChangeCheck(endpoint.name, paths, shards, look)
        self._credentials = CredentialRefresh(source)
        self._endpoint = endpoint
        self._paths = paths
        self._bounds = ShardBounds(shards)
        self._in_flight: dict[_Key, _SharedRequest] = {}

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; fields of one sample that lie close together are one request."""
        reads = plan.part(slice(None))
        self._bounds.check(reads)
        reads = reads.nonempty()
        if not len(reads):
            return
        asked_at, claims = time.monotonic(), reads.claimed()
        await self._endpoint.admit(claims, asked_at)
        wanted = list(_ranges(reads))
        pending = _PendingRead(reads, len(wanted), asked_at)
        try:
            for key, pieces in wanted:
                self._join(key, pending, pieces)
            with claims.told(functools.partial(self._hasten, pending)):
                await pending.done
        finally:
            pending.close()
            # Requests that wait for a turn leave before others give theirs back.
            for shared in reversed(list(pending.shared_requests)):
                self._leave(shared, pending)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return self._paths[shard]

    def _join(self, key: _Key, pending: "_PendingRead", pieces: _Pieces) -> None:
        """Wait for a range: for a request in flight, or for a new one."""
        reads, shared = pending.reads, self._in_flight.get(key)
        if shared:
            shared.waiting.append((pending, pieces))
            pending.shared_requests[shared] = None
            if reads.delays:
                reads.delays.num_joined += 1
            return
        shard, start, stop = key
        path, wanted = self._paths[shard], ByteRange(self.shards, shard, start, stop)
        shared = self._in_flight[key] = _SharedRequest(
            self._credentials, path, wanted, reads.flow, reads.urgency, pending.asked_at
        )
        shared.waiting.append((pending, pieces))
        pending.shared_requests[shared] = None
        shared.finish = functools.partial(self._checked, shared)
        self._endpoint.submit(shared)

    def _checked(self, shared: "_SharedRequest", data: Body, error: GyreError | None) -> None:
        """Deliver a range, if it is of the version that was listed."""
        if error or self._changes is None:
            self._finish(shared, data, error)
        else:
            decide = functools.partial(self._finish, shared, data)
            self._changes.check(shared.key[0], shared.wanted.shard, shared.told, decide)

    def _hasten(self, pending: "_PendingRead", flow: Flow, urgency: int) -> None:
        """Somebody needs the ranges of a read."""
        for shared in list(pending.shared_requests):
            self._endpoint.join(shared, flow, urgency)

    def _leave(self, shared: "_SharedRequest", pending: "_PendingRead") -> None:
        shared.waiting = [each for each in shared.waiting if each[0] is not pending]
        if not shared.waiting:
            self._in_flight.pop(shared.key, None)
            self._endpoint.abandon(shared)

    def _finish(self, shared: "_SharedRequest", data: Body, error: GyreError | None) -> None:
        """A range has arrived or failed."""
        if self._in_flight.get(shared.key) is shared:  # it may have been left meanwhile
            del self._in_flight[shared.key]
        waiting, shared.waiting = shared.waiting, []  # the reads refer to their last request
        for pending, pieces in waiting:
            pending.shared_requests.pop(shared, None)
            pending.take(shared, pieces, data, error)


@dataclass(slots=True, eq=False, repr=False)
class _SharedRequest(RangeRequest):
    """A request, and the reads that wait for it."""

    waiting: "list[tuple[_PendingRead, _Pieces]]" = field(default_factory=list)

    @property
    def key(self) -> _Key:
        """The shard's number, and the range."""
        return self.wanted[1:]


class _PendingRead:
    """A call of `read` that waits for its ranges; keeps the memory that they go to."""

    def __init__(self, reads: Reads, num_missing: int, asked_at: float) -> None:
        self.reads = reads
        self.asked_at = asked_at
        self.shared_requests: dict[_SharedRequest, None] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self._num_missing = num_missing
        self._last: RangeRequest | None = None  # to arrive: it kept the read waiting
        if reads.delays:
            reads.delays.num_requests += num_missing

    def take(
        self, request: RangeRequest, pieces: _Pieces, data: Body, error: GyreError | None
    ) -> None:
        """Copy a range that has arrived, or fail."""
        if self._is_closed or self.done.done():
            return
        if self.reads.delays:
            request.count_in(self.reads.delays)
        if error:
            self.done.set_exception(error)
            return
        self._last = request
        for begin, size, address in pieces:
            _memmove(address, _source(data, begin, size), size)
        self._num_missing -= 1
        if not self._num_missing:
            self.done.set_result(None)

    def close(self) -> None:
        """Accept nothing more, and record where the time of the last request went."""
        self._is_closed = True
        delays, last = self.reads.delays, self._last
        if delays and last and (not delays.slowest or last.total_s > delays.slowest.total_s):
            delays.slowest = last.timing()


def _source(data: Body, begin: int, size: int) -> "bytes | ctypes.Array[ctypes.c_char]":
    """A part of a body for `memmove`; a mapping is not copied for it."""
    if isinstance(data, bytes):
        return data[begin : begin + size] if begin else data
    return (ctypes.c_char * size).from_buffer(data, begin)


def _ranges(reads: Reads) -> Iterator[tuple[_Key, _Pieces]]:
    """The ranges to request, and where their pieces go."""
    columns = reads.shard, reads.start, reads.size, reads.target, reads.sample
    rows = zip(*(column.tolist() for column in columns), strict=True)
    pieces: list[tuple[int, int, int]] = []
    first = begin = end = last_sample = -1
    for shard, start, size, target, sample in rows:
        is_same = sample == last_sample and shard == first
        if pieces and is_same and 0 <= start - end <= MAX_GAP_BYTES:
            pieces.append((start - begin, size, target))
        else:
            if pieces:
                yield (first, begin, end), tuple(pieces)
            pieces, first, begin, last_sample = [(0, size, target)], shard, start, sample
        end = start + size
    if pieces:
        yield (first, begin, end), tuple(pieces)


class ChangeCheck:
    """Compares answers with the listing, for the objects of one dataset."""

    def __init__(
        self, name: str, paths: Sequence[str], shards: Sequence[Shard], look: Look | None
    ) -> None:
        """Know nothing but the listing.

        Args:
            name: of the storage, for the log.
            paths: of the objects.
            shards: as listed.
            look: looks at an object again; None if that tells nothing.
        """
        self._name, self._paths, self._shards, self._look = name, paths, shards, look
        self._known: dict[int, Validators] = {}  # where answers told more than the listing
        self._waiting: dict[int, list[tuple[Validators, Decide]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_warned = False

    def check(self, number: int, shard: Shard, told: Validators, decide: Decide) -> None:
        """Decide about bytes of an object that came with these validators, now or later."""
        known = self._known.get(number, shard.validators)
        same = is_same(known, told)
        if same is not None:
            decide(None if same else changed(shard.name))
        elif shard.validators and self._look:
            if number in self._waiting:  # and so a task looks
                self._waiting[number].append((told, decide))
                return
            self._waiting[number] = [(told, decide)]
            task = asyncio.get_running_loop().create_task(self._look_again(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._learn(number, known, told)
            decide(None)

    async def _look_again(self, number: int) -> None:
        """Decide about all bytes that came before a look began, until none wait."""
        while waiting := self._waiting[number]:
            self._waiting[number] = []
            error, now = await self._see(number)
            for told, decide in waiting:
                decide(error or self._compared(number, now, told))
        del self._waiting[number]

    def _compared(self, number: int, now: Validators, told: Validators) -> GyreError | None:
        """The error if the bytes or the object as it is now differ from the listing."""
        known = self._known.get(number, self._shards[number].validators)
        if is_same(known, now) is False or is_same(now, told) is False:
            return changed(self._shards[number].name)
        if is_same(known, now) is None:
            self._look = None  # it tells nothing that could be compared
            self._learn(number, known, told)
        elif told:
            self._known[number] = known.joined(told)
        return None

    async def _see(self, number: int) -> tuple[GyreError | None, Validators]:
        """The object as it is now."""
        shard, look = self._shards[number], self._look
        if look is None:
            return None, UNKNOWN
        until = time.monotonic() + _MAX_LOOK_S
        for attempt in itertools.count(1):
            try:
                size, now = await look(self._paths[number])
            except GyreError as error:
                if not isinstance(error, StorageUnavailable) or time.monotonic() > until:
                    return error, UNKNOWN
                await asyncio.sleep(pause_s(attempt, random.random()))
            else:
                return (changed(shard.name) if size != shard.size_bytes else None), now
        raise AssertionError

    def _learn(self, number: int, known: Validators, told: Validators) -> None:
        if told:
            self._known[number] = known.joined(told)
        elif not self._has_warned:
            self._has_warned = True
            facts = {
                "storage": self._name,
                "shard": self._shards[number].name,
                "reason": "the storage tells no ETag, version or time of its objects: bytes of a "
                "replaced object of equal size are served as if they were the old ones; never "
                "overwrite a shard there, write a new name",
            }
            log_event("changes cannot be noticed", facts, logging.WARNING)
