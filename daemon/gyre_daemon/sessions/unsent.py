"""Payloads on their way through gRPC: each holds a lease of its arena until it was sent, or until nobody waits for it."""

import asyncio
from collections import deque

from gyre_daemon.fetching.fetch import Strip
from gyre_daemon.memory.arena import Arena


class Unsent:
    """The payloads of one session, in order, the one that is being sent among them."""

    def __init__(self) -> None:
        """There is none yet."""
        self._waiting: deque[tuple[Arena, memoryview]] = deque()
        self._sending: tuple[Arena, memoryview] | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, strip: Strip) -> None:
        """The payloads of batches whose memory is still there."""
        arena = strip.slot.arena
        for payload in strip.payloads:
            if arena.acquire():
                self._waiting.append((arena, payload))
        self._changed.set()

    async def next(self) -> int:
        """The payload before was sent; go on to the next one.

        Returns:
            Its length in bytes; 0 after `close`.
        """
        self._sent()
        while not self._waiting and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            return 0
        self._sending = self._waiting.popleft()
        return self._sending[1].nbytes

    def part(self, begin: int, num_bytes: int) -> memoryview | None:
        """So many bytes of it, or what is left, to be copied at once; None after `close`."""
        return self._sending[1][begin : begin + num_bytes] if self._sending else None

    def close(self) -> None:
        """Nobody waits for any."""
        self._is_closed = True
        self._sent()
        while self._waiting:
            self._waiting.popleft()[0].release()
        self._changed.set()

    def _sent(self) -> None:
        if self._sending:
            self._sending[0].release()
            self._sending = None
