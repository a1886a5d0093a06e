"""Threads that the end of the process does not wait for, and their fair sharing between jobs.

A thread that asks a file system which does not answer waits for ever. The interpreter joins the
threads of `concurrent.futures` when it ends, and asyncio's default executor is shared by everything
in the process, so that one hung mount would stop the daemon. Nothing here is ever joined.

Each job is a flow. The next turn goes to the waiting user with the lowest virtual time, and of its
waiting flows to the one with the lowest: the cost of the turns that it had, divided by its weight
(stride scheduling, Waldspurger and Weihl 1995). The virtual time of a user grows with each turn of
its flows, by the cost divided by the flow's weight against other users. That is 1 unless the
operator names the user, so a user with ten jobs gets as much as one with a single job. A user
or a flow that was idle begins at the current virtual time, so idling earns no credit. Within a flow
the most urgent request goes first, and of equally urgent ones the oldest.
"""

import asyncio
import contextlib
import heapq
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from msgspec import Struct, field

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_Work = Callable[[], Callable[[], None]]

# Threads without work end after this long. They take some ten microseconds to start again.
_IDLE_S = 30.0
_WHOLE_PROCESS = 2  # as the kernel builds the number of a process's clock


class _Worker(Struct, eq=False):
    """One thread of an executor, or a process that is counted among them.

    Attributes:
        clock: its processor time, for `time.clock_gettime`.
        is_busy: whether it has work.
        cpu_ns: its processor time at the last look; `still_since` is the first look with this time.
    """

    clock: int = 0
    is_busy: bool = False
    cpu_ns: int = -1
    still_since: float = 0.0


def _nothing() -> None:
    """Do nothing."""


