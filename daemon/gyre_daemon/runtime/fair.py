"""Weighted fair sharing: what is scarce (threads, requests to an endpoint) goes to the job that had the least of it so far.

Each job is a flow. A flow that waits is served when its virtual time, the cost it was served divided by its weight, is the
lowest (stride scheduling, Waldspurger and Weihl 1995). One that was idle starts at the present virtual time: it has saved
nothing up. Within a flow the most urgent goes first, and among equals the oldest.
"""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

_MAX_IDLE_LANES = 64

Result = TypeVar("Result")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Flow:
    """One job's claim on what is shared.

    Attributes:
        name: of the job.
        weight: its share relative to others, above 0; what it is changed to counts from the next turn on.
    """

    name: str
    weight: float = 1.0


NO_JOB = Flow("")  # what the daemon does for itself: indexes, probes


class Turn:
    """Somebody's place in the line."""

    __slots__ = ("granted",)

    def __init__(self, granted: Callable[[], None]) -> None:
        self.granted: Callable[[], None] | None = granted

    def cancel(self) -> None:
        """Give it up; what comes too late once the turn was granted."""
        self.granted = None


@dataclass(slots=True)
class _Lane:
    """A flow in one queue; `waiting` is a heap of (urgency, arrival, cost, turn)."""

    virtual_time: float
    waiting: list[tuple[int, int, float, Turn]] = field(default_factory=list)


class FairQueue:
    """So many turns at once, handed out fairly. Used from one event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_taken = 0
        self._now = 0.0  # virtual
        self._lanes: dict[Flow, _Lane] = {}
        self._arrivals = itertools.count()
        self._num_waiting = 0
        self._is_serving = False

    @property
    def num_taken(self) -> int:
        """Turns that are taken now."""
        return self._num_taken

    @property
    def num_waiting(self) -> int:
        """Those who wait for one."""
        return self._num_waiting

    def resize(self, capacity: int) -> None:
        """Change how many turns there are; those that are taken stay taken."""
        self._capacity = capacity
        self._serve()

    async def acquire(self, flow: Flow, cost: float, urgency: int = 0) -> None:
        """Wait for a turn; `release` gives it back.

        Args:
            flow: who asks.
            cost: what the turn will take, in any unit that is the same for all.
            urgency: within the flow the lowest goes first.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def grant() -> None:
            if granted.cancelled():
                self.release()
            else:
                granted.set_result(None)

        turn = self.ask(flow, cost, urgency, grant)
        if turn is None:
            return
        try:
            await granted
        except asyncio.CancelledError:
            turn.cancel()
            if not granted.cancelled():
                self.release()
            raise

    def ask(self, flow: Flow, cost: float, urgency: int, granted: Callable[[], None]) -> Turn | None:
        """Queue for a turn without waiting for it; see `acquire`.

        Args:
            flow: see `acquire`.
            cost: see there.
            urgency: see there.
            granted: called once, when the turn has come, from whatever made room; it may ask and release, and raises nothing.

        Returns:
            None: it has its turn now, and `granted` is not called. Otherwise its place in the line, to give it up.
        """
        lane = self._lane(flow)
        if self._num_taken < self._capacity and not self._num_waiting:
            self._charge(flow, lane, cost)
            return None
        if not lane.waiting:
            lane.virtual_time = max(lane.virtual_time, self._now)
        turn = Turn(granted)
        heapq.heappush(lane.waiting, (urgency, next(self._arrivals), cost, turn))
        self._num_waiting += 1
        if self._num_taken < self._capacity:
            self._serve()  # those before it may have given up
        return turn

    def release(self) -> None:
        """Give a turn back."""
        self._num_taken -= 1
        if self._num_waiting:
            self._serve()

    @contextlib.asynccontextmanager
    async def turn(self, flow: Flow, cost: float, urgency: int = 0) -> AsyncIterator[None]:
        """Have a turn inside; see `acquire`."""
        await self.acquire(flow, cost, urgency)
        try:
            yield
        finally:
            self.release()

    def _lane(self, flow: Flow) -> _Lane:
        lane = self._lanes.get(flow)
        if lane is None:
            if len(self._lanes) >= _MAX_IDLE_LANES:
                kept = {one: lane for one, lane in self._lanes.items() if lane.waiting or lane.virtual_time > self._now}
                self._lanes = kept
            lane = self._lanes[flow] = _Lane(self._now)
        return lane

    def _charge(self, flow: Flow, lane: _Lane, cost: float) -> None:
        self._now = max(self._now, lane.virtual_time)
        lane.virtual_time = max(lane.virtual_time, self._now) + cost / flow.weight
        self._num_taken += 1

    def _serve(self) -> None:
        if self._is_serving:  # by whom this was called
            return
        self._is_serving = True
        try:
            while self._num_waiting and self._num_taken < self._capacity:
                flow, lane = self._next_lane()
                _, _, cost, turn = heapq.heappop(lane.waiting)
                self._num_waiting -= 1
                if granted := turn.granted:
                    self._charge(flow, lane, cost)
                    granted()
        finally:
            self._is_serving = False

    def _next_lane(self) -> tuple[Flow, _Lane]:
        """Of those who wait, the one that had the least."""
        waiting = [each for each in self._lanes.items() if each[1].waiting]
        return waiting[0] if len(waiting) == 1 else min(waiting, key=lambda each: each[1].virtual_time)


class FairExecutor:
    """Threads that jobs share fairly."""

    def __init__(self, executor: Executor, num_threads: int) -> None:
        self.executor = executor
        self.num_threads = num_threads
        self._queue = FairQueue(num_threads)

    @property
    def is_idle(self) -> bool:
        """No thread has anything to do."""
        return self._queue.num_taken == 0

    async def run(self, flow: Flow, cost: float, urgency: int, work: Callable[[], Result]) -> Result:
        """Do computation or blocking I/O in a thread, when it is the flow's turn.

        A thread cannot be stopped: where the caller is cancelled, the turn ends with the work and not before.
        """
        await self._queue.acquire(flow, cost, urgency)
        return await self._start(work)

    def _start(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """The work runs in a thread. Its turn ends with it, whatever becomes of the future that tells what came of it.

        `loop.run_in_executor` and a shield around what it gives would do the same by way of two futures more.
        """
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        try:
            running = self.executor.submit(work)
        except BaseException:
            self._queue.release()
            raise
        running.add_done_callback(partial(self._ended, result))
        return result

    def _ended(self, result: asyncio.Future[Result], running: Future[Result]) -> None:
        """In the thread."""
        loop = result.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._tell, result, running)

    def _tell(self, result: asyncio.Future[Result], running: Future[Result]) -> None:
        self._queue.release()
        if result.cancelled():
            return
        if running.cancelled():
            result.cancel()
        elif error := running.exception():
            result.set_exception(error)
        else:
            result.set_result(running.result())
