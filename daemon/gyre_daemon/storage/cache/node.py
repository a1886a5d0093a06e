"""The node cache: raw blocks of shards for all jobs of a daemon, in memory and on disk.

[Note: The life of a cached block]

A job misses a block. The block is fetched whole, with one range request, into memory that was
reserved for it. Other reads that need it wait for the same request. Its samples are copied out, it
is written to disk by a thread, and from then on its memory is the first to be freed. Next use
decides what stays (`placement`). A read whose block is not admitted goes to the storage itself, so
that nothing waits for room in the cache, except a job that asks for whole blocks.
"""

import asyncio
import functools
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
from msgspec import Struct

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import NO_JOB, Claims, FairExecutor, FairQueue, Flow, compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.cache.blocks import BlockMap, BlockMemory, DiskCache, Integers, Mirror
from gyre_daemon.storage.cache.placement import Key, Need, Placement, Tier, View, Volume
from gyre_daemon.storage.open_shards import ShardChecksums
from gyre_daemon.storage.reads import (
    BlockCache,
    Delays,
    ReadPlan,
    Reads,
    ShardBounds,
    Storage,
    copy,
)
from gyre_daemon.storage.shard import Shard

_Result = TypeVar("_Result")

# Blocks being fetched at once: more delay the one that a batch waits for, fewer leave the network
# idle between two of them.
_MAX_FETCHING_BYTES = 32 << 20
_INLINE_BYTES = 128 << 10  # copied on the event loop: handing it to a thread would take longer
_AFTER_ALL_READS = 1 << 62  # urgency
# Turns of the event loop from the arrival of a block until the copies out of it have unpinned it.
# With fewer a block that is about to be free would look pinned for ever, and what waits for its
# room would be read past the cache.
_MAX_IDLE_TURNS = 4

_PAUSE_S = 10.0  # without writes after a disk has failed


class _Fetch(Struct, eq=False):
    """A block in fetching, by whose storage, and the jobs that wait for it."""

    task: asyncio.Task[None]
    claims: Claims
    storage: Storage


