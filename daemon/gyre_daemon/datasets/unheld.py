"""Keeps progress for a slow client, so that work does not wait for it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import Generic, TypeVar

from gyre_daemon.errors import Overloaded

_Progress = TypeVar("_Progress")

# What a client may take of after the work is done: this many seconds, and one more for each so many
# messages. A client that reads needs a tenth of it. With no end, a client that stopped would keep
# the progress of each of its calls in memory.
_TAKEN_WITHIN_S, _MESSAGES_PER_S = 60.0, 10_000


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
    untold = _Untold(source, taken_within_s)
    try:
        while True:
            while untold.waiting:
                yield untold.waiting.popleft()
            if untold.is_late:
                raise Overloaded(
                    "the client did not read the progress of its call, which is over; call again"
                )
            if untold.running.done():
                await untold.running
                return
            await untold.news()
    finally:
        await untold.end()


class _Untold(Generic[_Progress]):
    """The items of a source that the client was not told.

    Attributes:
        waiting: in its order.
        is_late: whether some of it was dropped.
        running: ends with the source.
    """

    def __init__(self, source: AsyncGenerator[_Progress, None], taken_within_s: float) -> None:
        self.waiting: deque[_Progress] = deque()
        self.is_late = False
        self._source, self._taken_within_s = source, taken_within_s
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.running = asyncio.create_task(self._run())
        self.running.add_done_callback(self._has_ended)

    async def news(self) -> None:
        """Wait until the source yields or ends."""
        self._news.clear()
        await self._news.wait()

    async def end(self) -> None:
        """End the source, if it has not ended."""
        self.running.cancel()
        await asyncio.wait([self.running])
        if self._timer:
            self._timer.cancel()
        if not self.running.cancelled():
            self.running.exception()  # who reads on got it

    async def _run(self) -> None:
        async with contextlib.aclosing(self._source) as source:
            async for progress in source:
                self.waiting.append(progress)
                self._news.set()

    def _has_ended(self, _: asyncio.Task[None]) -> None:
        left_s = self._taken_within_s + len(self.waiting) / _MESSAGES_PER_S
        self._timer = asyncio.get_running_loop().call_later(left_s, self._drop)
        self._news.set()

    def _drop(self) -> None:
        self.is_late = bool(self.waiting)
        self.waiting.clear()
