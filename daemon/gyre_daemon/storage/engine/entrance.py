"""Where readers wait before their requests wait for a turn, and what each job needs first of what was let in."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from gyre_daemon.runtime.fair import FairQueue, Flow


class Entrance:
    """Lets one read in after another, while few requests wait for their turn: more would only take time from those sent."""

    def __init__(self, is_roomy: Callable[[], bool], left_s: Callable[[float], float]) -> None:
        """Nobody waits.

        Args:
            is_roomy: whether few requests wait for their turn.
            left_s: how long who came at some time may still wait.
        """
        self._is_roomy = is_roomy
        self._left_s = left_s
        self._line = FairQueue(1)
        self._has_room = asyncio.Event()
        self._is_awaited = False
        self._inside: Counter[tuple[Flow, int]] = Counter()

    @contextlib.asynccontextmanager
    async def reading(self, flow: Flow, urgency: int, since: float) -> AsyncIterator[None]:
        """Be inside.

        Args:
            flow: the job; the jobs come in fairly.
            urgency: among the job's reads the lowest comes in first.
            since: when the read was asked for.

        Raises:
            TimeoutError: the time was over before there was room.
        """
        await self._enter(flow, urgency, since)
        self._inside[flow, urgency] += 1
        try:
            yield
        finally:
            self._inside[flow, urgency] -= 1
            if not self._inside[flow, urgency]:
                del self._inside[flow, urgency]

    def needed_first(self) -> dict[Flow, int]:
        """Of each job that is inside the lowest urgency."""
        first: dict[Flow, int] = {}
        for flow, urgency in self._inside:
            first[flow] = min(urgency, first.get(flow, urgency))
        return first

    def look_again(self) -> None:
        """There may be room."""
        if self._is_awaited and self._is_roomy():
            self._has_room.set()

    async def _enter(self, flow: Flow, urgency: int, since: float) -> None:
        async with self._line.turn(flow, 1, urgency):
            self._is_awaited = True
            try:
                while not self._is_roomy():
                    self._has_room.clear()
                    await self._wait(since)
            finally:
                self._is_awaited = False

    async def _wait(self, since: float) -> None:
        left_s = self._left_s(since)
        try:
            async with asyncio.timeout(left_s):
                await self._has_room.wait()
        except TimeoutError:
            if self._left_s(since) <= 0:  # it grows while answers come
                raise