class NodeCache:
    """All blocks that a daemon holds. Used from one event loop.

    Attributes:
        memory_bytes: the most that blocks take in memory.
    """

    def __init__(
        self,
        memory_bytes: int,
        disk: DiskCache | None,
        workers: FairExecutor,
        counts: CacheCounts,
        clock: Callable[[], float] = time.monotonic,
        disk_workers: FairExecutor | None = None,
    ) -> None:
        self._disk_workers = disk_workers or workers
        self.memory_bytes = memory_bytes
        self._workers = workers
        self._counts = counts
        self._placement = Placement(memory_bytes, disk.free_bytes if disk else 0, counts)
        self._memory = BlockMemory(memory_bytes)
        self._volumes: WeakValueDictionary[tuple[str, bytes], Volume] = WeakValueDictionary()
        self._opening = asyncio.Lock()
        self._max_fetching_bytes = min(_MAX_FETCHING_BYTES, memory_bytes)
        self._fetching: dict[Key, _Fetch] = {}
        self._fetching_bytes = 0
        self._line = FairQueue(1)  # blocks that wait for room
        self._freed = asyncio.Event()
        self._num_copying = 0
        self._writer: DiskWriter | None = None
        if disk:
            self._writer = DiskWriter(
                disk, self._placement, self._disk_workers, counts, clock, self._freed.set
            )

    async def open_volume(
        self,
        identity: str,
        storage: Storage,
        blocks: BlockMap,
        block_bytes: int,
        *,
        comes_together: bool = False,
    ) -> View:
        """The blocks of a dataset, with those that an earlier daemon left on disk.

        Datasets with one identity and the same blocks share them, also if one is opened twice.
        """
        key = identity, await compute(blocks.digest)
        async with self._opening:
            volume = self._volumes.get(key)
            if volume is None:
                mirror = None
                if self._writer and blocks.offsets()[-1]:
                    mirror = await self._writer.open_mirror(identity, blocks)
                volume = self._volumes[key] = Volume(blocks, mirror, self._memory)
                if self._writer and mirror:
                    self._writer.adopt(volume, mirror)
        self._placement.count_samples(volume, 0)
        return View(volume, storage, block_bytes, comes_together)

    async def read(self, view: View, reads: Reads) -> None:
        """Do reads, from present or admitted blocks, or else from the storage."""
        volume = view.volume
        blocks = volume.map.blocks_of(reads)
        volume.follow(reads, view.block_bytes)
        num_samples = 1 + int(np.count_nonzero(np.diff(reads.sample)))
        self._placement.count_samples(volume, num_samples)
        present = (blocks >= 0) & (volume.tier[blocks] >= Tier.MEMORY)
        on_disk = present & volume.on_disk[blocks]
        async with asyncio.TaskGroup() as group:
            self._copy_present(group, view, blocks, reads, np.flatnonzero(present & ~on_disk))
            past = [np.flatnonzero(blocks < 0)]
            missed = np.flatnonzero((blocks >= 0) & ~present)
            # Misses come before blocks on disk, because they may evict the memory of those.
            for arriving, which in self._arriving(view, blocks, reads, missed):
                if arriving:
                    copying = group.create_task(
                        self._copy_after(arriving, view, blocks[which], reads.part(which))
                    )
                    self._pin(volume, np.unique(blocks[which]), copying)
                else:
                    past.append(which)
            self._copy_present(group, view, blocks, reads, np.flatnonzero(on_disk))
            beside = np.concatenate(past)
            if beside.size:
                group.create_task(self._read_past(view, reads.part(beside)))

    def expect(self, view: View, blocks: Integers, flow: Flow) -> None:
        """Fetch blocks before they are read, in this order, as memory becomes free."""
        volume = view.volume
        fits = volume.memory_sizes[blocks] <= self.memory_bytes
        for block in blocks[fits & (volume.tier[blocks] == Tier.ABSENT)].tolist():
            if fetch := self._fetching.get((volume, block)):
                fetch.claims.join(flow, _AFTER_ALL_READS)
            else:
                self._begin(view, block, flow, _AFTER_ALL_READS, None)

    async def close(self) -> None:
        """Stop fetching and writing, and release the folder of the disk cache."""
        tasks = [fetch.task for fetch in self._fetching.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer:
            await self._writer.close()

    def _copy_present(
        self,
        group: asyncio.TaskGroup,
        view: View,
        blocks: Integers,
        reads: Reads,
        present: Integers,
    ) -> None:
        """Copy out of present blocks, in a task for memory and one for disk.

        The blocks are pinned until it is done.
        """
        volume = view.volume
        self._counts.num_hits += present.size
        for tier in (Tier.MEMORY, Tier.DISK):
            which = present[volume.tier[blocks[present]] == tier]
            if which.size:
                copying = group.create_task(
                    self._copy(tier, view, blocks[which], reads.part(which))
                )
                self._pin(volume, np.unique(blocks[which]), copying)

    def _arriving(
        self, view: View, blocks: Integers, reads: Reads, missed: Integers
    ) -> Iterator[tuple[_Fetch | None, Integers]]:
        """The fetches of absent blocks, and which reads wait for each; None: past the cache.

        Where blocks come together, a task for each would cost more than reading it.
        """
        if view.comes_together:
            self._begin_together(view, np.unique(blocks[missed]), reads)
        waiting: dict[_Fetch | None, list[Integers]] = {}
        order = missed[np.argsort(blocks[missed], kind="stable")]
        for which in np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1):
            if len(which):
                fetch = self._arriving_block(view, int(blocks[which[0]]), reads, len(which))
                waiting.setdefault(fetch, []).append(which)
        for fetch, its in waiting.items():
            yield fetch, np.concatenate(its)

    def _arriving_block(
        self, view: View, block: int, reads: Reads, num_reads: int
    ) -> _Fetch | None:
        """The fetch of an absent block; None if its bytes are read past the cache."""
        volume = view.volume
        fetch = self._fetching.get((volume, block))
        if fetch:
            self._counts.num_joined += num_reads
            fetch.claims.join(reads.flow, reads.urgency)
            return fetch
        self._counts.num_misses += num_reads
        may_fit = not view.comes_together and volume.memory_sizes[block] <= self.memory_bytes
        is_admitted = may_fit and (
            reads.block_bytes
            or self._reserve(volume, block, Need.BY_NEXT_USE)
            # With room for all blocks, nothing need be read both by the sample and by the block.
            or self._placement.in_memory.fits(volume.absent_bytes)
        )
        if not is_admitted:
            return None
        return self._begin(view, block, reads.flow, reads.urgency, reads.delays)

    def _begin(
        self, view: View, block: int, flow: Flow, urgency: int, delays: Delays | None
    ) -> _Fetch:
        claims = Claims(flow, urgency)
        fetching = self._fetch(view, block, claims, delays)
        arriving = asyncio.create_task(fetching, name="fetch block")
        arriving.add_done_callback(_retrieve_error)
        fetch = self._fetching[view.volume, block] = _Fetch(arriving, claims, view.storage)
        return fetch

    def _begin_together(self, view: View, blocks: Integers, reads: Reads) -> None:
        """Fetch absent blocks by one read for all of them, as far as they are admitted."""
        volume = view.volume
        fresh = [
            block
            for block in blocks.tolist()
            if (volume, block) not in self._fetching
            and self._placement.take_memory(volume, block, Need.BY_NEXT_USE)
        ]
        if not fresh:
            return
        self._counts.num_misses += len(fresh)
        self._counts.num_joined -= len(fresh)  # they will be found as if others had begun them
        claims = Claims(reads.flow, reads.urgency)
        fetching = self._fetch_together(view, fresh, claims, reads.delays)
        arriving = asyncio.create_task(fetching, name="fetch samples")
        arriving.add_done_callback(_retrieve_error)
        self._fetching |= dict.fromkeys(
            [(volume, each) for each in fresh], _Fetch(arriving, claims, view.storage)
        )

    async def _fetch_together(
        self, view: View, blocks: list[int], claims: Claims, delays: Delays | None
    ) -> None:
        """Fetch blocks with reserved memory; none is kept if one of them fails."""
        try:
            await self._fill(view, blocks, claims, delays)
        finally:
            for block in blocks:
                del self._fetching[view.volume, block]

    def _reserve(self, volume: Volume, block: int, need: Need) -> bool:
        """Reserve memory for a block, if it is admitted and not too much is being fetched."""
        num_bytes = int(volume.memory_sizes[block])
        if self._fetching_bytes and self._fetching_bytes + num_bytes > self._max_fetching_bytes:
            return False
        if not self._placement.take_memory(volume, block, need):
            return False
        self._fetching_bytes += num_bytes
        return True

    async def _fetch(self, view: View, block: int, claims: Claims, delays: Delays | None) -> None:
        """Fetch a block, unless there is no room for it and never will be."""
        volume = view.volume
        try:
            if volume.tier[block] != Tier.FETCHING and not await self._wait_for_room(
                volume, block, claims
            ):
                return
            try:
                await self._fill(view, [block], claims, delays)
            finally:
                self._fetching_bytes -= int(volume.memory_sizes[block])
        finally:
            del self._fetching[volume, block]

    async def _fill(
        self, view: View, blocks: list[int], claims: Claims, delays: Delays | None
    ) -> None:
        """Read blocks into their memory by one read, and begin to write them to disk."""
        volume, is_whole = view.volume, False
        try:
            shards, starts = volume.map.shard[blocks].tolist(), volume.map.start[blocks].tolist()
            whole = Reads.into([volume.allocate(block) for block in blocks], shards, starts)
            flow, urgency = claims.first
            whole = replace(whole, flow=flow, urgency=urgency, claims=claims, delays=delays)
            await view.storage.read(whole)
            is_whole = True
        finally:
            for block in blocks:
                self._placement.fetched(volume, block, is_whole=is_whole)
            self._freed.set()
        if self._writer:
            for block in blocks:
                self._writer.store(volume, block)

    async def _wait_for_room(self, volume: Volume, block: int, claims: Claims) -> bool:
        """Wait in line until there is memory for a block; False if nothing can free any."""
        async with self._line.turn_of(claims, int(volume.sizes[block])):
            num_idle_turns = 0
            while not self._reserve(volume, block, Need.SOON):
                is_writing = self._writer is not None and self._writer.is_busy
                if self._fetching_bytes or self._num_copying or is_writing:
                    num_idle_turns = 0
                    self._freed.clear()
                    await self._freed.wait()
                elif num_idle_turns == _MAX_IDLE_TURNS:
                    return self._reserve(volume, block, Need.NOW)
                else:
                    num_idle_turns += 1
                    await asyncio.sleep(0)
        return True

    async def _copy_after(
        self, arriving: _Fetch, view: View, blocks: Integers, reads: Reads
    ) -> None:
        """Copy out of one block once it is present; if there was no room, read past it."""
        with reads.claimed().told(arriving.claims.join):
            try:
                await asyncio.shield(arriving.task)
            except GyreError:
                if not view.comes_together and arriving.storage is view.storage:
                    raise  # otherwise it may be the error of another sample, or of another's key
        tier = Tier(view.volume.tier[blocks[0]])
        if tier >= Tier.MEMORY:
            await self._copy(tier, view, blocks, reads)
        else:
            await self._read_past(view, reads)

    async def _read_past(self, view: View, reads: Reads) -> None:
        self._counts.num_past += len(reads)
        await view.storage.read(reads)

    def _pin(self, volume: Volume, blocks: Integers, task: asyncio.Task[None]) -> None:
        """Keep distinct blocks in their tiers until a task is done, even if it never begins."""

        def unpin(_: object) -> None:
            volume.num_pins[blocks] -= 1
            self._freed.set()

        volume.num_pins[blocks] += 1
        task.add_done_callback(unpin)

    async def _copy(self, tier: Tier, view: View, blocks: Integers, reads: Reads) -> None:
        """Copy out of pinned blocks of one tier; damaged ones are fetched again."""
        volume = view.volume
        self._num_copying += 1
        damaged: set[int] = set()
        try:
            if tier is Tier.MEMORY:
                await self._copy_memory(volume, blocks, reads)
            else:
                damaged = await self._copy_disk(volume, blocks, reads)
        finally:
            self._num_copying -= 1
            self._freed.set()
        self._placement.count_copied(volume, blocks, reads.size)
        if damaged:
            await self.read(view, reads.part(np.flatnonzero(np.isin(blocks, list(damaged)))))

    async def _copy_memory(self, volume: Volume, blocks: Integers, reads: Reads) -> None:
        sources = volume.sources(blocks, reads)
        if reads.num_bytes <= _INLINE_BYTES:
            copy(sources, reads.size, reads.target)
            return
        # The thread owns the blocks' memory, because it continues if this task is cancelled.
        owners = [volume.owner(block) for block in np.unique(blocks).tolist()]

        def copy_owned(_: object = owners) -> None:
            copy(sources, reads.size, reads.target)

        await self._in_thread(reads, copy_owned, self._workers)

    async def _copy_disk(self, volume: Volume, blocks: Integers, reads: Reads) -> set[int]:
        """Copy out of the mirror; returns the blocks that turned out to be damaged."""
        assert volume.mirror
        within = volume.within(blocks, reads)
        copy = functools.partial(volume.mirror.copy, blocks, within, reads)
        damaged = await self._in_thread(reads, copy, self._disk_workers)
        if damaged:
            log_event("cached blocks damaged", {"blocks": len(damaged)}, logging.WARNING)
            self._placement.lost(volume, damaged)
        return damaged

    async def _in_thread(
        self, reads: Reads, copy: Callable[[], _Result], workers: FairExecutor
    ) -> _Result:
        """Copy in a thread that holds a lease of the target memory."""

        def work() -> _Result:
            with reads.lease():
                return copy()

        return await workers.run(reads.flow, reads.num_bytes, reads.urgency, work)


