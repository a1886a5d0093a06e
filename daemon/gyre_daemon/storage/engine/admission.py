"""Admits reads one after another, so that the request queue stays short."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from gyre_daemon.errors import GyreError
from gyre_daemon.runtime.threads import Claims, FairQueue, Flow


class AdmissionQueue:
    """Admits a read when few requests wait for their turn.

    Queueing more requests would only cost time that those in flight need.
    """

    def __init__(
        self,
        has_room: Callable[[], bool],
        left_s: Callable[[float], float],
        error: Callable[[], GyreError],
    ) -> None:
        """Nothing waits.

        Args:
            has_room: whether few requests wait for their turn.
            left_s: how many seconds a read that was asked for at a given time may still wait.
            error: raised when that time is over.
        """
        self._has_room = has_room
        self._left_s = left_s
        self._error = error
        self._line = FairQueue(1)
        self._room = asyncio.Event()
        self._is_awaited = False
        self._admitted: Counter[tuple[Flow, int]] = Counter()

    @contextlib.asynccontextmanager
    async def admitted(self, claims: Claims, asked_at: float) -> AsyncIterator[None]:
        """Wait until a read is admitted; it stays so inside the context.

        Args:
            claims: the jobs that need it; jobs are admitted fairly, and among a job's reads the
                most urgent is admitted first.
            asked_at: when the read was asked for.

        Raises:
            GyreError: from `error`; its time was over before there was room.
        """
        async with self._line.turn_of(claims, 1):
            await self._wait_for_room(asked_at)
        flow, urgency = claims.first
        self._admitted[flow, urgency] += 1
        try:
            yield
        finally:
            self._admitted[flow, urgency] -= 1
            if not self._admitted[flow, urgency]:
                del self._admitted[flow, urgency]

    def needed_first(self) -> dict[Flow, int]:
        """The lowest urgency of each job with admitted reads."""
        first: dict[Flow, int] = {}
        for flow, urgency in self._admitted:
            first[flow] = min(urgency, first.get(flow, urgency))
        return first

    def look_again(self) -> None:
        """There may be room."""
        if self._is_awaited and self._has_room():
            self._room.set()

    async def _wait_for_room(self, asked_at: float) -> None:
        self._is_awaited = True
        try:
            while not self._has_room():
                self._room.clear()
                try:
                    async with asyncio.timeout(self._left_s(asked_at)):
                        await self._room.wait()
                except TimeoutError:
                    if self._left_s(asked_at) <= 0:  # it grows whenever a response arrives
                        raise self._error() from None
        finally:
            self._is_awaited = False
