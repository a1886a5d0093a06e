"""Batch groups and records of samples that are transformed before they are served.

A batch group is cut into portions of consecutive samples, or of the documents of packed sequences.
The portions are read and transformed beside each other, and a thread copies each result,
and the fields that pass, into the slot.

Lengths that were not measured are known when all is made. Until then each sample has room for the
longest one; then the gaps are closed, so the batch is the same as with measured lengths.

*Records* are the made shard with the result of transforms for each sample. The step `cache` reads
them through the node cache, and a mixture reads the results of its sources' transforms there; see
[Note: How transformed samples are cached] in `transforms.declared`. Where transforms draw
random numbers, a record depends on the seed and the epoch that a read brings: see [Note: Samples of
sources that depend on chance] in `storage.reads`. Reads that come at the same time, as those of a
cache do, which fetches block by block, are made together, at the first turn of the jobs that wait
for any of them.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.dataset import Dataset, Memo
from gyre_daemon.datasets.formats import Extents, indexed_fields, stored_fields
from gyre_daemon.datasets.made_shards import CellMemory, CellReads, MadeStorage
from gyre_daemon.fetching.fetch import (
    NOTHING_AHEAD,
    Ahead,
    Fetch,
    TargetMemory,
    packed_fetches,
    plain_fetches,
)
from gyre_daemon.fetching.layout import (
    GroupLayout,
    LayoutMaker,
    rows_of,
    write_own_tensors,
    write_packed,
)
from gyre_daemon.fetching.portions import PortionPlan, PortionReader, ReadPortion, Staging
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.node import CachedStorage, NodeCache
from gyre_daemon.storage.reads import BlockCache, Delays, Draws, Reads, Storage
from gyre_daemon.storage.shard import Shard
from gyre_daemon.transforms.declared import (
    RECORD_BLOCKS,
    RecordIndex,
    TransformedDataset,
    Transforms,
    as_records,
    record_shard,
    records_of,
)
from gyre_daemon.transforms.recipes import Cost

_Bytes = npt.NDArray[np.uint8]


class _Filling(Struct, frozen=True):
    """A batch group of n samples that is being filled.

    Attributes:
        fetch: the group.
        slot: where it goes.
        draws: of its samples.
        lengths: int64 [n, R], the elements of each ragged output field, or their limits.
        told: int64 [n, R], gets the elements.
    """

    fetch: Fetch
    slot: TargetMemory
    draws: Draws
    lengths: Int64Array
    told: Int64Array

    def plan(self, some: slice) -> PortionPlan:
        """A portion of the group."""
        fetch, draws = self.fetch, self.draws.part(some)
        extents, step = fetch.extents.part(some), fetch.plan.first_step
        return PortionPlan(fetch.ids[some], draws, extents, step, self.lengths[some])


class TransformingFetcher:
    """Fills slots with batches of a dataset whose samples are transformed; see `Fetcher`."""

    def __init__(
        self,
        dataset: TransformedDataset,
        threads: FairExecutor,
    ) -> None:
        """Read nothing yet.

        Args:
            dataset: its samples are read.
            threads: the daemon's.
        """
        self._dataset, self._threads = dataset, threads
        self._portions = PortionReader(dataset, threads)
        self._layouts = LayoutMaker(dataset.served)
        stored = [spec.name for spec in stored_fields(dataset.source.fields)]
        # those of documents, where they are packed
        own = [spec.name for spec in stored_fields(dataset.chosen or ())]
        # the columns of the stored fields that pass, as they are in the slot and in the source
        self._passed = [
            (column, stored.index(name))
            for column, name in enumerate(own)
            if column >= len(dataset.made)
        ]
        self._indexed = [spec.name for spec in indexed_fields(dataset.source.fields)]
        # the columns of made ragged fields, and the bytes of an element
        self._ragged = [
            (column, spec.element_bytes) for column, spec in enumerate(dataset.made) if spec.ragged
        ]

    @property
    def lacks_lengths(self) -> bool:
        """Whether batches can only be read by `read_unmeasured`."""
        return bool(self._dataset.made_ragged) and not self._dataset.measured

    def cut(self, sample_ids: Int64Array) -> Iterator[slice]:
        """Cut samples into batches for `read_unmeasured`."""
        extents = self._dataset.index.locate(sample_ids)
        return self._portions.cut(extents, self._portions.guessed(extents))

    def prepare(self, plan: GroupPlan, num_together: int) -> list[Fetch]:
        """See `Fetcher.prepare`."""
        if packed := self._dataset.packed:
            rows = rows_of(packed, plan)
            documents = self._dataset.index.locate(rows.documents)
            return packed_fetches(packed, plan, num_together, rows, documents)
        ids = plan.sample_ids.reshape(-1)
        extents = self._dataset.index.locate(ids)
        sizes = self._sizes(self._lengths(ids), extents)
        return plain_fetches(plan, num_together, extents, sizes, self._layouts)

    def _lengths(self, ids: Int64Array) -> Int64Array:
        """Int64 [n, R], the elements of the ragged output fields."""
        if self._dataset.measured:
            return self._dataset.measured.lengths[ids].astype(np.int64)
        return np.empty((len(ids), 0), np.int64)

    def _sizes(self, lengths: Int64Array, extents: Extents) -> Int64Array:
        """Int64 [n, F], the bytes of the ragged fields, of those that are made and of others."""
        sizes = np.zeros((len(lengths), len(self._dataset.made) + len(self._passed)), np.int64)
        if lengths.shape[1]:
            for number, (column, element_bytes) in enumerate(self._ragged):
                sizes[:, column] = lengths[:, number] * element_bytes
        for column, stored in self._passed:
            sizes[:, column] = extents.tensor_bytes[:, stored]
        return sizes

    async def read_unmeasured(self, plan: GroupPlan, claims: Claims) -> tuple[Fetch, _Bytes]:
        """Read and transform a batch of samples whose lengths are not known before.

        A worker makes the samples and says how long each is. Where one finds no room in the
        exchange, all are made again, with their lengths known.

        Args:
            plan: one batch, no larger than a portion.
            claims: the job that reads.

        Returns:
            The batch as it is laid out, and its bytes.

        Raises:
            CorruptSample: as `fill`.
            Overloaded: as `fill`.
        """
        ids = plan.sample_ids.reshape(-1)
        extents, draws = self._dataset.index.locate(ids), Draws.first(len(ids))
        guessed = self._portions.guessed(extents)
        whole = PortionPlan(ids, draws, extents, plan.first_step, guessed)
        async with self._portions.transformed(whole, claims) as portion:
            lengths = self._portions.told(portion)
            layout = self._layouts.make(plan, self._sizes(lengths, extents))
            fetch, memory = Fetch(plan, extents, layout), np.empty(layout.num_bytes, np.uint8)
            place = Staging.of(memory)
            filling = _Filling(fetch, place, draws, lengths, lengths)
            have_fitted = bool((lengths <= guessed).all())
            if have_fitted:
                copy = partial(self._copy, portion, filling, slice(0, len(ids)))
                await self._threads.run_of(claims, portion.request.start, copy)
        for some in () if have_fitted else self._portions.cut(extents, lengths):
            await self._fill_portion(claims, filling, some, NOTHING_AHEAD, Delays())
        self._write_own(fetch, place, lengths)
        return fetch, memory

    async def fill(
        self,
        fetch: Fetch,
        slot: TargetMemory,
        claims: Claims,
        ahead: Ahead = NOTHING_AHEAD,
        delays: Delays | None = None,
    ) -> GroupLayout:
        """Read and transform a batch group into its slot; see `Fetcher.fill`.

        Raises:
            CorruptSample: names shard, sample, offset, transform and reason.
            Overloaded: no process can be started.
        """
        delays = delays or Delays()
        began = time.monotonic()
        draws = fetch.draws or Draws.first(len(fetch.ids))
        lengths = self._lengths(fetch.ids)
        filling = _Filling(fetch, slot, draws, lengths, np.zeros_like(lengths))
        async with asyncio.TaskGroup() as tasks:
            for some in self._portions.cut(fetch.extents, lengths):
                tasks.create_task(self._fill_portion(claims, filling, some, ahead, delays))
        work = partial(self._write_own, fetch, slot, filling.told)
        layout = await self._threads.run_of(claims, 0, work)
        if delays.num_requests:
            delays.storage_s = delays.read_s
        delays.finish_s = time.monotonic() - began - delays.read_s
        return layout

    def _write_own(self, fetch: Fetch, slot: TargetMemory, told: Int64Array) -> GroupLayout:
        layout = fetch.layout
        with slot.arena.lease():
            if self._dataset.packed and fetch.rows:
                packed = self._dataset.packed
                write_packed(packed, fetch.rows, fetch.plan, layout, slot.memory)
                return layout
            if self._dataset.has_limits:
                layout = self._without_gaps(fetch, slot, told)
            indexed = dict(zip(self._indexed, fetch.extents.indexed, strict=True))
            write_own_tensors(fetch.plan, layout, slot.memory, indexed)
        return layout

    def _without_gaps(self, fetch: Fetch, slot: TargetMemory, told: Int64Array) -> GroupLayout:
        """Move samples together if they are shorter than their limits.

        All move to lower addresses, in the order of these, so none overwrites another.

        Args:
            fetch: the batch group.
            slot: has the fields where `fetch.layout` says.
            told: int64 [n, R], the elements of each ragged field that was made.
        """
        before = fetch.layout
        places = before.destinations
        sizes = places[:, :, 1] - places[:, :, 0]
        for number, (column, element_bytes) in enumerate(self._ragged):
            sizes[:, column] = told[:, number] * element_bytes
        layout = GroupLayout.at(before.offsets, self._layouts.make(fetch.plan, sizes).batches)
        moves = np.stack((layout.destinations[:, :, 0], places[:, :, 0], sizes), axis=2)
        into, size = np.frombuffer(slot.memory, np.uint8), fetch.plan.sample_ids.shape[1]
        for first in range(0, len(moves), size):
            of_batch = moves[first : first + size].swapaxes(0, 1)  # one field after the other
            for begin, source, num in of_batch.reshape(-1, 3).tolist():
                into[begin : begin + num] = into[source : source + num]
        return layout

    async def _fill_portion(
        self, claims: Claims, filling: _Filling, some: slice, ahead: Ahead, delays: Delays
    ) -> None:
        part = filling.plan(some)
        async with self._portions.transformed(part, claims, ahead, delays) as portion:
            filling.told[some] = self._portions.lengths_of(portion)
            copy = self._copy if filling.fetch.rows is None else self._copy_documents
            work = partial(copy, portion, filling, some)
            await self._threads.run_of(claims, portion.request.start, work)

    def _copy(self, portion: ReadPortion, where: _Filling, some: slice) -> None:
        """Copy made and passing fields into the slot; runs in a thread."""
        fetch, begin, slot = where.fetch, some.start, where.slot
        with slot.arena.lease():
            into, memory = np.frombuffer(slot.memory, np.uint8), portion.exchange.memory
            destinations, stored = fetch.layout.destinations[begin:], portion.staged.destinations
            room = portion.plan.lengths
            assert room is not None
            are_places_full = np.array_equal(where.told[some], room)
            limited = [] if are_places_full else self._ragged
            for number, (column, element_bytes) in enumerate(limited):
                sizes = (where.told[some, number] * element_bytes).tolist()
                sources = portion.made[column].tolist()
                for sample, at in enumerate(destinations[: len(sizes), column, 0].tolist()):
                    source, size = sources[sample], sizes[sample]
                    into[at : at + size] = memory[source : source + size]
            alone = {column for column, _ in limited}
            for first, stop in _runs(len(portion.plan), begin, fetch.plan.sample_ids.shape[1]):
                begins, ends = destinations[first, :, 0], destinations[stop - 1, :, 1]
                for column, places in enumerate(portion.made):
                    if column not in alone:
                        made = memory[places[first] : places[stop]]
                        into[begins[column] : ends[column]] = made
                for column, source in self._passed:
                    at, end = stored[first, source, 0], stored[stop - 1, source, 1]
                    into[begins[column] : ends[column]] = memory[at:end]

    def _copy_documents(self, portion: ReadPortion, where: _Filling, some: slice) -> None:
        """Copy parts of documents into their sequences; see `_copy`."""
        fetch, slot = where.fetch, where.slot
        packed, rows = self._dataset.packed, fetch.rows
        assert packed
        assert rows
        into, memory = np.frombuffer(slot.memory, np.uint8), portion.exchange.memory
        passed = dict(self._passed)
        with slot.arena.lease():
            for number, (column, spec) in enumerate(packed.read.items()):
                if column in passed:
                    starts = portion.staged.destinations[:, passed[column], 0]
                else:
                    starts = portion.made[column][:-1]
                if rows.begins is not None:
                    starts = starts + rows.begins[some] * spec.dtype.itemsize
                places = fetch.layout.destinations[some, number].tolist()
                for (at, end), start in zip(places, starts.tolist(), strict=True):
                    into[at:end] = memory[start : start + end - at]


def _runs(num: int, begin: int, size: int) -> Iterator[tuple[int, int]]:
    """The samples `[first, stop)` of each batch, in which the fields are contiguous.

    Args:
        num: samples of a portion.
        begin: the first of them, counted over batches of equal size.
        size: of a batch.
    """
    first = 0
    while first < num:
        stop = min(num, first + size - (begin + first) % size)
        yield first, stop
        first = stop


_MAX_SOURCES = 1024  # as many as are configured
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
    """The storage of records, behind the node's cache; see `transforms.declared.Keep`."""
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
    record: "asyncio.Future[_Bytes]"


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
    ) -> "asyncio.Future[_Bytes]":
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

    async def _records(self, seed: int, wishes: Sequence[_Wish]) -> Sequence[_Bytes]:
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

    def _joined(self, memory: _Bytes, places: Int64Array) -> Sequence[_Bytes]:
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
