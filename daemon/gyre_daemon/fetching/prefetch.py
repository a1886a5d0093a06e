"""Plans the steps of a shared stream ahead, and reads its batch groups.

A batch group is one batch, or several small ones, laid out in one slot and read together.

A `RangeReader` reads a range of samples in the order of their ids, for tools that read a dataset
once. Nothing is measured before: each sample is transformed once. Batches are read several at a
time, and come in order.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import first_error
from gyre_daemon.fetching.fetch import NOTHING_AHEAD, Ahead, BatchGroup, Fetch, Fetcher
from gyre_daemon.fetching.layout import BatchLayout, GroupLayout
from gyre_daemon.fetching.portions import Staging, cut_by_size
from gyre_daemon.fetching.transformed import TransformingFetcher
from gyre_daemon.memory.arenas import Slot
from gyre_daemon.memory.share import Share
from gyre_daemon.order.balance import CostRule
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.order.steps import NEVER, GroupPlan, Phase, Stage
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow
from gyre_daemon.storage.reads import BlockCache, Delays
from gyre_daemon.transforms.declared import TransformedDataset

# Batches that are laid out at once, unless a batch group has more. To lay out many costs less for
# each, but the event loop does nothing else meanwhile.
_MAX_PREPARED = 64
# The first batches that are laid out have this many bytes: a first batch does not wait for others.
_FIRST_BYTES = 4 << 20
# Positions that are planned at once, in a quarter of a millisecond. Fewer cost more for each; the
# pages of larger arrays are given back to the system and faulted in again each time.
_PLANNED_POSITIONS = 1 << 13
# Epochs that are planned at once where a batch goes through a large part of one. Each takes up to
# half a millisecond; with more, a job on a tiny dataset would plan for seconds before it reads.
_PLANNED_EPOCHS = 4
# A plan that costs more positions than this is made in a thread: it may take over 4 ms. Smaller
# plans are made at once, since a thread may have to wait for its turn behind reads.
_MAX_COST_ON_LOOP = 1 << 16
# Blocks that are announced ahead. More would push blocks out of the cache that are still needed.
_MAX_BLOCKS_AHEAD = 64


_Planned = tuple[tuple[Stage, ...], tuple[Phase, ...]]
SpecKey = tuple[int, str, str, Order, CostRule | None, _Planned, int, int, int]


class Spec(Struct, frozen=True):
    """The request of a stream.

    Attributes:
        dataset: an open one.
        order: how to go through it.
        rank: the one whose part of each global batch is fetched.
        world_size: the number of ranks.
        planner: plans the samples of each step in this order.
        num_wished: the window in batches that was asked for; 0 where the size of a batch decides.
        balance: costs of samples, if they decide which rank reads which.
    """

    dataset: Dataset
    order: Order
    rank: int
    world_size: int
    planner: BatchPlanner
    num_wished: int
    balance: CostRule | None = None

    @property
    def key(self) -> SpecKey:
        """Equal for streams that are shared; a dataset that was opened again differs."""
        dataset, ranks = self.dataset, (self.rank, self.world_size)
        data = id(dataset.storage), dataset.fingerprint, dataset.transforms
        planned = self.planner.stages.all, self.planner.phases
        order = self.order, self.balance, planned
        return *data, *order, *ranks, self.num_wished


def _fetcher_of(dataset: Dataset, threads: FairExecutor) -> Fetcher | TransformingFetcher:
    if isinstance(dataset, TransformedDataset):
        return TransformingFetcher(dataset, threads)
    return Fetcher(dataset, threads)


class Prefetcher:
    """Plans the steps of one spec, from a first one on in their order, and reads them.

    Attributes:
        share: the memory, whose window and batch groups it plans for.
    """

    def __init__(
        self, spec: Spec, share: Share, first_step: int, flow: Flow, workers: FairExecutor
    ) -> None:
        self.share = share
        self._spec = spec
        self._flow = flow
        self._workers = workers
        self._num_rewinds = 0
        self._fetcher = _fetcher_of(spec.dataset, workers)
        is_transformed = isinstance(self._fetcher, TransformingFetcher)
        self._is_drawn = is_transformed or bool(spec.dataset.drawing)
        self._fetches: deque[Fetch] = deque()  # laid out, not begun
        self._next_to_begin = first_step
        self._in_groups = True
        self._num_prepared = max(1, min(_FIRST_BYTES // share.batch_bytes, _MAX_PREPARED))  # grows
        self._plans = spec.planner.batches(
            first_step, 0, spec.rank, spec.world_size
        )  # not laid out
        blockwise = spec.order.mode == "block"
        self._ahead = (
            Ahead(spec.order.io_block_bytes, self._next_use) if blockwise else NOTHING_AHEAD
        )
        cache = spec.dataset.storage.block_cache
        self._announcer = _Announcer(spec, cache) if blockwise and cache else None

    def next_fetch(self, max_steps: int) -> Fetch:
        """The next batch group of those that were prepared; the same again until it is `begun`.

        Args:
            max_steps: the most steps that it may have, at least 1.
        """
        fetch = self._fetches[0]
        if max_steps < len(fetch.plan):
            self._fetches.insert(1, fetch.part(max_steps, len(fetch.plan)))
            fetch = self._fetches[0] = fetch.part(0, max_steps)
        return fetch

    def begun(self) -> None:
        """The next batch group is being read."""
        self._next_to_begin = self._fetches.popleft().plan.stop_step

    def rewind(self, step: int) -> None:
        """Go on at this step, which was begun before."""
        self._fetches.clear()
        self._num_rewinds += 1
        self._next_to_begin = step
        self._plans = self._spec.planner.batches(step, 0, self._spec.rank, self._spec.world_size)
        if self._announcer:
            self._announcer.rewind()

    async def fill(self, fetch: Fetch, slot: Slot, flow: Flow, delays: Delays) -> BatchGroup:
        """Read a batch group into its slot; where it fails, batch by batch.

        `delays` are told the time it took.
        """
        if self._is_drawn and fetch.draws is None:
            planner, ranks = self._spec.planner, (self._spec.rank, self._spec.world_size)
            epochs = planner.epochs(fetch.plan.first_step, len(fetch.plan), *ranks)
            fetch = fetch.drawn(self._spec.order.seed, epochs)
        try:
            claims = Claims(flow, fetch.plan.first_step)
            layout = await self._fetcher.fill(fetch, slot, claims, self._ahead, delays)
            return BatchGroup(fetch.plan, layout, slot)
        except Exception as error:
            failure = first_error(error) if isinstance(error, ExceptionGroup) else error
        if len(fetch.plan) == 1:
            errors = {fetch.plan.first_step: failure}
            return BatchGroup(fetch.plan, fetch.layout, slot, errors)
        errors = {}
        batches: list[BatchLayout] = []
        for row in range(len(fetch.plan)):
            single = await self.fill(fetch.part(row, row + 1), slot, flow, delays)
            errors.update(single.errors)
            batches += single.layout.batches
        layout = GroupLayout.at(fetch.layout.offsets, batches)
        return BatchGroup(fetch.plan, layout, slot, errors)

    def _next_use(self, block_bytes: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """After how many samples from now each block is read again; see `Reads.next_use`."""
        planner, table = self._spec.planner, self._spec.dataset.index.blocks(block_bytes)
        position = self._spec.order.position_of(self._next_to_begin)
        uses = planner.next_use_of_blocks(table, blocks, position)
        return np.where(uses == NEVER, NEVER, uses - position)

    async def prepare(self, end_step: int | None, *, in_groups: bool) -> None:
        """Lay out the next batch groups, unless some are left; in a thread where that takes long.

        Args:
            end_step: the first step that nobody wants; None for no end.
            in_groups: whether several batches are laid out together, if the share says so.
        """
        if in_groups != self._in_groups:
            self._in_groups = in_groups
            if self._fetches and self.share.num_together > 1:
                self.rewind(self._next_to_begin)
        while not self._fetches:
            sizes, plans, num_rewinds = self._sizes(end_step), self._plans, self._num_rewinds
            cost = self._spec.planner.cost_of(sizes.num_planned, self._spec.world_size)
            work = partial(self._lay_out, plans, sizes)
            if cost <= _MAX_COST_ON_LOOP:
                fetches, rest = work()
            else:
                fetches, rest = await self._workers.run(self._flow, cost, plans.first_step, work)
            if num_rewinds != self._num_rewinds:
                continue
            self._num_prepared = sizes.num_next_time
            self._fetches.extend(fetches)
            self._plans = rest
            if self._announcer:
                self._announcer.announce(rest, sizes.num_wanted, end_step, self._flow)

    def _sizes(self, end_step: int | None) -> "_Sizes":
        """How much is laid out next, and how much is planned for that.

        A step costs a third where many are planned at once.
        """
        num_together = self.share.num_together if self._in_groups else 1
        most = max(_MAX_PREPARED, num_together)
        # blocks are announced behind the laid out steps, which must not lag behind the window
        num_prepared = (
            min(self.share.window_batches, most) if self._announcer else self._num_prepared
        )
        num_prepared = min(num_prepared, self._steps_in(_PLANNED_EPOCHS))
        together = min(num_together, num_prepared)
        wanted = num_prepared // together * together
        doubled = min(2 * wanted, most)
        if end_step is not None:
            wanted = min(wanted, max(end_step - self._next_to_begin, 1))
        num_announced = self._announcer.num_steps if self._announcer else 0
        num_missing = max(0, wanted + num_announced - len(self._plans))
        positions = self._spec.planner.positions_of(1, self._spec.world_size)
        many = min(_PLANNED_POSITIONS // positions, self._steps_in(_PLANNED_EPOCHS))
        return _Sizes(wanted, together, max(num_missing, many) if num_missing else 0, doubled)

    def _steps_in(self, num_epochs: int) -> int:
        """How many steps this many epochs have, at least one."""
        planner = self._spec.planner
        return max(1, num_epochs * planner.epoch_length // planner.order.global_batch_size)

    def _lay_out(self, plans: GroupPlan, sizes: "_Sizes") -> tuple[list[Fetch], GroupPlan]:
        """The next batch groups, and the plans of the steps behind them; in any thread."""
        if sizes.num_planned:
            spec = self._spec
            plans += spec.planner.batches(
                plans.stop_step, sizes.num_planned, spec.rank, spec.world_size
            )
        fetches = self._fetcher.prepare(plans[: sizes.num_wanted], sizes.num_together)
        return fetches, plans[sizes.num_wanted :]


class _Sizes(NamedTuple):
    """How much is planned and laid out at once, in steps.

    Attributes:
        num_wanted: steps that are laid out.
        num_together: steps of each batch group.
        num_planned: steps that must be planned for that, and for the announcement; 0 for none.
        num_next_time: the most that may be laid out the next time.
    """

    num_wanted: int
    num_together: int
    num_planned: int
    num_next_time: int


class _Announcer:
    """Tells the node cache which blocks a job reads next, before it begins the batches.

    Each block serves many batches, so a window of batches reaches only a few blocks ahead: too few
    requests would be under way at once.
    """

    def __init__(self, spec: Spec, cache: BlockCache) -> None:
        self._block_bytes = spec.order.io_block_bytes
        self._table = spec.dataset.index.blocks(self._block_bytes)
        self._cache = cache
        self._telling: set[asyncio.Task[None]] = set()
        self._num_announced = 0  # the steps to come whose blocks were announced
        # beside the blocks of the window itself
        num_blocks = max(1, min(_MAX_BLOCKS_AHEAD, spec.order.window_blocks // 4))
        num_all = max(1, self._table.num_blocks)
        samples_ahead = min(num_blocks, num_all) * spec.dataset.num_samples // num_all
        self.num_steps = -(-samples_ahead // spec.order.global_batch_size)

    def rewind(self) -> None:
        """Other steps come next than those that were announced."""
        self._num_announced = 0

    def announce(self, plans: GroupPlan, num_taken: int, end_step: int | None, flow: Flow) -> None:
        """Tell the cache that the blocks of the next steps will be read, in this order.

        Args:
            plans: the steps to come.
            num_taken: how many steps were taken from their beginning since the last call.
            end_step: the first step that nobody wants; None for no end.
            flow: the job that reads them.
        """
        self._num_announced = max(0, self._num_announced - num_taken)
        fresh = plans[self._num_announced : self.num_steps]
        if end_step is not None:
            fresh = fresh[: max(0, end_step - fresh.first_step)]
        self._num_announced += len(fresh)
        if not fresh:
            return
        blocks = self._table.block_of(fresh.sample_ids.reshape(-1))
        _, first = np.unique(blocks, return_index=True)
        telling = asyncio.create_task(
            self._cache.expect(self._block_bytes, blocks[np.sort(first)], flow)
        )
        self._telling.add(telling)
        telling.add_done_callback(self._told)

    def _told(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled():
            telling.exception()  # the read of the block gets the error, too


# Samples whose places are looked up together.
_AT_ONCE = 1 << 14
# Of a batch without transforms; one of a portion is as large as that. With smaller ones a client
# would spend its time on messages, and larger ones hold more memory: a call has three batches for
# each core, and two more.
_MAX_SAMPLES, _MAX_BYTES = 1024, 4 << 20
_AHEAD_PER_CORE, _AHEAD = 3, 2

Batch = tuple[BatchLayout, npt.NDArray[np.uint8]]


class RangeReader:
    """Reads ranges of one dataset."""

    def __init__(self, dataset: Dataset, threads: FairExecutor) -> None:
        """Read nothing yet.

        Args:
            dataset: an open one; if its samples are transformed, they need not be measured.
            threads: the daemon's.
        """
        self._dataset, self._flow = dataset, Flow("ranges")
        self._fetcher = _fetcher_of(dataset, threads)
        self._unmeasured: TransformingFetcher | None = None
        if isinstance(self._fetcher, TransformingFetcher) and self._fetcher.lacks_lengths:
            self._unmeasured = self._fetcher
        self._num_ahead = _AHEAD + _AHEAD_PER_CORE * len(os.sched_getaffinity(0))

    async def read(self, first: int, stop: int) -> AsyncGenerator[Batch, None]:
        """Yield the samples `[first, stop)`, without corrupt ones that others replace.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            GyreError: a shard cannot be read, or no process can be started.
        """
        ids = np.arange(first, min(stop, self._dataset.num_samples))
        ids = ids[~np.isin(ids, self._dataset.corrupt)]
        ahead: deque[asyncio.Task[Batch]] = deque()
        try:
            for step, some in enumerate(self._cut(ids)):
                ahead.append(asyncio.create_task(self._batch(step, some)))
                if len(ahead) > self._num_ahead:
                    yield await ahead.popleft()
            while ahead:
                yield await ahead.popleft()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _batch(self, step: int, ids: Int64Array) -> Batch:
        claims = Claims(self._flow, step)
        plan = GroupPlan(step, ids[None], None, np.zeros(1, np.int64))
        if self._unmeasured:
            fetch, memory = await self._unmeasured.read_unmeasured(plan, claims)
            return fetch.layout.batches[0], memory
        (fetch,) = self._fetcher.prepare(plan, 1)
        memory = np.empty(fetch.layout.num_bytes, np.uint8)
        layout = await self._fetcher.fill(fetch, Staging.of(memory), claims)
        return layout.batches[0], memory

    def _cut(self, ids: Int64Array) -> Iterator[Int64Array]:
        """Cut samples into batches."""
        dataset = self._dataset
        for begin in range(0, len(ids), _AT_ONCE):
            some = ids[begin : begin + _AT_ONCE]
            if self._unmeasured:
                yield from (some[its] for its in self._unmeasured.cut(some))
                continue
            if dataset.packed:
                sizes = np.full(len(some), dataset.num_bytes // dataset.num_samples)
            else:
                extents = dataset.index.locate(some)
                sizes = np.maximum(extents.size, extents.tensor_bytes).sum(axis=1)
            yield from (some[its] for its in cut_by_size(sizes, _MAX_BYTES, _MAX_SAMPLES))
