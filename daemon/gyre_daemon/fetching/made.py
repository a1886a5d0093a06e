"""The storage of records; see [Note: How transformed samples are cached] in `transforms.kept`.

A read has its samples transformed; where transforms draw random numbers, with the seed and the
epochs that it brings: see [Note: Samples of sources that depend on chance] in `storage.base`. Reads
that come at the same time, as those of a cache do, which fetches block by block, are transformed
together, at the first turn of the jobs that wait for any of them.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import StorageUnavailable
from gyre_daemon.fetching.fetch import NOTHING_AHEAD
from gyre_daemon.fetching.portions import Staging
from gyre_daemon.fetching.transformed import TransformingFetcher
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow
from gyre_daemon.storage.base import (
    BlockCache,
    Delays,
    Draws,
    ReadPlan,
    Reads,
    ShardBounds,
    Storage,
)
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.node import CachedStorage, NodeCache
from gyre_daemon.storage.gather import memory_at
from gyre_daemon.storage.open_shards import ShardChecksums
from gyre_daemon.storage.shard import Shard
from gyre_daemon.transforms.declared import Made, TransformedDataset, Transforms
from gyre_daemon.transforms.kept import (
    RECORD_BLOCKS,
    Held,
    KeptDataset,
    RecordIndex,
    as_records,
    kept_as,
    record_shard,
)
from gyre_daemon.transforms.transform import Cost

_Record = npt.NDArray[np.uint8]
# Blocks that are read at once to be kept: they are twice in memory meanwhile.
_FILLED_AT_ONCE_BYTES = 4 << 20
# Samples that are transformed together: as many as a worker is given at once.
_MAX_TOGETHER: dict[Cost, int] = {"light": 512, "heavy": 16, "slow": 1}
Tables = Sequence[Mapping[str, Any]]


class CachedRecords(CachedStorage):
    """Records behind the node's cache. Orders know no blocks of them."""

    @property
    def block_cache(self) -> BlockCache | None:
        """See `Storage.block_cache`."""
        return None


def keep_records(
    cache: NodeCache, threads: FairExecutor, prefix: Dataset, index: RecordIndex, shard: Shard
) -> Storage:
    """The storage of records, behind the node's cache; see `transforms.kept.Keep`."""
    assert isinstance(prefix, TransformedDataset)
    records = MadeStorage(prefix, index, shard, threads)

    def block_map(size: int) -> BlockMap:
        table = index.blocks(size)
        borders = index.starts[table.first_sample(np.arange(table.num_blocks + 1))]
        return BlockMap(np.zeros_like(borders[1:]), borders[:-1], borders[1:])

    cached = CachedRecords(records, shard.name, cache, block_map, RECORD_BLOCKS)
    if prefix.held:
        records.begin(_fill(cached, index, prefix.held), "keep records")
    return cached


async def _fill(cached: CachedRecords, index: RecordIndex, held: Held) -> None:
    """Read the blocks once of which all records are held: so the cache has them."""
    try:
        table = index.blocks(RECORD_BLOCKS)
        first = table.first_sample(np.arange(table.num_blocks + 1))
        is_there = np.diff(index.starts) == 0
        is_there[held.ids()] = True
        whole = np.flatnonzero(np.logical_and.reduceat(is_there, first[:-1]))
        begin, end = index.starts[first[whole]], index.starts[first[whole + 1]]
        together = (np.cumsum(end - begin) - (end - begin)) // _FILLED_AT_ONCE_BYTES
        for which in np.split(np.arange(len(whole)), np.flatnonzero(np.diff(together)) + 1):
            for block in whole[which].tolist():
                held.hand_over(range(first[block], first[block + 1]))
            memories = [np.empty(size, np.uint8) for size in (end - begin)[which].tolist()]
            await cached.read(Reads.into(memories, [0] * len(which), begin[which].tolist()))
    except Exception as error:  # jobs have these records made again, and get the error
        log_event("records not kept", {"reason": error}, logging.WARNING)
    finally:
        held.release()


@dataclass(frozen=True, slots=True)
class _Wish:
    """A record that somebody waits for; `claims` are those of all who do."""

    sample_id: int
    epoch: int
    claims: Claims
    record: "asyncio.Future[_Record]"


