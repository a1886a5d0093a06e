"""What a feed fetches next: steps are planned and laid out ahead, and several small batches are a strip, read together."""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import first_error
from gyre_daemon.fetching.account import BatchAccount
from gyre_daemon.fetching.fetch import NOTHING_AHEAD, Ahead, Fetch, Fetcher, Strip
from gyre_daemon.fetching.window import Window
from gyre_daemon.memory.arena import Slot
from gyre_daemon.memory.arenas import Arenas
from gyre_daemon.memory.share import Share
from gyre_daemon.order.plan import NEVER, Order, Plan
from gyre_daemon.order.steps import StripPlan
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.storage.cache.cached import CachedStorage
from gyre_daemon.storage.delays import Delays

_MAX_PREPARED = 64  # batches that are laid out at once, unless a strip has more
_FIRST_BYTES = 4 << 20  # so many at first: a first batch does not wait for many others
_PLANNED_POSITIONS = 1 << 13  # at once: a quarter of a millisecond; larger arrays have their pages faulted in anew each time
_MAX_BLOCKS_AHEAD = 64


@dataclass(frozen=True, slots=True)
class Begun:
    """A strip that is to be read, and where it goes."""

    fetch: Fetch
    slot: Slot

    @property
    def first_step(self) -> int:
        """The strip's."""
        return self.fetch.plan.first_step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a strip.

    Attributes:
        strip: its batches, whole but for those that failed.
        errors: by step, why a batch failed.
    """

    strip: Strip
    errors: Mapping[int, Exception]

    def good(self, steps: range) -> range:
        """These steps up to the first that failed; empty where that is the first of all."""
        return next((range(steps.start, step) for step in steps if step in self.errors), steps) if self.errors else steps


@dataclass(frozen=True, slots=True)
class Spec:
    """What is fetched. Feeds of one spec give the same batches.

    Attributes:
        dataset: open.
        order: how to go through it.
        rank: whose part of each global batch.
        world_size: of how many.
        plan: of the order.
        num_wished: batches ahead that were asked for; 0 where the size of a batch decides.
    """

    dataset: Dataset
    order: Order
    rank: int
    world_size: int
    plan: Plan
    num_wished: int

    def is_as(self, other: "Spec") -> bool:
        """Both give the same batches; the same dataset opened anew counts as another."""
        return self.dataset is other.dataset and self._terms == other._terms

    @property
    def _terms(self) -> tuple[Order, int, int, int]:
        return self.order, self.rank, self.world_size, self.num_wished


def account_of(
    spec: Spec, job: str, outcome: Outcome, times: tuple[float, float], delays: Delays, *, is_awaited: bool
) -> BatchAccount:
    """What became of a strip.

    Args:
        spec: that it is of.
        job: for which it was read.
        outcome: of it.
        times: when it was begun and when it was whole, on the daemon's clock.
        delays: of its reads.
        is_awaited: somebody waited for it.
    """
    plan, (began, ended) = outcome.strip.plan, times
    return BatchAccount(
        dataset=spec.dataset.name,
        job=job,
        rank=spec.rank,
        world_size=spec.world_size,
        first_step=plan.first_step,
        stop_step=plan.stop_step,
        begun_at=began,
        total_s=ended - began,
        is_awaited=is_awaited,
        delays=delays,
        error=next(map(str, outcome.errors.values()), ""),
    )


class Prefetcher:
    """Begins and fills the steps of one spec, in order from a first one on.

    Attributes:
        num_together: batches that make a strip from now on.
    """

    def __init__(self, spec: Spec, share: Share, first_step: int, flow: Flow, workers: FairExecutor) -> None:
        self._spec = spec
        self._flow = flow
        self._fetcher = Fetcher(spec.dataset, workers)
        self.num_together = share.num_together
        self._fetches: deque[Fetch] = deque()  # laid out, not begun
        self._next_to_begin = first_step
        self._num_prepared = max(1, min(_FIRST_BYTES // share.batch_bytes, _MAX_PREPARED))  # grows
        self._plans = spec.plan.batches(first_step, 0, spec.rank, spec.world_size)  # not laid out
        blockwise = spec.order.mode == "block"
        self._ahead = Ahead(spec.order.io_block_bytes, self._next_use) if blockwise else NOTHING_AHEAD
        storage = spec.dataset.storage
        self._announcer = _Announcer(spec, storage) if blockwise and isinstance(storage, CachedStorage) else None

    def may_begin(self, window: Window) -> bool:
        """There is room for a whole strip, or for the last steps."""
        room = window.room
        return room >= self.num_together or (room > 0 and window.next_to_begin + room == window.end_step)

    def begin(self, window: Window, arenas: Arenas) -> Begun | None:
        """Begin a strip, if there is a slot for it; call only where it may."""
        fetch, num_steps = self._next_fetch(window), min(window.room, self.num_together)
        if num_steps < len(fetch.plan):
            self._fetches.insert(1, fetch.part(num_steps, len(fetch.plan)))
            fetch = self._fetches[0] = fetch.part(0, num_steps)
        slot = arenas.take(fetch.layout.num_bytes)
        if slot is None:
            return None
        self._fetches.popleft()
        self._next_to_begin = window.begin(len(fetch.plan)).stop
        return Begun(fetch, slot)

    def rewind(self, step: int) -> None:
        """Begin at this step next, which was begun before."""
        if step == self._next_to_begin:
            return
        self._fetches.clear()
        self._next_to_begin = step
        self._plans = self._spec.plan.batches(step, 0, self._spec.rank, self._spec.world_size)
        if self._announcer:
            self._announcer.rewind()

    async def fill(self, begun: Begun, flow: Flow, delays: Delays) -> Outcome:
        """Read a strip into its slot; where some batches fail, which do; `delays` are told what it took."""
        fetch, slot = begun.fetch, begun.slot
        try:
            return Outcome(await self._fetcher.fill(fetch, slot, flow, self._ahead, delays), {})
        except Exception as error:
            failure = first_error(error) if isinstance(error, ExceptionGroup) else error
        if len(fetch.plan) == 1:
            return Outcome(Strip(fetch.plan, fetch.layout, slot), {fetch.plan.first_step: failure})
        singles = [Begun(fetch.part(row, row + 1), slot) for row in range(len(fetch.plan))]
        outcomes = [await self.fill(single, flow, delays) for single in singles]
        errors = {step: error for outcome in outcomes for step, error in outcome.errors.items()}
        return Outcome(Strip(fetch.plan, fetch.layout, slot), errors)

    def _next_use(self, block_bytes: int, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """In how many samples from now blocks of this size are read again; see `Reads.next_use`."""
        plan, table = self._spec.plan, self._spec.dataset.index.blocks(block_bytes)
        position = self._next_to_begin * self._spec.order.global_batch_size
        uses = plan.next_use_of_blocks(table, blocks, position)
        return np.where(uses == NEVER, NEVER, uses - position)

    def _next_fetch(self, window: Window) -> Fetch:
        """The strip to begin next, laid out together with those that follow it."""
        if not self._fetches:
            most = max(_MAX_PREPARED, self.num_together)
            if self._announcer:  # blocks are announced behind what is laid out, which must not lag behind the window
                self._num_prepared = min(window.size, most)
            together = min(self.num_together, self._num_prepared)
            wanted = self._num_prepared // together * together
            self._num_prepared = min(2 * wanted, most)
            if window.end_step is not None:
                wanted = min(wanted, max(window.room, 1))
            self._plan(wanted)
            self._fetches.extend(self._fetcher.prepare(self._plans[:wanted], together))
            self._plans = self._plans[wanted:]
            if self._announcer:
                self._announcer.announce(self._plans, wanted, window.end_step, self._flow)
        return self._fetches[0]

    def _plan(self, num_wanted: int) -> None:
        """Have so many steps planned at least, and those that are to be announced; many at once cost a third each."""
        num_missing = num_wanted + (self._announcer.num_steps if self._announcer else 0) - len(self._plans)
        if num_missing <= 0:
            return
        positions = self._spec.order.global_batch_size // self._spec.world_size
        num_steps = max(num_missing, _PLANNED_POSITIONS // positions)
        self._plans += self._spec.plan.batches(self._plans.stop_step, num_steps, self._spec.rank, self._spec.world_size)


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

    def rewind(self) -> None:
        """The steps to come are others than those that were announced."""
        self._num_announced = 0

    def announce(self, plans: StripPlan, num_taken: int, end_step: int | None, flow: Flow) -> None:
        """The blocks of the next steps will be read, in this order.

        Args:
            plans: of the steps to come.
            num_taken: so many were taken from their beginning since the last time.
            end_step: that nobody wants; None for no end.
            flow: the job.
        """
        self._num_announced = max(0, self._num_announced - num_taken)
        fresh = plans[self._num_announced : self.num_steps]
        self._num_announced += len(fresh)
        if end_step is not None:
            fresh = fresh[: max(0, end_step - fresh.first_step)]
        if not fresh:
            return
        blocks = self._table.block_of(fresh.sample_ids.reshape(-1))
        _, first = np.unique(blocks, return_index=True)
        telling = asyncio.create_task(self._storage.expect(self._block_bytes, blocks[np.sort(first)], flow))
        self._telling.add(telling)
        telling.add_done_callback(self._told)

    def _told(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled():
            telling.exception()  # an error is for those who read the block
