"""Knows the memory of all arenas of a daemon, and lets copy workers map them."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from gyre_daemon.memory.arena import Arena
from gyre_daemon.memory.file_watch import FileWatch
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import in_thread
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers

# Closed arenas keep their memory until their leases are returned and copy workers have unmapped
# them, for some 10 ms. A new arena waits for that room, but is made after this time all the same: a
# read that hangs keeps its lease, and other sessions must not wait for it.
_MAX_WAIT_FOR_ROOM_S = 2.0


class ArenaRegistry:
    """All arenas of a daemon that have memory, closed ones included.

    Attributes:
        num_bytes: size of those arenas.
        files: tells when an arena that clients were handed is gone.
    """

    def __init__(self, limit_bytes: int, copy_workers: CopyWorkers = NO_COPY_WORKERS) -> None:
        self.num_bytes = 0
        self.files = FileWatch()
        self._limit_bytes = limit_bytes
        self._copy_workers = copy_workers
        self._own: set[Arena] = set()  # those that this process or its copy workers map
        self._in_copy_workers: set[Arena] = set()
        self._unmapping: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def add(self, arena: Arena) -> None:
        """Count an arena until no process has its memory any more."""
        self.num_bytes += arena.num_bytes
        self._own.add(arena)
        loop = asyncio.get_running_loop()
        arena.when_unmapped(partial(_call_in, loop, partial(self._unmapped, arena)))

    def map_in_copy_workers(self, arena: Arena) -> None:
        """Have copy workers map an arena before it is sealed; waits until each is idle.

        Raises:
            ArenaClosed: the arena was closed meanwhile.
        """
        with arena.lease():
            self._in_copy_workers.add(arena)
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
        await self._wait_until(lambda: self.num_bytes + num_bytes <= self._limit_bytes)

    async def settle(self) -> None:
        """Wait until this process has given back all closed arenas, for some seconds at most.

        Then only arenas that clients keep count as abandoned.
        """
        await self._wait_until(lambda: not any(arena.is_closed for arena in self._own))

    async def _wait_until(self, holds: Callable[[], bool]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_FOR_ROOM_S):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()

    def _unmapped(self, arena: Arena) -> None:
        if arena not in self._in_copy_workers:
            self._given_back(arena)
            return
        self._in_copy_workers.remove(arena)
        task = asyncio.create_task(self._unmap(arena))
        self._unmapping.add(task)
        task.add_done_callback(self._unmapping.discard)

    async def _unmap(self, arena: Arena) -> None:
        await in_thread(partial(self._copy_workers.unmap, arena.key), "gyre-unmap")
        self._given_back(arena)

    def _given_back(self, arena: Arena) -> None:
        self.files.look()
        self._own.remove(arena)
        if arena.is_kept:
            arena.when_gone(partial(self._count_down, arena.num_bytes))
            self._changed.set()
        else:
            self._count_down(arena.num_bytes)

    def _count_down(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._changed.set()


def _call_in(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Call something on the event loop, from any thread, unless the daemon ends."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(act)
