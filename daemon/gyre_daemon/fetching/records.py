"""Records: the made shard with the result of transforms for each sample.

The step `cache` reads them through the node cache, and a mixture reads the results of its sources'
transforms there; see [Note: How transformed samples are cached] in `transforms.made_samples`. Where
transforms draw random numbers, a record depends on the seed and the epoch that a read brings: see
[Note: Samples of sources that depend on chance] in `storage.base`. Reads that come at the same
time, as those of a cache do, which fetches block by block, are made together, at the first turn of
the jobs that wait for any of them.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.dataset import Dataset, Memo
from gyre_daemon.datasets.made_shards import CellMemory, CellReads, MadeStorage
from gyre_daemon.fetching.portions import Staging
from gyre_daemon.fetching.transformed import TransformingFetcher
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow
from gyre_daemon.storage.base import (
    BlockCache,
    Draws,
    Reads,
    Storage,
)
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.node import CachedStorage, NodeCache
from gyre_daemon.storage.shard import Shard
from gyre_daemon.transforms.declared import TransformedDataset, Transforms
from gyre_daemon.transforms.made_samples import (
    RECORD_BLOCKS,
    RecordIndex,
    as_records,
    record_shard,
    records_of,
)
from gyre_daemon.transforms.recipes import Cost

_MAX_SOURCES = 1024  # as many as are configured
_Record = npt.NDArray[np.uint8]
# Samples that are transformed together: as many as a worker is given at once.
_MAX_TOGETHER: dict[Cost, int] = {"light": 512, "heavy": 16, "slow": 1}


class CachedRecords(CachedStorage):
    """Records behind the node's cache. Orders know no blocks of them."""

    @property
    def block_cache(self) -> BlockCache | None:
        """See `Storage.block_cache`."""
        return None


def keep_records(
    cache: NodeCache, threads: FairExecutor, prefix: Dataset, index: RecordIndex, shard: Shard
) -> Storage:
    """The storage of records, behind the node's cache; see `transforms.made_samples.Keep`."""
    assert isinstance(prefix, TransformedDataset)

    def block_map(size: int) -> BlockMap:
        table = index.blocks(size)
        borders = index.starts[table.first_sample(np.arange(table.num_blocks + 1))]
        return BlockMap(np.zeros_like(borders[1:]), borders[:-1], borders[1:])

    records = MadeStorage(RunChain(prefix, index, shard, threads), threads)
    return CachedRecords(records, shard.name, cache, block_map, RECORD_BLOCKS)


class _Wish(Struct, frozen=True):
    """A record that somebody waits for; `claims` are those of all who do."""

    sample_id: int
    epoch: int
    claims: Claims
    record: "asyncio.Future[_Record]"


