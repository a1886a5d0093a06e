"""The node cache: raw blocks of remote shards for all jobs of a daemon, in memory and on disk.

The life of a block: a job misses it; it is fetched whole, with one range request, into memory that was reserved for it; those
who want it meanwhile wait for the same request; its samples are copied out of it; it is written to disk, and from then on its
memory is the first to go. What may stay is decided by next use (`tiers`, `eviction`). A read whose block cannot be taken in
goes to the storage itself, so nobody waits for room in the cache, except a job that asks for whole blocks.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.fair import NO_JOB, FairExecutor, FairQueue, Flow
from gyre_daemon.storage.base import Reads, Storage
from gyre_daemon.storage.cache.blocks import BlockMap, Integers
from gyre_daemon.storage.cache.disk import DiskCache
from gyre_daemon.storage.cache.tiers import Key, Need, Tiers
from gyre_daemon.storage.cache.volume import Place, Volume
from gyre_daemon.storage.delays import Delays
from gyre_daemon.storage.local.gather import gather, is_allowed, memory_at

_Result = TypeVar("_Result")

_MAX_FETCHING_BYTES = 32 << 20
_INLINE_BYTES = 128 << 10  # copied at once: another thread would take longer
_DISK_PAUSE_S = 10.0
_AFTER_ALL_READS = 1 << 62  # urgency


class NodeCache:
    """All blocks that a daemon holds. Used from one event loop."""

    def __init__(
        self,
        memory_bytes: int,
        disk: DiskCache | None,
        workers: FairExecutor,
        counts: CacheCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._workers = workers
        self._counts = counts
        self._clock = clock
        self._tiers = Tiers(memory_bytes, disk.free_bytes if disk else 0, counts)
        self._max_fetching_bytes = min(_MAX_FETCHING_BYTES, memory_bytes)
        self._fetching: dict[Key, asyncio.Task[None]] = {}
        self._fetching_bytes = 0
        self._line = FairQueue(1)  # of those who wait for room
        self._freed = asyncio.Event()
        self._num_copying = 0
        self._background: set[asyncio.Task[None]] = set()
        self._dropping: set[Key] = set()
        self._disk_pauses_until = 0.0
        self._copies = is_allowed()

    async def open_volume(self, identity: str, storage: Storage, blocks: BlockMap, block_bytes: int) -> Volume:
        """The blocks of a dataset, with what an earlier daemon left of them on disk."""
        mirror = None
        if self._disk and blocks.offsets()[-1]:
            try:
                opening = functools.partial(self._disk.open_mirror, identity, blocks)
                mirror = await self._workers.run(NO_JOB, 0, 0, opening)
            except OSError as error:
                self._pause_disk(error)
            self._tiers.on_disk.limit_bytes = self._disk.free_bytes
        volume = Volume(storage, blocks, block_bytes, mirror)
        if mirror:
            surplus = self._tiers.adopt(volume, mirror.blocks())
            self._in_background(self._change_disk([(volume, block) for block in surplus], None))
        return volume

    async def read(self, volume: Volume, reads: Reads) -> None:
        """Do reads, from the cache where it has them or takes them in; see `Storage.read`."""
        blocks = volume.map.blocks_of(reads)
        volume.follow(reads)
        num_samples = 1 + np.count_nonzero(np.diff(reads.sample))
        self._tiers.note_reads(num_samples / max(1, volume.num_jobs))
        there = (blocks >= 0) & (volume.place[blocks] >= Place.MEMORY)
        on_disk = there & volume.on_disk[blocks]
        async with asyncio.TaskGroup() as group:
            self._begin_copies(group, volume, blocks, reads, np.flatnonzero(there & ~on_disk))
            past = [np.flatnonzero(blocks < 0)]
            missed = np.flatnonzero((blocks >= 0) & ~there)
            for block in np.unique(blocks[missed]).tolist():  # memory of what is on disk may go for them
                which = missed[blocks[missed] == block]
                arriving = self._arriving(volume, block, reads, len(which))
                if arriving:
                    copying = group.create_task(self._copy_after(arriving, volume, blocks[which], reads.part(which)))
                    self._pin(volume, blocks[which[:1]], copying)
                else:
                    past.append(which)
            self._begin_copies(group, volume, blocks, reads, np.flatnonzero(on_disk))
            beside = np.concatenate(past)
            if beside.size:
                group.create_task(self._read_past(volume, reads.part(beside)))

    def _begin_copies(self, group: asyncio.TaskGroup, volume: Volume, blocks: Integers, reads: Reads, there: Integers) -> None:
        """Copy out of blocks that are there, in a task for memory and one for disk; the blocks stay until it is done."""
        self._counts.num_hits += there.size
        for place in (Place.MEMORY, Place.DISK):
            which = there[volume.place[blocks[there]] == place]
            if which.size:
                copying = group.create_task(self._copy(place, volume, blocks[which], reads.part(which)))
                self._pin(volume, np.unique(blocks[which]), copying)

    def expect(self, volume: Volume, blocks: Integers, flow: Flow) -> None:
        """Begin to fetch blocks before they are read, in this order, as room comes."""
        for block in blocks[volume.place[blocks] == Place.ABSENT].tolist():
            if (volume, block) not in self._fetching:
                self._begin(volume, block, flow, _AFTER_ALL_READS, None)

    async def close(self) -> None:
        """Stop fetching and storing."""
        tasks = [*self._fetching.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arriving(self, volume: Volume, block: int, reads: Reads, num_reads: int) -> asyncio.Task[None] | None:
        """What brings a block that is absent: if there is room for it, now or soon, or the job wants it whole in any case."""
        arriving = self._fetching.get((volume, block))
        if arriving:
            self._counts.num_joined += num_reads
            return arriving
        self._counts.num_misses += num_reads
        waits = reads.block_bytes or self._reserve(volume, block, Need.BY_ITS_FUTURE) or self._holds_all(volume)
        if not waits:
            return None
        return self._begin(volume, block, reads.flow, reads.urgency, reads.delays)

    def _holds_all(self, volume: Volume) -> bool:
        """Whether there is room for all that is absent: then nothing need be asked for by the sample and again by the block."""
        return self._tiers.in_memory.fits(volume.absent_bytes)

    def _begin(self, volume: Volume, block: int, flow: Flow, urgency: int, delays: Delays | None) -> asyncio.Task[None]:
        arriving = asyncio.create_task(self._fetch(volume, block, flow, urgency, delays), name="fetch block")
        arriving.add_done_callback(_look_at)
        self._fetching[volume, block] = arriving
        return arriving

    def _reserve(self, volume: Volume, block: int, need: Need) -> bool:
        """Memory for a block, if it can be taken in and not too much is on its way."""
        num_bytes = int(volume.sizes[block])
        if self._fetching_bytes and self._fetching_bytes + num_bytes > self._max_fetching_bytes:
            return False
        if not self._tiers.take_memory(volume, block, need):
            return False
        self._fetching_bytes += num_bytes
        return True

    async def _fetch(self, volume: Volume, block: int, flow: Flow, urgency: int, delays: Delays | None) -> None:
        """Bring a block, unless there is no room and never will be."""
        is_whole = False
        try:
            if volume.place[block] != Place.FETCHING and not await self._wait_for_room(volume, block, flow, urgency):
                return
            try:
                whole = Reads.into([volume.allocate(block)], [int(volume.map.shard[block])], [int(volume.map.start[block])])
                await volume.storage.read(replace(whole, flow=flow, urgency=urgency, delays=delays))
                is_whole = True
            finally:
                self._fetching_bytes -= int(volume.sizes[block])
                self._tiers.arrived(volume, block, is_whole=is_whole)
                self._freed.set()
        finally:
            del self._fetching[volume, block]
        self._store(volume, block)

    async def _wait_for_room(self, volume: Volume, block: int, flow: Flow, urgency: int) -> bool:
        """Wait in line until there is memory for a block; False where nothing is under way that could free some."""
        async with self._line.turn(flow, int(volume.sizes[block]), urgency):
            while not self._reserve(volume, block, Need.SOON):
                if not (self._fetching_bytes or self._background or self._num_copying):
                    await asyncio.sleep(0)  # what was about to be copied has begun
                    if not self._num_copying:
                        return self._reserve(volume, block, Need.AT_ONCE)
                self._freed.clear()
                await self._freed.wait()
        return True

    async def _copy_after(self, arriving: asyncio.Task[None], volume: Volume, blocks: Integers, reads: Reads) -> None:
        """Copy out of one block when it is there; if it cannot be had, read past it."""
        await asyncio.shield(arriving)
        place = Place(volume.place[blocks[0]])
        if place >= Place.MEMORY:
            await self._copy(place, volume, blocks, reads)
        else:
            await self._read_past(volume, reads)

    async def _read_past(self, volume: Volume, reads: Reads) -> None:
        self._counts.num_past += len(reads)
        await volume.storage.read(reads)

    def _pin(self, volume: Volume, blocks: Integers, task: asyncio.Task[None]) -> None:
        """Keep blocks, each once in `blocks`, where they are until a task is done, even if it never begins."""

        def unpin(_: object) -> None:
            volume.num_pins[blocks] -= 1
            self._freed.set()

        volume.num_pins[blocks] += 1
        task.add_done_callback(unpin)

    async def _copy(self, place: Place, volume: Volume, blocks: Integers, reads: Reads) -> None:
        """Copy out of blocks that are all in one place, and pinned."""
        self._num_copying += 1
        try:
            damaged = await (self._copy_memory if place is Place.MEMORY else self._copy_disk)(volume, blocks, reads)
        finally:
            self._num_copying -= 1
        self._tiers.note_copied(volume, blocks, reads.size)
        if damaged:
            await self.read(volume, reads.part(np.flatnonzero(np.isin(blocks, list(damaged)))))

    async def _copy_memory(self, volume: Volume, blocks: Integers, reads: Reads) -> set[int]:
        sources, cost = volume.sources(blocks, reads), int(reads.size.sum())
        if cost <= _INLINE_BYTES:
            _copy_all(sources, reads, self._copies)
        else:
            held = [volume.holder(block) for block in np.unique(blocks).tolist()]  # even if nobody waits any more
            work = _leasing(reads, functools.partial(_copy_all, sources, reads, self._copies, held))
            await self._workers.run(reads.flow, cost, reads.urgency, work)
        return set()

    async def _copy_disk(self, volume: Volume, blocks: Integers, reads: Reads) -> set[int]:
        """Gives the blocks that turned out to be damaged."""
        assert volume.mirror
        work = _leasing(reads, functools.partial(volume.mirror.copy, blocks, volume.within(blocks, reads), reads))
        damaged = await self._workers.run(reads.flow, int(reads.size.sum()), reads.urgency, work)
        if damaged:
            log_event("cached blocks damaged", {"blocks": len(damaged)}, logging.WARNING)
            self._tiers.lost(volume, damaged)
        return damaged

    def _store(self, volume: Volume, block: int) -> None:
        """Begin to write a block to disk, if it can be taken in there."""
        if volume.mirror is None or (volume, block) in self._dropping or self._clock() < self._disk_pauses_until:
            return
        victims = self._tiers.take_disk(volume, block)
        if victims is not None:
            volume.num_pins[block] += 1
            self._in_background(self._change_disk(victims, (volume, block)))
        elif self._disk and self._disk.unopened:
            self._in_background(self._remove_unopened())

    async def _change_disk(self, gone: list[Key], new: Key | None) -> None:
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
            self._pause_disk(error)
        finally:
            self._dropping.difference_update(gone)
            if new:
                new[0].num_pins[new[1]] -= 1
                self._tiers.written(*new, is_whole=is_whole)
            self._freed.set()
        if new and is_whole:
            self._resume_disk()

    async def _remove_unopened(self) -> None:
        """Make room of what no dataset of this daemon has asked for."""
        assert self._disk
        try:
            await self._workers.run(NO_JOB, 0, 0, self._disk.remove_oldest)
        except OSError as error:
            self._pause_disk(error)
        self._tiers.on_disk.limit_bytes = self._disk.free_bytes

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="store block")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _pause_disk(self, error: OSError) -> None:
        """Write nothing more for a while; what is there goes on to be read."""
        if not self._disk_pauses_until:
            facts = {"reason": error.strerror or repr(error), "again_in_s": _DISK_PAUSE_S}
            log_event("cache disk fails", facts, logging.WARNING)
        self._disk_pauses_until = self._clock() + _DISK_PAUSE_S

    def _resume_disk(self) -> None:
        if self._disk_pauses_until and self._clock() >= self._disk_pauses_until:
            self._disk_pauses_until = 0.0
            log_event("cache disk works again")


def _copy_all(sources: npt.NDArray[np.uint64], reads: Reads, may_gather: bool, _held: object = None) -> None:
    if may_gather:
        gather(sources, reads.size, reads.target)
        return
    for source, size, target in zip(sources.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True):
        memory_at(target, size)[:] = memory_at(source, size)


def _leasing(reads: Reads, copy: Callable[[], _Result]) -> Callable[[], _Result]:
    """A copy that holds a lease of the memory it writes to: a thread goes on where nobody waits any more."""

    def work() -> _Result:
        with reads.lease():
            return copy()

    return work


def _look_at(task: asyncio.Task[None]) -> None:
    """Its error is for those who wait for it, and there may be nobody."""
    if not task.cancelled():
        task.exception()
