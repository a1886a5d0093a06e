"""The node cache's changes to its folder: opens mirrors, writes blocks, frees their space."""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine

from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import NO_JOB, FairExecutor
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.disk import DiskCache
from gyre_daemon.storage.cache.mirror import Mirror
from gyre_daemon.storage.cache.placement import Key, Placement
from gyre_daemon.storage.cache.volume import Volume

_PAUSE_S = 10.0  # without writes after a disk has failed


class DiskWriter:
    """Changes a folder in threads, one task for each block. Used from one event loop."""

    def __init__(
        self,
        disk: DiskCache,
        placement: Placement,
        workers: FairExecutor,
        counts: CacheCounts,
        clock: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        """Write nothing yet.

        Args:
            disk: the folder; closed with this object.
            placement: decides which blocks are written, and is told which were.
            workers: the threads.
            counts: of failures.
            clock: in seconds, for pauses after errors.
            changed: called when a block has been written, so that its memory may be freed.
        """
        self._disk = disk
        self._placement = placement
        self._workers = workers
        self._counts = counts
        self._clock = clock
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropping: set[Key] = set()
        self._pauses_until = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether something is being written or removed."""
        return bool(self._tasks)

    async def open_mirror(self, identity: str, blocks: BlockMap) -> Mirror | None:
        """A dataset's blocks, as an earlier daemon left them; None where the folder fails."""
        mirror = None
        try:
            opening = functools.partial(self._disk.open_mirror, identity, blocks)
            mirror = await self._workers.run(NO_JOB, 0, 0, opening)
        except OSError as error:
            self._pause(error)
        self._placement.on_disk.limit_bytes = self._disk.free_bytes
        return mirror

    def adopt(self, volume: Volume, mirror: Mirror) -> None:
        """Count the blocks that a volume's mirror has, and begin to remove those without room."""
        surplus = self._placement.adopt(volume, mirror.blocks())
        self._begin(self._change([(volume, block) for block in surplus], None))

    def store(self, volume: Volume, block: int) -> None:
        """Begin to write a block that is in memory, if it is admitted on disk."""
        is_paused = self._clock() < self._pauses_until
        if volume.mirror is None or (volume, block) in self._dropping or is_paused:
            return
        victims = self._placement.take_disk(volume, block)
        if victims is not None:
            volume.num_pins[block] += 1
            self._begin(self._change(victims, (volume, block)))
        elif self._disk.unopened:
            self._begin(self._remove_unopened())

    async def close(self) -> None:
        """Stop writing, and release the folder."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._disk.close()

    async def _change(self, gone: list[Key], new: Key | None) -> None:
        """Free the space of some blocks, then write one."""

        def work() -> None:
            for volume, block in gone:
                assert volume.mirror
                volume.mirror.drop([block])
            if new:
                assert new[0].mirror
                new[0].mirror.write(new[1], new[0].data(new[1]))

        self._dropping.update(gone)
        is_whole = False
        try:
            await self._workers.run(NO_JOB, int(new[0].sizes[new[1]]) if new else 0, 0, work)
            is_whole = True
        except OSError as error:
            self._pause(error)
        finally:
            self._dropping.difference_update(gone)
            if new:
                new[0].num_pins[new[1]] -= 1
                self._placement.written(*new, is_whole=is_whole)
            self._changed()
        if new and is_whole:
            self._resume()

    async def _remove_unopened(self) -> None:
        """Remove blocks of a dataset that this daemon has not opened."""
        try:
            await self._workers.run(NO_JOB, 0, 0, self._disk.remove_oldest)
        except OSError as error:
            self._pause(error)
        self._placement.on_disk.limit_bytes = self._disk.free_bytes

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="store block")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pause(self, error: OSError) -> None:
        """Write nothing for a while; blocks on disk are still read."""
        self._counts.num_disk_failures += 1
        self._counts.is_disk_failing = True
        if not self._pauses_until:
            facts = {"reason": error.strerror or repr(error), "again_in_s": _PAUSE_S}
            log_event("cache disk fails", facts, logging.WARNING)
        self._pauses_until = self._clock() + _PAUSE_S

    def _resume(self) -> None:
        if self._pauses_until and self._clock() >= self._pauses_until:
            self._pauses_until = 0.0
            self._counts.is_disk_failing = False
            log_event("cache disk works again")