class MadeStorage:
    """The records of a dataset, in one shard that nobody stores.

    Attributes:
        shards: that one.
    """

    block_cache = None
    checksums: ShardChecksums | None = None
    is_node_local = False

    def __init__(
        self, prefix: TransformedDataset, index: RecordIndex, shard: Shard, threads: FairExecutor
    ) -> None:
        """Transform nothing yet.

        Args:
            prefix: makes the fields of records.
            index: of the records.
            shard: all of them.
            threads: the daemon's.
        """
        self.shards: Sequence[Shard] = [shard]
        self._bounds = ShardBounds(self.shards)
        self._starts = index.starts
        self._most = _MAX_TOGETHER[prefix.cost]
        self._threads = threads
        self._fetcher = TransformingFetcher(prefix, threads)
        self._is_drawn = bool(prefix.random or prefix.drawing)
        self._wishes: dict[tuple[Flow, int], list[_Wish]] = {}  # by job and seed
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = prefix.held

    def begin(self, work: Coroutine[None, None, None], name: str) -> None:
        """Do something in the background."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`."""
        reads = plan.part(slice(None))
        self._bounds.check(reads)
        reads, claims = reads.nonempty(), reads.claimed()
        pieces = pieces_of(reads, self._starts)
        draws = (self._is_drawn and pieces.draws) or Draws.first(len(pieces))
        epochs, numbers = np.unique(draws.epochs, return_inverse=True)
        keys, rows = np.unique(numbers * len(self._starts) + pieces.sample, return_inverse=True)
        which, ids = np.divmod(keys, len(self._starts))
        pairs = zip(epochs[which].tolist(), ids.tolist(), strict=True)
        wishes = [self._wish(draws.seed, epoch, number, claims) for epoch, number in pairs]
        records = await asyncio.gather(*wishes)
        begins = pieces.start - self._starts[pieces.sample]
        work = partial(self._copy, records, rows, begins, pieces)
        await self._threads.run_of(claims, reads.num_bytes, work)

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        raise StorageUnavailable("transformed samples are no file, and cannot be streamed")

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return self.shards[shard].name

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`: records are no files."""
        return None

    def _copy(
        self, records: Sequence[_Record], rows: Int64Array, begins: Int64Array, reads: Reads
    ) -> None:
        """Copy parts of records to where they are wanted; runs in a thread."""
        with reads.lease():
            ranges = zip(
                rows.tolist(), begins.tolist(), reads.size.tolist(), reads.target, strict=True
            )
            for row, begin, size, target in ranges:
                memory_at(int(target), size)[:] = records[row][begin : begin + size].data

    def _wish(
        self, seed: int, epoch: int, sample_id: int, claims: Claims
    ) -> "asyncio.Future[_Record]":
        """A record, which is made with all that the same job asks for meanwhile."""
        wish = _Wish(sample_id, epoch, claims, asyncio.get_running_loop().create_future())
        held = self._held.take(sample_id) if self._held else None
        if held is not None:
            wish.record.set_result(held)
            return wish.record
        key = claims.first[0], seed
        if key not in self._wishes:
            self._wishes[key] = []
            self.begin(self._make_all(*key), "make records")
        self._wishes[key].append(wish)
        return wish.record

    async def _make_all(self, flow: Flow, seed: int) -> None:
        await asyncio.sleep(0)  # until all that is ready to ask has asked
        wishes = sorted(self._wishes.pop((flow, seed)), key=lambda wish: wish.claims.first[1])
        together = range(0, len(wishes), self._most)
        await asyncio.gather(
            *(self._make(seed, wishes[begin : begin + self._most]) for begin in together)
        )

    async def _make(self, seed: int, wishes: Sequence[_Wish]) -> None:
        """Make some records; one that cannot be made fails for those alone who asked for it."""
        try:
            records = await self._made(seed, wishes)
        except Exception as error:
            if len(wishes) > 1:
                for wish in wishes:
                    await self._make(seed, [wish])
            elif not wishes[0].record.done():
                wishes[0].record.set_exception(error)
        except BaseException:
            for wish in wishes:
                wish.record.cancel()
            raise
        else:
            for wish, record in zip(wishes, records, strict=True):
                if not wish.record.done():
                    wish.record.set_result(record)

    async def _made(self, seed: int, wishes: Sequence[_Wish]) -> Sequence[_Record]:
        """Records that are made together; whoever needs one of them has all of them hastened."""
        claims = Claims(*wishes[0].claims.first)
        ids = np.array([[wish.sample_id for wish in wishes]], np.int64)
        plan = GroupPlan(0, ids, None, np.zeros(1, np.int64))
        (laid_out,) = self._fetcher.prepare(plan, 1)
        fetch = laid_out.drawn(seed, np.array([wish.epoch for wish in wishes], np.int64))
        memory = np.empty(fetch.layout.num_bytes, np.uint8)
        with contextlib.ExitStack() as told:
            for wish in wishes:
                told.enter_context(wish.claims.told(claims.join))
            place = Staging.of(memory)
            await self._fetcher.fill_for(claims, fetch, place, NOTHING_AHEAD, Delays())
            work = partial(self._joined, memory, fetch.layout.destinations)
            return await self._threads.run_of(claims, memory.nbytes, work)

    def _joined(self, memory: _Record, places: Int64Array) -> Sequence[_Record]:
        """The records, out of the tensors of a batch: views of it where they have one field."""
        if places.shape[1] == 1:
            return [memory[begin:end] for ((begin, end),) in places.tolist()]
        return [
            np.concatenate([memory[begin:end] for begin, end in its]) for its in places.tolist()
        ]


def pieces_of(reads: Reads, starts: Int64Array) -> Reads:
    """Reads of at least one byte, each in one record; their samples are the numbers of records.

    Args:
        reads: each may go over several records, and some of these may be empty.
        starts: of all records.
    """
    stop = reads.start + reads.size
    first = np.searchsorted(starts, reads.start, side="right") - 1
    counts = np.searchsorted(starts, stop - 1, side="right") - first
    of = np.repeat(np.arange(len(reads)), counts)
    record = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts) + first[of]
    begin = np.maximum(reads.start[of], starts[record])
    end = np.minimum(stop[of], starts[record + 1])
    target = reads.target[of] + (begin - reads.start[of]).astype(np.uint64)
    pieces = replace(reads.part(of), start=begin, size=end - begin, target=target, sample=record)
    return pieces.nonempty()


@dataclass(frozen=True, slots=True)
class _Made:
    """One source that was made: its dataset, how, and the result."""

    stored: Dataset
    transformed: Made
    made: KeptDataset


class MadeSources:
    """Makes each source once, and again when its dataset or its transforms are others."""

    def __init__(self, transforms: Transforms, threads: FairExecutor) -> None:
        """Make nothing yet.

        Args:
            transforms: of the daemon.
            threads: the daemon's.
        """
        self._transforms, self._threads = transforms, threads
        self._made: dict[str, _Made] = {}

    def of(self, name: str, dataset: Made, height: int) -> KeptDataset:
        """The results of a dataset's transforms, as a dataset of records.

        Args:
            name: of the source.
            dataset: transformed, and measured where that makes fields of different lengths.
            height: how many mixtures lie below the source, one in another.
        """
        last = self._made.get(name)
        if last and _is_same(last, dataset):
            return last.made
        made = dataset if isinstance(dataset, KeptDataset) else self._make(dataset, height)
        both = f"{dataset.fingerprint} {dataset.transforms}".encode()
        fingerprint = hashlib.blake2b(both, digest_size=16, person=b"gyre.made").hexdigest()
        shards = made.storage.shards
        made = replace(made, shards=shards, fingerprint=fingerprint, transforms="", made=())
        self._made[name] = _Made(dataset.stored, dataset, made)
        return made

    def _make(self, dataset: TransformedDataset, height: int) -> KeptDataset:
        passed = dataset.fields[len(dataset.made) :]
        prefix = self._transforms.for_records(dataset.sized_fully(), height)
        prefix = replace(prefix, chosen=as_records(dataset.made, passed))
        index = RecordIndex(dataset.source, prefix.fields, prefix.measured)
        shard = record_shard(index, dataset.source, dataset.recipe)
        storage = MadeStorage(prefix, index, shard, self._threads)
        made = kept_as(dataset.source, prefix, index, storage)
        return replace(made, drawing=(*dataset.drawing, *dataset.random))


def _is_same(last: _Made, dataset: Made) -> bool:
    before = last.transformed
    if isinstance(before, KeptDataset) or isinstance(dataset, KeptDataset):
        return before is dataset
    return (
        last.stored is dataset.stored
        and (before.recipe, before.transforms) == (dataset.recipe, dataset.transforms)
        and before.fingerprint == dataset.fingerprint
    )
