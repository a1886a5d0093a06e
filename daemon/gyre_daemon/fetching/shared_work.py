"""Long work on the shards of a dataset: for all that wait for its result, and for slow clients."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Self, TypeVar

from msgspec import Struct, field

from gyre_daemon.errors import Overloaded

# Results in memory: of lengths 4, of columns up to 8 bytes for each sample. Others are read again,
# from their sidecars.
_MAX_KEPT = 8
# Work without a waiting caller that goes on, because a client whose call took too long will ask
# again. With no limit, a client that asks for one after the other and hangs up leaves hundreds.
_MAX_UNWANTED = 8

# How long a client may take messages after the work is done: this many seconds, and one more for
# each 10,000 messages. A client that reads needs a tenth of it. With no end, a client that stopped
# would keep the progress of each of its calls in memory.
_TAKEN_WITHIN_S, _MESSAGES_PER_S = 60.0, 10_000

_Progress = TypeVar("_Progress")
Result = TypeVar("Result")
Key = TypeVar("Key")


class SharedWork(Struct, Generic[Result]):
    """The state of such work. A caller that no longer waits does not stop it.

    Attributes:
        num_shards: of the dataset.
        num_done: shards that are done.
        num_reused: those of them whose results were stored before.
        shard: the name of the one done last.
        num_waiting: callers that wait for it.
        task: does it; None before `begin`.
        moved: is set with each shard that is done, and at the end.
    """

    num_shards: int
    num_done: int = 0
    num_reused: int = 0
    shard: str = ""
    num_waiting: int = 0
    task: "asyncio.Task[Result] | None" = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(
        self, work: Coroutine[Any, Any, Result], ended: Callable[[], None]
    ) -> "asyncio.Task[Result]":
        """Begin; `ended` is called as soon as it is over."""

        def over(_: "asyncio.Task[Result]") -> None:
            self.moved.set()
            ended()

        self.task = asyncio.create_task(work)
        self.task.add_done_callback(over)
        return self.task

    @property
    def is_over(self) -> bool:
        """Whether it has a result, has failed or was cancelled."""
        return bool(self.task and self.task.done())

    @property
    def has_failed(self) -> bool:
        """Whether it is over without a result."""
        task = self.task
        return bool(task and self.is_over and (task.cancelled() or task.exception()))

    def after(self, shard: str, *, was_kept: bool) -> None:
        """One more shard is done, whose result may have been stored before."""
        self.num_done += 1
        self.num_reused += was_kept
        self.shard = shard
        self.moved.set()

    async def states(self) -> AsyncIterator[Self]:
        """This, whenever it has moved; at last it is over. At most one more than shards are left.

        Raises:
            GyreError: as the work.
        """
        assert self.task
        over = False
        self.num_waiting += 1
        try:
            while not over:
                if not self.task.done():
                    self.moved.clear()
                    await self.moved.wait()
                over = self.task.done()
                if over:
                    self.task.result()
                yield self
        finally:
            self.num_waiting -= 1

    async def result(self) -> Result:
        """Wait for the result.

        Raises:
            GyreError: as the work.
        """
        assert self.task
        async for _ in self.states():
            pass
        return self.task.result()


Work = TypeVar("Work", bound=SharedWork[Any])


class WorkByKey(Generic[Key, Work]):
    """Work that is under way, and the last few results, by their subjects.

    If no one waits, the latest request goes on alone; shards that are done stay so.
    """

    def __init__(self) -> None:
        self._found: dict[Key, Work] = {}

    def begun(self, key: Key, begin: Callable[[], Work]) -> Work:
        """The work for a key, which begins if there is none."""
        work = self._found.pop(key, None)
        if work is None:
            work = begin()
            over = [each for each, its in self._found.items() if its.is_over]
            for each in over[: max(0, len(over) + 1 - _MAX_KEPT)]:
                del self._found[each]
            self._stop_unwanted()
        self._found[key] = work
        return work

    def _stop_unwanted(self) -> None:
        found = self._found.items()
        unwanted = [each for each, its in found if not its.is_over and not its.num_waiting]
        for each in unwanted[: max(0, len(unwanted) - _MAX_UNWANTED)]:
            if task := self._found.pop(each).task:
                task.cancel()

    @property
    def all(self) -> list[Work]:
        """All of it, under way or over."""
        return [*self._found.values()]

    def forget(self, key: Key, work: Work) -> None:
        """Keep this work no longer; whoever waits for it gets its result."""
        if self._found.get(key) is work:
            del self._found[key]

    def close(self) -> None:
        """Stop all of it; shards that are done stay so."""
        for work in self._found.values():
            if work.task:
                work.task.cancel()
        self._found.clear()


async def unheld(
    source: AsyncGenerator[_Progress, None], taken_within_s: float = _TAKEN_WITHIN_S
) -> AsyncGenerator[_Progress, None]:
    """Yield a source's items. The source goes on at its own pace, and is ended with this.

    So a source that holds a lock gives it back when its work is done, also where the client stops
    reading: then the call waits, and nobody else does.

    Args:
        source: owned by this.
        taken_within_s: how long the rest may wait once the source has ended.

    Raises:
        Overloaded: the client did not take it within that time.
        Exception: the source's own, behind all that it yielded.
    """
    waiting: deque[_Progress] = deque()
    news, is_late = asyncio.Event(), False
    timers: list[asyncio.TimerHandle] = []

    async def run() -> None:
        async with contextlib.aclosing(source):
            async for progress in source:
                waiting.append(progress)
                news.set()

    def ended(_: asyncio.Task[None]) -> None:
        left_s = taken_within_s + len(waiting) / _MESSAGES_PER_S
        timers.append(asyncio.get_running_loop().call_later(left_s, drop))
        news.set()

    def drop() -> None:
        nonlocal is_late
        is_late = bool(waiting)
        waiting.clear()

    running = asyncio.create_task(run())
    running.add_done_callback(ended)
    try:
        while waiting or not running.done():
            if waiting:
                yield waiting.popleft()
            else:
                news.clear()
                await news.wait()
        if is_late:
            raise Overloaded(
                "the client did not read the progress of its call, which is over; call again"
            )
        await running
    finally:
        running.cancel()
        await asyncio.wait([running])
        for timer in timers:
            timer.cancel()
        if not running.cancelled():
            running.exception()  # who reads on got it
