"""What all arenas of a daemon have in memory."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from gyre_daemon.copiers import NO_COPIERS, Copiers
from gyre_daemon.memory.arena import Arena
from gyre_daemon.runtime.events import log_event

_LINGER_S = 2.0


class Mapped:
    """The memory of all arenas, from when each is made until the last lease of it has been returned.

    Attributes:
        num_bytes: of those arenas.
    """

    def __init__(self, limit_bytes: int, copiers: Copiers = NO_COPIERS) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._copiers = copiers
        self._shared: set[int] = set()
        self._unmapping: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, arena: Arena) -> None:
        """One more, until it is given back."""
        self.num_bytes += arena.num_bytes
        loop = asyncio.get_running_loop()
        arena.when_unmapped(partial(_tell, loop, partial(self._gone, arena.key, arena.num_bytes)))

    def share(self, arena: Arena) -> None:
        """Let copiers have it, before it is sealed; waits for them.

        Raises:
            ArenaClosed: nobody needs it any more.
        """
        with arena.lease():
            self._shared.add(arena.key)
            self._copiers.map(arena.key, arena.descriptor, arena.num_bytes)

    async def room(self, num_bytes: int) -> None:
        """Wait until so much more is within the limit, which the budget has promised; but not for ever."""
        if self.num_bytes + num_bytes <= self._limit_bytes:
            return
        log_event("memory not given back yet", {"mapped_bytes": self.num_bytes, "needed_bytes": num_bytes})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while self.num_bytes + num_bytes > self._limit_bytes:
                    self._changed.clear()
                    await self._changed.wait()

    def _gone(self, key: int, num_bytes: int) -> None:
        if key not in self._shared:
            self._count_down(num_bytes)
            return
        self._shared.remove(key)
        task = asyncio.create_task(self._unmap(key, num_bytes))
        self._unmapping.add(task)
        task.add_done_callback(self._unmapping.discard)

    async def _unmap(self, key: int, num_bytes: int) -> None:
        await asyncio.to_thread(self._copiers.unmap, key)
        self._count_down(num_bytes)

    def _count_down(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._changed.set()


def _tell(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """The last lease is returned in any thread, and at the daemon's end when the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act)
