"""The node cache: raw blocks of remote shards for all jobs of a daemon, in memory and on disk.

The life of a block: a job misses it; it is fetched whole, with one range request, into memory that was reserved for it; those
who want it meanwhile wait for the same request; its samples are copied out of it; it is written to disk, and from then on its
memory is the first to go. What may stay is decided by next use (`eviction`). A read whose block cannot be taken in goes to the
storage itself, so the cache never makes anybody wait for room, except a job that asks for whole blocks.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gyre_daemon.cache.blocks import BlockMap, Integers
from gyre_daemon.cache.disk import DiskCache
from gyre_daemon.cache.eviction import NEVER, NextUseEviction
from gyre_daemon.cache.volume import Place, Volume
from gyre_daemon.events import log_event
from gyre_daemon.fair import NO_JOB, FairExecutor
from gyre_daemon.metrics import CacheCounts
from gyre_daemon.storage import Reads, Storage
from gyre_daemon.storage.gather import gather, is_allowed, memory_at

_MAX_FETCHING_BYTES = 32 << 20
_INLINE_BYTES = 128 << 10  # copied at once: another thread would take longer
_DISK_PAUSE_S = 30.0
_MAX_ASKED = 32  # blocks whose next use is found out at once: each of their samples is looked up

_Key = tuple[Volume, int]


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
        self._in_memory: NextUseEviction[_Key] = NextUseEviction(memory_bytes, _is_pinned)
        self._on_disk: NextUseEviction[_Key] = NextUseEviction(self._disk_limit(), _is_pinned)
        self._max_fetching_bytes = min(_MAX_FETCHING_BYTES, memory_bytes)
        self._fetching: dict[_Key, asyncio.Task[None]] = {}
        self._fetching_bytes = 0
        self._storing: set[asyncio.Task[None]] = set()
        self._dropping: set[_Key] = set()
        self._samples_read = 0.0  # by each job, about: the clock of next uses
        self._ask_again_at = 0.0
        self._disk_pauses_until = 0.0
        self._copies = is_allowed()

    async def open_volume(self, identity: str, storage: Storage, blocks: BlockMap, block_bytes: int) -> Volume:
        """The blocks of a dataset, with what an earlier daemon left of them on disk."""
        mirror = None
        if self._disk and blocks.offsets()[-1]:
            try:
                opening = functools.partial(self._disk.open_mirror, identity, blocks)
                mirror, _ = await self._workers.run(NO_JOB, 0, 0, opening)
            except OSError as error:
                self._pause_disk(error)
        volume = Volume(storage, blocks, block_bytes, mirror)
        self._on_disk.limit_bytes = self._disk_limit()
        if mirror:
            self._adopt(volume, mirror.blocks())
        return volume

    async def read(self, volume: Volume, reads: Reads) -> None:
        """Do reads, from the cache where it has them or takes them in; see `Storage.read`."""
        blocks = volume.map.blocks_of(reads)
        touched = np.unique(blocks[blocks >= 0])
        volume.follow(reads)
        self._samples_read += len(np.unique(reads.sample)) / max(1, volume.num_jobs)
        volume.num_pins[touched] += 1
        try:
            places = np.where(blocks >= 0, volume.place[blocks], Place.ABSENT)
            async with asyncio.TaskGroup() as group:
                for place in (Place.MEMORY, Place.DISK):
                    which = np.flatnonzero(places == place)
                    if which.size:
                        self._counts.num_hits += which.size
                        group.create_task(self._copy(volume, blocks[which], reads.part(which)))
                missed = np.flatnonzero((blocks >= 0) & (places <= Place.FETCHING))
                past = [np.flatnonzero(blocks < 0)]
                for block in np.unique(blocks[missed]).tolist():
                    which = missed[blocks[missed] == block]
                    arriving = self._arriving(volume, block, reads, len(which))
                    if arriving or reads.block_bytes:
                        group.create_task(self._await_block(volume, block, reads.part(which), arriving))
                    else:
                        past.append(which)
                beside = np.concatenate(past)
                if beside.size:
                    group.create_task(self._read_past(volume, reads.part(beside)))
        finally:
            volume.num_pins[touched] -= 1

    async def close(self) -> None:
        """Stop fetching and storing."""
        tasks = [*self._fetching.values(), *self._storing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _arriving(self, volume: Volume, block: int, reads: Reads, num_reads: int) -> asyncio.Task[None] | None:
        """The request that brings a block, begun now if there is room for it."""
        arriving = self._fetching.get((volume, block))
        if arriving:
            self._counts.num_joined += num_reads
            return arriving
        self._counts.num_misses += num_reads
        return self._begin(volume, block, reads)

    async def _await_block(self, volume: Volume, block: int, reads: Reads, arriving: asyncio.Task[None] | None) -> None:
        """Copy out of a block when it is there; one that cannot be had is read past."""
        while arriving or self._fetching or self._storing:
            if arriving:
                await asyncio.shield(arriving)
            else:
                await asyncio.wait({*self._fetching.values(), *self._storing}, return_when=asyncio.FIRST_COMPLETED)
            if volume.place[block] in (Place.MEMORY, Place.DISK):
                await self._copy(volume, np.full(len(reads), block), reads)
                return
            arriving = self._fetching.get((volume, block)) or self._begin(volume, block, reads)
        await self._read_past(volume, reads)

    async def _read_past(self, volume: Volume, reads: Reads) -> None:
        self._counts.num_past += len(reads)
        await volume.storage.read(reads)

    def _begin(self, volume: Volume, block: int, reads: Reads) -> asyncio.Task[None] | None:
        """Begin to fetch a block, if it can be taken in and not too much is on its way."""
        num_bytes, key = int(volume.sizes[block]), (volume, block)
        if self._fetching and self._fetching_bytes + num_bytes > self._max_fetching_bytes:
            return None
        victims = self._make_room(self._in_memory, key, num_bytes)
        if victims is None:
            return None
        for of, victim in victims:
            of.free(victim)
            of.move(victim, Place.DISK if of.on_disk[victim] else Place.ABSENT)
            self._counts.num_evicted += not of.on_disk[victim]
        volume.move(block, Place.FETCHING)
        self._fetching_bytes += num_bytes
        task = self._fetching[key] = asyncio.create_task(self._fetch(volume, block, reads), name="fetch block")
        task.add_done_callback(_look_at)
        return task

    async def _fetch(self, volume: Volume, block: int, reads: Reads) -> None:
        key, place = (volume, block), Place.ABSENT
        try:
            whole = Reads.into([volume.allocate(block)], [int(volume.map.shard[block])], [int(volume.map.start[block])])
            await volume.storage.read(replace(whole, flow=reads.flow, urgency=reads.urgency, delays=reads.delays))
            place = Place.MEMORY
        finally:
            volume.move(block, place)
            del self._fetching[key]
            self._fetching_bytes -= int(volume.sizes[block])
            if place is Place.ABSENT:
                volume.free(block)
                self._in_memory.drop(key)
            self._tell()
        self._counts.num_blocks_fetched += 1
        self._counts.num_bytes_fetched += int(volume.sizes[block])
        self._store(volume, block)

    def _store(self, volume: Volume, block: int) -> None:
        """Begin to write a block to disk, if it can be taken in there."""
        key = (volume, block)
        if volume.mirror is None or key in self._dropping or self._clock() < self._disk_pauses_until:
            return
        victims = self._make_room(self._on_disk, key, int(volume.disk_sizes[block]))
        if victims is None:
            if self._disk and self._disk.unopened:
                self._in_background(self._remove_unopened())
            return
        for of, victim in victims:
            of.on_disk[victim] = False
            if of.place[victim] == Place.DISK:
                of.move(victim, Place.ABSENT)
                self._counts.num_evicted += 1
        self._in_background(self._write(volume, block, victims))

    async def _write(self, volume: Volume, block: int, victims: list[_Key]) -> None:
        def work() -> None:
            for of, victim in victims:
                assert of.mirror
                of.mirror.drop([victim])
            assert volume.mirror
            volume.mirror.write(block, volume.data(block))

        key = (volume, block)
        self._dropping.update(victims)
        volume.num_pins[block] += 1
        try:
            await self._workers.run(NO_JOB, int(volume.sizes[block]), 0, work)
        except OSError as error:
            self._on_disk.drop(key)
            self._pause_disk(error)
        else:
            volume.on_disk[block] = True
            self._in_memory.expect(key, NEVER)
            self._disk_works()
        finally:
            volume.num_pins[block] -= 1
            self._dropping.difference_update(victims)
            self._tell()

    async def _remove_unopened(self) -> None:
        assert self._disk
        try:
            await self._workers.run(NO_JOB, 0, 0, self._disk.remove_oldest)
        except OSError as error:
            self._pause_disk(error)
        self._on_disk.limit_bytes = self._disk_limit()

    async def _copy(self, volume: Volume, blocks: Integers, reads: Reads) -> None:
        """Copy out of blocks that are there, all in memory or all on disk, and pinned."""
        cost = int(reads.size.sum())
        if volume.place[blocks[0]] == Place.MEMORY:
            work = functools.partial(self._copy_memory, volume.sources(blocks, reads), reads)
            if cost <= _INLINE_BYTES:
                work()
            else:
                await self._workers.run(reads.flow, cost, reads.urgency, work)
            return
        assert volume.mirror
        copying = functools.partial(volume.mirror.copy, blocks, volume.within(blocks, reads), reads.size, reads.target)
        damaged = await self._workers.run(reads.flow, cost, reads.urgency, copying)
        if damaged:
            self._lose(volume, damaged)
            await self._read_past(volume, reads.part(np.flatnonzero(np.isin(blocks, list(damaged)))))

    def _copy_memory(self, sources: npt.NDArray[np.uint64], reads: Reads) -> None:
        if self._copies:
            gather(sources, reads.size, reads.target)
            return
        for source, size, target in zip(sources.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True):
            memory_at(target, size)[:] = memory_at(source, size)

    def _lose(self, volume: Volume, damaged: set[int]) -> None:
        """Blocks on disk are not what was written; the mirror has dropped them."""
        for block in damaged:
            if not volume.on_disk[block]:
                continue  # another reader was faster
            volume.on_disk[block] = False
            if volume.place[block] == Place.DISK:
                volume.move(block, Place.ABSENT)
            self._on_disk.drop((volume, block))
            self._counts.num_corrupt += 1
        log_event("cached blocks damaged", {"blocks": len(damaged)}, logging.WARNING)
        self._tell()

    def _make_room(self, eviction: NextUseEviction[_Key], key: _Key, num_bytes: int) -> list[_Key] | None:
        """Take a block in; what had to go for it, or None where nothing may."""
        now = int(self._samples_read)
        if eviction.fits(num_bytes):
            return eviction.admit(key, num_bytes, now)
        next_use = _later(now, key[0].distances(np.array([key[1]])))[0]
        victims = eviction.admit(key, num_bytes, next_use)
        if victims is None and now >= self._ask_again_at and self._ask(eviction, now):
            victims = eviction.admit(key, num_bytes, next_use)
        return victims

    def _ask(self, eviction: NextUseEviction[_Key], now: int) -> bool:
        """Find out anew when some blocks are used next."""
        by_volume: dict[Volume, list[int]] = {}
        for volume, block in eviction.passed(now, _MAX_ASKED):
            by_volume.setdefault(volume, []).append(block)
        for volume, blocks in by_volume.items():
            for block, use in zip(blocks, _later(now, volume.distances(np.array(blocks))), strict=True):
                eviction.expect((volume, block), use)
        self._ask_again_at = now + 1
        return bool(by_volume)

    def _adopt(self, volume: Volume, found: Integers) -> None:
        """Count what is on disk already; what is beyond the limit goes."""
        assert volume.mirror
        surplus = []
        for block in found.tolist():
            if self._on_disk.fits(int(volume.disk_sizes[block])):
                self._on_disk.admit((volume, block), int(volume.disk_sizes[block]), int(self._samples_read))
                volume.on_disk[block] = True
                volume.move(block, Place.DISK)
            else:
                surplus.append(block)
        if surplus:
            self._in_background(self._drop(volume, surplus))
        self._tell()

    async def _drop(self, volume: Volume, blocks: list[int]) -> None:
        assert volume.mirror
        self._dropping.update((volume, block) for block in blocks)
        try:
            await self._workers.run(NO_JOB, 0, 0, functools.partial(volume.mirror.drop, blocks))
        except OSError as error:
            self._pause_disk(error)
        finally:
            self._dropping.difference_update((volume, block) for block in blocks)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="store block")
        self._storing.add(task)
        task.add_done_callback(self._storing.discard)

    def _disk_limit(self) -> int:
        return self._disk.limit_bytes - sum(self._disk.unopened.values()) if self._disk else 0

    def _pause_disk(self, error: OSError) -> None:
        """Write nothing more for a while; what is there goes on to be read."""
        if not self._disk_pauses_until:
            facts = {"reason": error.strerror or repr(error), "again_in_s": _DISK_PAUSE_S}
            log_event("cache disk fails", facts, logging.WARNING)
        self._disk_pauses_until = self._clock() + _DISK_PAUSE_S

    def _disk_works(self) -> None:
        if self._disk_pauses_until:
            self._disk_pauses_until = 0.0
            log_event("cache disk works again")

    def _tell(self) -> None:
        self._counts.memory_bytes = self._in_memory.used_bytes
        self._counts.disk_bytes = self._on_disk.used_bytes


def _is_pinned(key: _Key) -> bool:
    volume, block = key
    return bool(volume.num_pins[block]) or volume.place[block] == Place.FETCHING


def _later(now: int, distances: Integers) -> list[int]:
    """Points of time at distances from now."""
    return [NEVER if distance == NEVER else now + distance for distance in distances.tolist()]


def _look_at(task: asyncio.Task[None]) -> None:
    """Its error is for those who wait for it, and there may be nobody."""
    if not task.cancelled():
        task.exception()
