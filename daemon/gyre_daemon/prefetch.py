"""What a feed fetches next: steps are planned and laid out ahead, and several small batches are read together."""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.arena import Share, Slot
from gyre_daemon.arenas import Arenas
from gyre_daemon.cache import CachedStorage
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import first_error
from gyre_daemon.fair import FairExecutor, Flow
from gyre_daemon.fetch import NOTHING_AHEAD, Ahead, Batch, Fetch, Fetcher
from gyre_daemon.plan import NEVER, BatchPlan, Order, Plan
from gyre_daemon.storage import Delays
from gyre_daemon.window import Window

_MAX_PREPARED = 64  # batches that are laid out at once
_PLANNED_POSITIONS = 1 << 14  # at once: 2 ms
_MAX_BLOCKS_AHEAD = 64
_BULK_BYTES = 4 << 20  # batches that are read together where that is cheaper

Begun = list[tuple[Fetch, Slot]]
Outcome = Batch | Exception


@dataclass(frozen=True, slots=True)
class Spec:
    """What is fetched. Feeds of one spec give the same batches.

    Attributes:
        dataset: open.
        order: how to go through it.
        rank: whose part of each global batch.
        world_size: of how many.
        plan: of the order.
    """

    dataset: Dataset
    order: Order
    rank: int
    world_size: int
    plan: Plan

    def is_as(self, other: "Spec") -> bool:
        """Both give the same batches; the same dataset opened anew counts as another."""
        return self.dataset is other.dataset and (self.order, self.rank, self.world_size) == (
            other.order,
            other.rank,
            other.world_size,
        )


class Prefetcher:
    """Begins and fills the steps of one spec, in order from a first one on."""

    def __init__(self, spec: Spec, share: Share, first_step: int, flow: Flow, workers: FairExecutor) -> None:
        self._spec = spec
        self._flow = flow
        self._fetcher = Fetcher(spec.dataset, workers)
        self._share = share
        self._fetches: deque[Fetch] = deque()  # laid out, not begun
        self._next_to_plan = first_step
        self._next_to_begin = first_step
        self._plans: deque[BatchPlan] = deque()  # not laid out
        blockwise = spec.order.mode == "block"
        self._ahead = Ahead(spec.order.io_block_bytes, self._next_use) if blockwise else NOTHING_AHEAD
        storage = spec.dataset.storage
        self._announcer = _Announcer(spec, storage) if blockwise and isinstance(storage, CachedStorage) else None

    @property
    def _bulk(self) -> int:
        """How many batches are read together: several small ones where that is cheaper, but at most a quarter of the window."""
        if not self._spec.dataset.storage.reads_in_bulk:
            return 1
        return max(1, min(_BULK_BYTES // self._share.batch_bytes, self._share.num_ahead // 4))

    def may_begin(self, window: Window) -> bool:
        """There is room for as many steps as are read together, or for the last ones."""
        room = window.room
        return room >= self._bulk or (room > 0 and window.next_to_begin + room == window.end_step)

    def begin(self, window: Window, arenas: Arenas) -> Begun:
        """Begin the steps that are read together, as far as there are slots for them; call only where it may."""
        begun: Begun = []
        for _ in range(min(window.room, self._bulk)):
            fetch = self._next_fetch(window)
            slot = arenas.take(fetch.layout.num_bytes)
            if slot is None:
                break
            self._fetches.popleft()
            self._next_to_begin = window.begin() + 1
            begun.append((fetch, slot))
        return begun

    async def fill(self, begun: Begun, flow: Flow, delays: Delays) -> Sequence[Outcome]:
        """Read batches into their slots; where some fail, which do; `delays` are told what it took."""
        try:
            return await self._fetcher.fill(begun, flow, self._ahead, delays)
        except Exception as error:
            if len(begun) == 1:
                return [first_error(error) if isinstance(error, ExceptionGroup) else error]
        return [outcome for single in begun for outcome in await self.fill([single], flow, delays)]

    def _next_use(self, block_bytes: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """In how many samples from now blocks of this size are read again; see `Reads.next_use`."""
        plan, table = self._spec.plan, self._spec.dataset.index.blocks(block_bytes)
        position = self._next_to_begin * self._spec.order.global_batch_size
        uses = plan.next_use_of_blocks(table, blocks, position)
        return np.where(uses == NEVER, NEVER, uses - position)

    def _next_fetch(self, window: Window) -> Fetch:
        """The step to begin next, laid out together with those that follow it."""
        if not self._fetches:
            wanted = max(self._bulk, min(window.size, _MAX_PREPARED))
            if window.end_step is not None:
                wanted = min(wanted, max(window.room, 1))
            self._plan(wanted)
            plans = [self._plans.popleft() for _ in range(wanted)]
            self._fetches.extend(self._fetcher.prepare(plans))
            if self._announcer:
                self._announcer.announce(self._plans, wanted, window.end_step, self._flow)
        return self._fetches[0]

    def _plan(self, num_wanted: int) -> None:
        """Have so many steps planned at least, and those that are to be announced; many at once cost a third each."""
        num_missing = num_wanted + (self._announcer.num_steps if self._announcer else 0) - len(self._plans)
        if num_missing <= 0:
            return
        positions = self._spec.order.global_batch_size // self._spec.world_size
        num_steps = max(num_missing, min(_PLANNED_POSITIONS // positions, 4 * _MAX_PREPARED))
        plans = self._spec.plan.batches(self._next_to_plan, num_steps, self._spec.rank, self._spec.world_size)
        self._next_to_plan += len(plans)
        self._plans.extend(plans)


class _Announcer:
    """Tells the node cache which blocks a job reads next, earlier than the batches that read them are begun.

    A window of batches reaches only a few blocks ahead, since each block serves many batches: too few requests at once.
    """

    def __init__(self, spec: Spec, storage: CachedStorage) -> None:
        self._block_bytes = spec.order.io_block_bytes
        self._table = spec.dataset.index.blocks(self._block_bytes)
        self._storage = storage
        self._telling: set[asyncio.Task[None]] = set()
        self._num_announced = 0  # of the steps to come
        num_blocks = max(1, min(_MAX_BLOCKS_AHEAD, spec.order.window_blocks // 4))  # beside those of the window itself
        samples_ahead = num_blocks * spec.dataset.num_samples // max(1, self._table.num_blocks)
        self.num_steps = -(-samples_ahead // spec.order.global_batch_size)

    def announce(self, plans: Sequence[BatchPlan], num_taken: int, end_step: int | None, flow: Flow) -> None:
        """The blocks of the next steps will be read, in this order.

        Args:
            plans: of the steps to come.
            num_taken: so many were taken from their beginning since the last time.
            end_step: that nobody wants; None for no end.
            flow: the job.
        """
        self._num_announced = max(0, self._num_announced - num_taken)
        fresh = list(itertools.islice(plans, self._num_announced, self.num_steps))
        self._num_announced += len(fresh)
        ids = [plan.sample_ids for plan in fresh if end_step is None or plan.step < end_step]
        if not ids:
            return
        blocks = self._table.block_of(np.concatenate(ids))
        _, first = np.unique(blocks, return_index=True)
        telling = asyncio.create_task(self._storage.expect(self._block_bytes, blocks[np.sort(first)], flow))
        self._telling.add(telling)
        telling.add_done_callback(self._told)

    def _told(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled():
            telling.exception()  # an error is for those who read the block