class DaemonThreads(Executor):
    """An executor of daemon threads, started when they are needed."""

    def __init__(self, max_threads: int, name: str) -> None:
        """Start no thread yet; with `max_threads` at work, further work waits."""
        self.max_threads = max_threads
        self._name = name
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._workers: set[_Worker] = set()
        self._processes: set[_Worker] = set()
        self._num_pending = 0  # waiting or running
        self._is_shut_down = False

    def submit(
        self,
        work: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Have a thread call `work`; raises RuntimeError if the executor is shut down."""
        future: Future[Result] = Future()

        def run() -> Callable[[], None]:
            if not future.set_running_or_notify_cancel():
                return _nothing
            try:
                return partial(future.set_result, work(*args, **kwargs))
            except BaseException as error:
                return partial(future.set_exception, error)

        self.start(run)
        return future

    def start(self, work: _Work) -> None:
        """As `submit`, for work that raises nothing; then the thread calls the work's result."""
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError(f"{self._name}: the executor is shut down")
            self._num_pending += 1
            self._tasks.put(work)
            if len(self._workers) < min(self._num_pending, self.max_threads):
                worker = _Worker()
                self._workers.add(worker)
                threading.Thread(
                    target=self._serve, args=(worker,), name=self._name, daemon=True
                ).start()

    async def run(
        self,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Wait for the result of `work` in a thread, or its exception.

        A thread cannot be stopped: if the caller is cancelled, it goes on alone.
        """
        return await asyncio.wrap_future(self.submit(work, *args, **kwargs))

    @property
    def num_threads(self) -> int:
        """The threads that there are now."""
        return len(self._workers)

    @contextlib.contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        """Count a process among the threads that `still_since` looks at, inside the context."""
        process = _Worker(~pid << 3 | _WHOLE_PROCESS, is_busy=True)
        self._processes.add(process)
        try:
            yield
        finally:
            self._processes.discard(process)

    def still_since(self) -> float | None:
        """Since when a thread waits inside one call, in seconds of the monotonic clock.

        A thread whose processor time stays the same waits for the kernel. One that lists a large
        folder or reads a large file makes progress, however long it takes. Call this regularly: the
        answer is as exact as the looks are frequent.

        Returns:
            The earliest such time of all threads; None if none has work.
        """
        now = time.monotonic()
        with self._lock:
            busy = [worker for worker in self._workers | self._processes if worker.is_busy]
            for worker in busy:
                cpu_ns = _processor_ns(worker.clock)
                if cpu_ns != worker.cpu_ns:
                    worker.cpu_ns, worker.still_since = cpu_ns, now
        return min((worker.still_since for worker in busy), default=None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further work, and let idle threads end; threads with work are never joined.

        Both arguments are without effect: work that waits is done, if the process lives on.
        """
        with self._lock:
            self._is_shut_down = True
            for _ in self._workers:
                self._tasks.put(None)

    def _serve(self, worker: _Worker) -> None:
        worker.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while task := self._next(worker):
                worker.is_busy = True
                tell = task()
                with self._lock:  # whoever is told may have more work for this thread
                    self._num_pending -= 1
                tell()
                del task, tell  # they hold the arguments
                worker.is_busy = False
        finally:  # nothing may look at an ended thread
            with self._lock:
                self._workers.discard(worker)

    def _next(self, worker: _Worker) -> _Work | None:
        """Wait for work; None where the thread should end."""
        while True:
            try:
                return self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._num_pending < len(self._workers):
                        self._workers.discard(worker)
                        return None


def _processor_ns(clock: int) -> int:
    try:
        return time.clock_gettime_ns(clock)
    except OSError:  # the process has ended
        return -1


# For pure computation. With one for each core, small work would wait behind large.
_compute = DaemonThreads(len(os.sched_getaffinity(0)) + 4, "gyre-compute")


async def compute(
    work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Compute something in a thread. `work` must not touch any file: see `storage.mounts`."""
    return await _compute.run(work, *args, **kwargs)


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """Wait for the result of `work`, or its exception, in a thread that serves nothing else.

    `work` may wait for ever. If the caller is cancelled, the thread goes on alone.
    """
    threads = DaemonThreads(1, name)
    try:
        return await threads.run(work)
    finally:
        threads.shutdown()


class LoopThreads:
    """Threads that read for an event loop, which takes all results that there are at a time.

    A future, a task and a wake-up of the loop for each read would cost a third more processor time.
    """

    def __init__(self, threads: DaemonThreads, *, counts_cancelled: bool = False) -> None:
        """Read nothing yet; cancelled reads may count until their thread returns."""
        self._threads = threads
        self._counts_cancelled = counts_cancelled
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[ThreadRequest[Any], Any]] = deque()
        self._is_told = False

    def send(
        self, read: Callable[[], Result], on_result: Callable[[Result], None]
    ) -> "ThreadRequest[Result]":
        """Have a thread call `read`, which raises nothing; the loop calls `on_result` later."""
        request = ThreadRequest(on_result, counts_cancelled=self._counts_cancelled)

        def run() -> Callable[[], None]:
            self._arrived.append((request, None if request.is_cancelled else read()))
            return self._tell

        self._threads.start(run)
        return request

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_told = False  # before the last look: what arrives from now on tells again
        while self._arrived:
            request, result = self._arrived.popleft()
            request.end(result)


class ThreadRequest(Generic[Result]):
    """A read in a thread; see `SentRequest`. A thread cannot be stopped once it has begun."""

    first_byte_at = None

    def __init__(self, on_result: Callable[[Result], None], *, counts_cancelled: bool) -> None:
        self._on_result: Callable[[Result], None] | None = on_result
        self._keeps_turn = counts_cancelled  # until its thread has returned
        self._free: Callable[[], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing waits for it any more."""
        return self._on_result is None

    def cancel(self) -> None:
        """Drop the read; its `on_result` is not called."""
        self._on_result = None

    def when_free(self, free: Callable[[], None]) -> None:
        """Have `free` called once the read counts no more: see `LoopThreads`."""
        if self._keeps_turn:
            self._free = free
        else:
            free()

    def end(self, result: Result | None) -> None:
        """The thread has returned; None where it did not read."""
        self._keeps_turn = False
        if self._free:
            self._free()
        on_result, self._on_result = self._on_result, None  # it refers to this: a cycle
        if on_result and result is not None:
            on_result(result)


# Users and flows that do not wait are remembered only for their virtual time. Beyond this many,
# those that wait for nothing and owe nothing are dropped; a larger bound only makes that rarer.
_MAX_IDLE_QUEUES = 64
# A thread that copies is faster than this. One that waits for a disk is not, and its job pays for
# the time: it would otherwise keep more of the threads than jobs that copy the same bytes.
_BYTES_PER_S = 1 << 30


class Flow(Struct, eq=False, weakref=True):
    """One job's claim on shared resources.

    Attributes:
        name: of the job.
        user: whose job it is: the name of a principal.
        weight: its share relative to other flows of its user, above 0. It may be changed at any
            time and counts from the next turn.
        user_weight: the same for its turns relative to other users.
    """

    name: str
    user: str = ""
    weight: float = 1.0
    user_weight: float = 1.0


NO_JOB = Flow("")  # for the daemon's own work, such as indexes and probes

_Ask = Callable[[Flow, int], None]


class Claims:
    """Who needs one thing, and how urgently; others may come to need it while it is waited for.

    It is done at the first turn of any of them: the one that asked first may have a smaller share,
    or may not need the thing for long.
    """

    __slots__ = ("_asking", "_urgency")

    def __init__(self, flow: Flow, urgency: int) -> None:
        """One job needs it, with an urgency as for `FairQueue.ask`."""
        self._urgency = {flow: urgency}
        self._asking: list[_Ask] = []

    @property
    def first(self) -> tuple[Flow, int]:
        """The job that asked first, and how urgently it needs the thing by now."""
        return next(iter(self._urgency.items()))

    def join(self, flow: Flow, urgency: int) -> None:
        """A job needs it, too, or needs it more urgently than before."""
        if flow in self._urgency and self._urgency[flow] <= urgency:
            return
        self._urgency[flow] = urgency
        for ask in list(self._asking):
            ask(flow, urgency)

    @contextlib.contextmanager
    def told(self, ask: _Ask) -> Iterator[None]:
        """Tell of all who need it, and of those who come to need it inside the context."""
        for flow, urgency in self._urgency.items():
            ask(flow, urgency)
        self._asking.append(ask)
        try:
            yield
        finally:
            self._asking.remove(ask)


class Turn:
    """A turn that was asked for and may not have come yet."""

    __slots__ = ("granted",)

    def __init__(self, granted: Callable[[], None]) -> None:
        self.granted: Callable[[], None] | None = granted

    def cancel(self) -> None:
        """Ask for it no longer; without effect once it was granted."""
        self.granted = None


class _FlowQueue(Struct):
    """The waiting turns of one flow: a heap of (urgency, arrival, cost, turn)."""

    virtual_time: float  # among the flows of its user
    waiting: list[tuple[int, int, float, Turn]] = field(default_factory=list)


class _UserQueue(Struct):
    """The waiting turns of one user's flows."""

    virtual_time: float  # among the users
    now: float = 0.0  # virtual, for its flows
    num_waiting: int = 0
    flows: dict[Flow, _FlowQueue] = field(default_factory=dict)


class FairQueue:
    """Grants turns fairly to users, and to the flows of each. Used from one event loop."""

    def __init__(self, capacity: int) -> None:
        """Nobody has a turn; at most `capacity` turns may be taken at once."""
        self._capacity = capacity
        self.num_taken = 0
        self._now = 0.0  # virtual
        self._users: dict[str, _UserQueue] = {}
        self._arrivals = itertools.count()
        self.num_waiting = 0
        self._is_serving = False

    def resize(self, capacity: int) -> None:
        """Change how many turns may be taken at once; taken ones stay taken."""
        self._capacity = capacity
        self._serve()

    def ask(
        self, flow: Flow, cost: float, urgency: int, granted: Callable[[], None]
    ) -> Turn | None:
        """Ask for a turn without waiting for it.

        Args:
            flow: the job that asks.
            cost: of the turn's work, in a unit that all callers of the queue share.
            urgency: within the flow, the lowest goes first.
            granted: called once, when the turn is granted, by the call that made room. It may ask
                and release, and must not raise.

        Returns:
            None where the turn was granted at once; then `granted` is not called. Otherwise the
            turn, so that it can be cancelled.
        """
        user = self._users.get(flow.user) or self._new_user(flow.user)
        queue = user.flows.get(flow) or _new_flow(user, flow)
        if self.num_taken < self._capacity and not self.num_waiting:
            self._charge(user, flow, cost)
            return None
        if not user.num_waiting:
            user.virtual_time = max(user.virtual_time, self._now)
        if not queue.waiting:
            queue.virtual_time = max(queue.virtual_time, user.now)
        turn = Turn(granted)
        heapq.heappush(queue.waiting, (urgency, next(self._arrivals), cost, turn))
        user.num_waiting += 1
        self.num_waiting += 1
        if self.num_taken < self._capacity:
            self._serve()  # all that waited before may have cancelled
        return turn

    def charge(self, flow: Flow, cost: float) -> None:
        """Charge a job for more than its turn was said to cost."""
        user = self._users.get(flow.user)
        queue = user and user.flows.get(flow)
        if user and queue:
            user.virtual_time += cost / flow.user_weight
            queue.virtual_time += cost / flow.weight

    def release(self) -> None:
        """Give a turn back."""
        self.num_taken -= 1
        if self.num_waiting:
            self._serve()

    async def acquire(self, claims: Claims, cost: float) -> None:
        """Wait for the first turn granted to one of the jobs; `release` gives it back."""
        if self.num_taken < self._capacity and not self.num_waiting:
            self.ask(claims.first[0], cost, 0, _nothing)  # which grants it at once
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turns: list[Turn] = []

        def grant() -> None:
            if granted.done():
                self.release()
            else:
                granted.set_result(None)

        def ask(flow: Flow, urgency: int) -> None:
            if not granted.done():
                turn = self.ask(flow, cost, urgency, grant)
                if turn is None:
                    granted.set_result(None)
                else:
                    turns.append(turn)

        try:
            with claims.told(ask):
                await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.release()
            raise
        finally:
            for turn in turns:
                turn.cancel()

    @contextlib.asynccontextmanager
    async def turn_of(self, claims: Claims, cost: float) -> AsyncIterator[None]:
        """Hold inside the block the first turn granted to one of the jobs."""
        await self.acquire(claims, cost)
        try:
            yield
        finally:
            self.release()

    def _new_user(self, name: str) -> _UserQueue:
        if len(self._users) >= _MAX_IDLE_QUEUES:
            self._users = {
                other: user
                for other, user in self._users.items()
                if user.num_waiting or user.virtual_time > self._now
            }
        user = self._users[name] = _UserQueue(self._now)
        return user

    def _charge(self, user: _UserQueue, flow: Flow, cost: float) -> None:
        queue = user.flows[flow]
        self._now = max(self._now, user.virtual_time)
        user.virtual_time = self._now + cost / flow.user_weight
        user.now = max(user.now, queue.virtual_time)
        queue.virtual_time = user.now + cost / flow.weight
        self.num_taken += 1

    def _serve(self) -> None:
        if self._is_serving:  # a `granted` released or asked: the loop below goes on
            return
        self._is_serving = True
        try:
            while self.num_waiting and self.num_taken < self._capacity:
                user, flow = self._next()
                _, _, cost, turn = heapq.heappop(user.flows[flow].waiting)
                user.num_waiting -= 1
                self.num_waiting -= 1
                if granted := turn.granted:
                    self._charge(user, flow, cost)
                    granted()
        finally:
            self._is_serving = False

    def _next(self) -> tuple[_UserQueue, Flow]:
        """The waiting user with the lowest virtual time, and its waiting flow with the lowest."""
        users = (user for user in self._users.values() if user.num_waiting)
        user = min(users, key=lambda user: user.virtual_time)
        flows = (flow for flow, queue in user.flows.items() if queue.waiting)
        return user, min(flows, key=lambda flow: user.flows[flow].virtual_time)


def _new_flow(user: _UserQueue, flow: Flow) -> _FlowQueue:
    if len(user.flows) >= _MAX_IDLE_QUEUES:
        user.flows = {
            other: queue
            for other, queue in user.flows.items()
            if queue.waiting or queue.virtual_time > user.now
        }
    queue = user.flows[flow] = _FlowQueue(user.now)
    return queue


class FairExecutor:
    """Threads that jobs share fairly: by bytes, and by the time that these take if it is long."""

    def __init__(self, executor: Executor, num_threads: int) -> None:
        """Share the threads of an executor, whose owner shuts it down."""
        self.executor = executor
        self.num_threads = num_threads
        self._queue = FairQueue(num_threads)

    @property
    def is_idle(self) -> bool:
        """Whether no thread has work."""
        return self._queue.num_taken == 0

    async def run(
        self, flow: Flow, cost: float, urgency: int, work: Callable[[], Result]
    ) -> Result:
        """Do computation or blocking I/O in a thread, when it is the flow's turn.

        A thread cannot be stopped: if the caller is cancelled, the turn lasts until the work ends.
        Costs are bytes; work that takes longer than a copy of these is charged by its time.

        Returns:
            The work's result; its exceptions are raised.
        """
        return await self.run_of(Claims(flow, urgency), cost, work)

    async def run_of(self, claims: Claims, cost: float, work: Callable[[], Result]) -> Result:
        """The same, at the first turn of one of several jobs."""
        await self._queue.acquire(claims, cost)
        return await self._start(claims.first[0], cost, work)

    def _start(self, flow: Flow, cost: float, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Start work whose turn ends with it, even if the returned future is cancelled.

        `asyncio.shield` around `loop.run_in_executor` would need two more futures for each call.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        try:
            running = self.executor.submit(work)
        except BaseException:
            self._queue.release()
            raise
        bill = flow, cost, time.monotonic()
        running.add_done_callback(partial(self._in_thread_ended, result, bill))
        return result

    def _in_thread_ended(
        self,
        result: asyncio.Future[Result],
        bill: tuple[Flow, float, float],
        running: Future[Result],
    ) -> None:
        loop, (flow, cost, began_s) = result.get_loop(), bill
        excess = (time.monotonic() - began_s) * _BYTES_PER_S - cost
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._set_result, result, running, flow, excess)

    def _set_result(
        self, result: asyncio.Future[Result], running: Future[Result], flow: Flow, excess: float
    ) -> None:
        if excess > 0:
            self._queue.charge(flow, excess)
        self._queue.release()
        if result.cancelled():
            return
        if running.cancelled():
            result.cancel()
        elif error := running.exception():
            if isinstance(error, StopIteration):  # asyncio refuses it; the caller would wait on
                error = RuntimeError("StopIteration").with_traceback(error.__traceback__)
            result.set_exception(error)
        else:
            result.set_result(running.result())


class Bucket:
    """Full at first, and refilled with time."""

    def __init__(self, capacity: float, per_s: float, now_s: float) -> None:
        """Fill it; `now_s` is of a clock that never goes back."""
        self._capacity = capacity
        self._per_s = per_s
        self._level = capacity
        self._since_s = now_s

    def take(self, now_s: float) -> bool:
        """Take one, if there is one."""
        self._fill(now_s)
        if self._level < 1:
            return False
        self._level -= 1
        return True

    def charge(self, now_s: float, num: float) -> float:
        """Take this many, whether they are there or not; the seconds until none is owed."""
        self._fill(now_s)
        self._level -= num
        return max(0.0, -self._level / self._per_s)

    @property
    def wait_s(self) -> float:
        """How long until there is one, as of the last `take`."""
        return max(0.0, (1 - self._level) / self._per_s)

    def _fill(self, now_s: float) -> None:
        gained = (now_s - self._since_s) * self._per_s
        self._level = min(self._capacity, self._level + gained)
        self._since_s = now_s
