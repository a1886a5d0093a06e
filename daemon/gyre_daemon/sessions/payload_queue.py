"""Payloads that a session sends through gRPC."""

import asyncio
from collections import deque

from gyre_daemon.fetching.batch_group import BatchGroup
from gyre_daemon.memory.arena import Arena


class PayloadQueue:
    """The payloads of one session in their order.

    Each holds a lease of its arena until it was sent, or until the queue is closed.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Arena, memoryview]] = deque()
        self._sending: tuple[Arena, memoryview] | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(self, group: BatchGroup) -> None:
        """Append the payload of each batch; none where the memory has been given back."""
        arena = group.slot.arena
        for payload in group.payloads:
            if arena.acquire():
                self._waiting.append((arena, payload))
        self._changed.set()

    async def next(self) -> int:
        """The last payload was sent; wait for the next one.

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
        """At most `num_bytes` of the payload from `begin` on, to be copied at once.

        None after `close`.
        """
        return self._sending[1][begin : begin + num_bytes] if self._sending else None

    def close(self) -> None:
        """Stop queueing payloads: the reader is gone."""
        self._is_closed = True
        self._sent()
        while self._waiting:
            self._waiting.popleft()[0].release()
        self._changed.set()

    def _sent(self) -> None:
        if self._sending:
            self._sending[0].release()
            self._sending = None
