"""Keeps progress for a slow client, so that work does not wait for it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from typing import TypeVar

from gyre_daemon.errors import Overloaded

_Progress = TypeVar("_Progress")

# How long a client may take messages after the work is done: this many seconds, and one more for
# each 10,000 messages. A client that reads needs a tenth of it. With no end, a client that stopped
# would keep the progress of each of its calls in memory.
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
