"""Knows the memory of all arenas of a daemon, and lets copy workers map them."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from gyre_daemon.copy_workers import NO_COPY_WORKERS, CopyWorkers
from gyre_daemon.memory.arena import Arena
from gyre_daemon.runtime.events import log_event

# Closed arenas keep their memory until their leases are returned and copy workers have unmapped
# them, for some 10 ms. A new arena waits for that room, but is made after this time all the same: a
# read that hangs keeps its lease, and other sessions must not wait for it.
_MAX_WAIT_FOR_ROOM_S = 2.0


class ArenaRegistry:
    """All arenas of a daemon that have memory, closed ones with leases included.

    Attributes:
        num_bytes: size of those arenas.
    """

    def __init__(self, limit_bytes: int, copy_workers: CopyWorkers = NO_COPY_WORKERS) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._copy_workers = copy_workers
        self._in_copy_workers: set[int] = set()
        self._unmapping: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, arena: Arena) -> None:
        """Count an arena until its memory is given back and copy workers have unmapped it."""
        self.num_bytes += arena.num_bytes
        loop = asyncio.get_running_loop()
        arena.when_unmapped(
            partial(_call_in, loop, partial(self._gone, arena.key, arena.num_bytes))
        )

    def map_in_copy_workers(self, arena: Arena) -> None:
        """Have copy workers map an arena that is not sealed yet; waits until each is idle.

        Raises:
            ArenaClosed: the arena was closed meanwhile.
        """
        with arena.lease():
            self._in_copy_workers.add(arena.key)
            self._copy_workers.map(arena.key, arena.descriptor)

    async def room(self, num_bytes: int) -> None:
        """Wait until `num_bytes` more are within the limit, but no longer than some seconds.

        The budget has promised them, so they are about to be given back.
        """
        if self.num_bytes + num_bytes <= self._limit_bytes:
            return
        log_event(
            "memory not given back yet", {"mapped_bytes": self.num_bytes, "needed_bytes": num_bytes}
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_FOR_ROOM_S):
                while self.num_bytes + num_bytes > self._limit_bytes:
                    self._changed.clear()
                    await self._changed.wait()

    def _gone(self, key: int, num_bytes: int) -> None:
        if key not in self._in_copy_workers:
            self._count_down(num_bytes)
            return
        self._in_copy_workers.remove(key)
        task = asyncio.create_task(self._unmap(key, num_bytes))
        self._unmapping.add(task)
        task.add_done_callback(self._unmapping.discard)

    async def _unmap(self, key: int, num_bytes: int) -> None:
        await asyncio.to_thread(self._copy_workers.unmap, key)
        self._count_down(num_bytes)

    def _count_down(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._changed.set()


def _call_in(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Call something on the event loop, from any thread, unless the daemon ends."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act)