class RunChain:
    """The recipe of records: a cell is the result of transforms for one sample.

    Attributes:
        shards: the one shard of all records.
    """

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
        self._starts = index.starts
        self._most = _MAX_TOGETHER[prefix.cost]
        self._threads = threads
        self._fetcher = TransformingFetcher(prefix, threads)
        self._is_drawn = bool(prefix.random or prefix.drawing)
        self._wishes: dict[tuple[Flow, int], list[_Wish]] = {}  # by job and seed
        self._tasks: set[asyncio.Task[None]] = set()

    def split(self, reads: Reads) -> Iterable[CellReads]:
        """See `Recipe.split`: all records of a read together."""
        pieces = pieces_of(reads, self._starts)
        if len(pieces):
            yield CellReads(pieces.sample, pieces)

    @asynccontextmanager
    async def made(self, its: CellReads) -> AsyncIterator[CellMemory]:
        """See `Recipe.made`."""
        reads, num_records = its.reads, len(self._starts)
        draws = (self._is_drawn and reads.draws) or Draws.first(len(reads))
        epochs, numbers = np.unique(draws.epochs, return_inverse=True)
        keys, rows = np.unique(numbers * num_records + its.cells, return_inverse=True)
        which, ids = np.divmod(keys, num_records)
        pairs = zip(epochs[which].tolist(), ids.tolist(), strict=True)
        claims = reads.claimed()
        wishes = [self._wish(draws.seed, epoch, number, claims) for epoch, number in pairs]
        records = await asyncio.gather(*wishes)
        addresses = np.array([record.ctypes.data for record in records], np.uint64)
        begins = (reads.start - self._starts[its.cells]).astype(np.uint64)
        yield CellMemory(records, addresses[rows] + begins)

    def _wish(
        self, seed: int, epoch: int, sample_id: int, claims: Claims
    ) -> "asyncio.Future[_Record]":
        """A record, which is made with all that the same job asks for meanwhile."""
        wish = _Wish(sample_id, epoch, claims, asyncio.get_running_loop().create_future())
        key = claims.first[0], seed
        if key not in self._wishes:
            self._wishes[key] = []
            task = asyncio.create_task(self._make_all(*key), name="make records")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._wishes[key].append(wish)
        return wish.record

    async def _make_all(self, flow: Flow, seed: int) -> None:
        await asyncio.sleep(0)  # until all who are ready have asked
        wishes = sorted(self._wishes.pop((flow, seed)), key=lambda wish: wish.claims.first[1])
        together = range(0, len(wishes), self._most)
        await asyncio.gather(
            *(self._make(seed, wishes[begin : begin + self._most]) for begin in together)
        )

    async def _make(self, seed: int, wishes: Sequence[_Wish]) -> None:
        """Make some records; one that cannot be made fails for those alone who asked for it."""
        try:
            records = await self._records(seed, wishes)
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

    async def _records(self, seed: int, wishes: Sequence[_Wish]) -> Sequence[_Record]:
        """Make records together; whoever needs one of them has all of them hastened."""
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
            await self._fetcher.fill(fetch, place, claims)
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


class MadeSources:
    """Makes each source once, and again when its dataset or its transforms are others."""

    def __init__(self, transforms: Transforms, threads: FairExecutor) -> None:
        """Make nothing yet.

        Args:
            transforms: of the daemon.
            threads: the daemon's.
        """
        self._transforms, self._threads = transforms, threads
        self._made: Memo[Dataset] = Memo(_MAX_SOURCES)

    def of(self, name: str, dataset: Dataset, height: int) -> Dataset:
        """The results of a dataset's transforms, as a dataset of records.

        Args:
            name: of the source.
            dataset: transformed, and measured where that makes fields of different lengths.
            height: the depth of nested mixtures below the source.
        """
        origin: tuple[object, ...] = (dataset,)
        if isinstance(dataset, TransformedDataset):
            facts = dataset.recipe, dataset.transforms, dataset.fingerprint
            origin = dataset.stored, *facts
        if found := self._made.get(name, *origin):
            return found
        made = dataset
        if isinstance(dataset, TransformedDataset):
            made = self._make(dataset, height)
        both = f"{dataset.fingerprint} {dataset.transforms}".encode()
        fingerprint = hashlib.blake2b(both, digest_size=16, person=b"gyre.made").hexdigest()
        shards = made.storage.shards
        made = replace(made, shards=shards, fingerprint=fingerprint, transforms="", made=())
        return self._made.keep(made, name, *origin)

    def _make(self, dataset: TransformedDataset, height: int) -> Dataset:
        passed = dataset.fields[len(dataset.made) :]
        prefix = self._transforms.for_records(dataset.sized_fully(), height)
        prefix = replace(prefix, chosen=as_records(dataset.made, passed))
        assert prefix.measured
        index = RecordIndex(prefix.measured, prefix.fields)
        shard = record_shard(index, dataset.source, dataset.recipe)
        storage = MadeStorage(RunChain(prefix, index, shard, self._threads), self._threads)
        drawing = (*dataset.drawing, *dataset.random)
        return replace(records_of(prefix, index, storage), drawing=drawing)