def _retrieve_error(task: asyncio.Task[None]) -> None:
    """Its error is for the reads that wait for it, and there may be none."""
    if not task.cancelled():
        task.exception()


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
            changed: called when work has ended, so that memory may be freed.
        """
        self._disk = disk
        self._placement = placement
        self._workers = workers
        self._counts = counts
        self._clock = clock
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropping: set[Key] = set()
        self._is_removing = False
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
        elif self._disk.unopened and not self._is_removing:
            self._is_removing = True
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
        if new and is_whole:
            self._resume()

    async def _remove_unopened(self) -> None:
        """Remove blocks of a dataset that this daemon has not opened."""
        try:
            await self._workers.run(NO_JOB, 0, 0, self._disk.remove_oldest)
        except OSError as error:
            self._pause(error)
        finally:
            self._is_removing = False
        self._placement.on_disk.limit_bytes = self._disk.free_bytes

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._changed()  # only now: who is woken asks whether something is still busy

        task = asyncio.create_task(work, name="store block")
        self._tasks.add(task)
        task.add_done_callback(ended)

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


# The size of shared blocks. Smaller ones take more requests per epoch, larger ones delay a first
# batch, and knowledge of each block takes memory.
_MIN_BLOCK_BYTES, _MAX_BLOCKS = 256 << 10, 1 << 17


class CachedStorage(Storage):
    """The shards of one dataset, read through the cache of the node.

    A job that wants whole blocks chooses their size. All others share blocks that are small enough
    for a fast first batch, and large enough to bring many samples with one request.
    """

    def __init__(
        self,
        storage: Storage,
        location: str,
        cache: NodeCache,
        block_map: Callable[[int], BlockMap],
        block_bytes: int = 0,
        *,
        by_sample: bool = False,
        passes_local: bool = False,
    ) -> None:
        """Read a storage through a cache.

        Args:
            storage: where the bytes come from.
            location: of the dataset; with the names and versions of its shards it identifies the
                blocks.
            cache: the node's.
            block_map: returns the dataset's blocks of about a given size; called in a thread.
            block_bytes: the one size that there is; 0 lets jobs choose.
            by_sample: whether the blocks that jobs share are a sample each. Where each is a file, a
                larger one would bring no more with one read, but take a read for each file.
            passes_local: whether reads pass the cache by while this node has the bytes: the page
                cache keeps them. Decoded chunks are kept all the same.
        """
        self.shards = storage.shards
        self._storage = storage
        self._bounds = ShardBounds(storage.shards)
        self._cache = cache
        self._block_map = block_map
        self._location = location
        self._block_bytes = block_bytes
        self._by_sample = by_sample
        self._shared_bytes = 1 if by_sample else shared_block_bytes(storage.shards)
        self._passes_local = passes_local
        self._views: dict[int, asyncio.Task[View]] = {}  # by block size

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`: true once the cache has every block."""
        return self._storage.is_node_local or any(
            opening.done()
            and not opening.cancelled()
            and not opening.exception()
            and opening.result().volume.is_complete
            for opening in self._views.values()
        )

    @property
    def is_bypassed(self) -> bool:
        """Whether reads pass the cache by now: local files do while their mount is fast."""
        return self._passes_local and self._storage.is_node_local

    @property
    def checksums(self) -> ShardChecksums | None:
        """See `Storage.checksums`."""
        return self._storage.checksums

    @property
    def block_cache(self) -> BlockCache | None:
        """See `Storage.block_cache`."""
        return None if self.is_bypassed else self

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`."""
        if self.is_bypassed:
            await self._storage.read(plan)
            return
        reads = plan.part(slice(None))
        self._bounds.check(reads)
        reads = reads.nonempty()
        if len(reads):
            view = await self._view(reads.block_bytes or self._shared_bytes)
            await self._cache.read(view, reads)

    async def expect(self, block_bytes: int, blocks: Integers, flow: Flow) -> None:
        """See `BlockCache.expect`."""
        if self.is_bypassed:
            return
        self._cache.expect(await self._view(block_bytes), blocks, flow)

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`; the cache keeps nothing of it."""
        return self._storage.stream(shard)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return self._storage.path(shard)

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""
        return self._storage.local_file(shard)

    async def _view(self, block_bytes: int) -> View:
        """The blocks of a size; the first read opens them for all."""
        block_bytes = self._block_bytes or block_bytes
        opening = self._views.get(block_bytes)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            opening = self._views[block_bytes] = asyncio.create_task(self._open(block_bytes))
        return await asyncio.shield(opening)

    async def _open(self, block_bytes: int) -> View:
        identity = await compute(_identity, self._location, self.shards)
        blocks = await compute(self._block_map, block_bytes)
        view = await self._cache.open_volume(
            identity,
            self._storage,
            blocks,
            block_bytes,
            comes_together=self._by_sample and block_bytes == self._shared_bytes,
        )
        sizes = view.volume.memory_sizes
        too_large = sizes > self._cache.memory_bytes
        if too_large.any():
            facts = {
                "dataset": self._location,
                "cache_memory_bytes": self._cache.memory_bytes,
                "largest_block_bytes": int(sizes.max()),
                "blocks": f"{np.count_nonzero(too_large)} of {len(too_large)} are larger",
                "reason": "every read of such a block (a row group, a chunk) fetches and decodes "
                "it again; set cache_memory to several times the largest, or write smaller ones",
            }
            log_event("cache_memory is below one block", facts, logging.WARNING)
        return view


def shared_block_bytes(shards: Sequence[Shard]) -> int:
    """About the size of the blocks that jobs share; a power of two."""
    total_bytes = sum(shard.size_bytes for shard in shards)
    return max(_MIN_BLOCK_BYTES, 1 << max(0, (total_bytes - 1) // _MAX_BLOCKS).bit_length())


def _identity(location: str, shards: Sequence[Shard]) -> str:
    """Identifies the blocks of these shards; unique if a shard has no version."""
    versions = [(shard.name, shard.size_bytes, shard.version) for shard in shards]
    listing: list[object] = [location, versions]
    if not all(shard.version for shard in shards):
        listing.append(secrets.token_hex())
    return hashlib.blake2b(json.dumps(listing).encode(), digest_size=16).hexdigest()
