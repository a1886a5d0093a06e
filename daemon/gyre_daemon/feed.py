"""A feed: the batches of one spec, fetched ahead once for all sessions that want the same.

What it promises: a batch is the same bytes for every subscriber, and its memory is not used again before all of them have
released it; a step that fails is an error for those who come to it and not before; memory stays within the arenas. Who keeps
the others waiting for longer than patience lasts is cast off and goes on by itself.
"""

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from gyre_daemon.arena import Arena, Budget, Share, Slot
from gyre_daemon.dataset import Dataset
from gyre_daemon.errors import GyreError, first_error
from gyre_daemon.events import log_event
from gyre_daemon.fair import FairExecutor, Flow
from gyre_daemon.fetch import Batch, Fetch, Fetcher
from gyre_daemon.patience import Patience
from gyre_daemon.plan import Order, Plan
from gyre_daemon.window import View, Window

_MAX_PLANNED = 64  # batches that are planned at once
_BULK_BYTES = 4 << 20  # batches that are read together where that is cheaper
_PATIENCE_S, _PATIENCE_FORGIVEN = 0.05, 0.05

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Spec:
    """What is fetched. Feeds of one spec give the same batches.

    Attributes:
        dataset: open.
        order: how to go through it.
        rank: whose part of each global batch.
        world_size: of how many.
    """

    dataset: Dataset
    order: Order
    rank: int
    world_size: int

    def is_as(self, other: "Spec") -> bool:
        """Both give the same batches; the same dataset opened anew counts as another."""
        return self.dataset is other.dataset and (self.order, self.rank, self.world_size) == (
            other.order,
            other.rank,
            other.world_size,
        )


@dataclass(frozen=True, slots=True)
class Machinery:
    """What all feeds of a daemon share."""

    budget: Budget
    workers: FairExecutor
    arena_limit_bytes: int
    clock: Clock


class Subscriber(Protocol):
    """Who takes batches from a feed: a session."""

    flow: Flow

    @property
    def is_starved(self) -> bool:
        """It could send a batch, and none is ready."""

    @property
    def owns_a_feed(self) -> bool:
        """The memory that it reserved is in use."""

    def wake(self) -> None:
        """The batch it sends next is ready."""

    def fail(self, reason: GyreError) -> None:
        """Nothing will come any more."""

    def cast_off(self) -> None:
        """It must go on by itself, from memory that it reserved itself."""


class Subscription:
    """One subscriber's part in a feed."""

    def __init__(self, feed: "Feed", subscriber: Subscriber, view: View) -> None:
        self.feed = feed
        self.subscriber = subscriber
        self.view = view

    def take(self) -> Batch | Exception:
        """The outcome of the step that is sent next; call only where it is sealed. It stays in memory until its release."""
        outcome = self.feed.outcome(self.view.send())
        self.feed.look_again()
        return outcome

    def release(self, step: int) -> None:
        """A step's memory is no longer needed here."""
        if self.view.release(step):
            self.feed.look_again()

    def activate(self) -> None:
        """Fetch ahead for it from now on."""
        self.view.is_active = True
        self.feed.look_again()

    def leave(self) -> None:
        """Want nothing further; what is held stays until its release, or the end of the feed."""
        self.view.leave()
        self.feed.forget(self)


class Feed:
    """The batches of one spec from a step on, in memory that one of its subscribers has reserved.

    Attributes:
        owner: that subscriber.
        arenas: where batches lie; the first is the owner's share, others were added while subscribers waited.
        following: it only leads up to another feed.
    """

    def __init__(self, spec: Spec, share: Share, first_step: int, owner: Subscriber, machinery: Machinery) -> None:
        self.spec = spec
        self.share = share
        self.owner = owner
        self.window = Window(first_step, share.num_ahead, self._free)
        self.arenas: list[Arena] = []
        self.is_closed = False
        self.following = False
        self._machinery = machinery
        self._plan = Plan(spec.order, spec.dataset.num_samples)
        self._fetcher = Fetcher(spec.dataset, machinery.workers)
        self._bulk = _bulk_size(spec.dataset, share)
        self._fetches: deque[Fetch] = deque()  # laid out, not begun
        self._next_to_plan = first_step
        self._slots: dict[int, Slot] = {}
        self._outcomes: dict[int, Batch | Exception] = {}
        self._subscriptions: list[Subscription] = []
        self._changed = asyncio.Event()
        self._started = asyncio.Event()
        self._is_full = False
        self._is_draining = False
        self._patience = Patience(_PATIENCE_S, _PATIENCE_FORGIVEN)
        self._running = asyncio.create_task(_leaving_nothing(self._run()), name="feed")
        self._running.add_done_callback(self._run_done)

    async def started(self) -> None:
        """Wait until its memory is there, or it is closed."""
        await self._started.wait()

    @property
    def memory_bytes(self) -> int:
        """Held by batches now."""
        return sum(arena.held_bytes for arena in self.arenas)

    def subscribe(
        self, subscriber: Subscriber, first_step: int, end_step: int | None, *, is_active: bool = True
    ) -> Subscription:
        """One subscriber more, where the window has its first step."""
        view = self.window.join(first_step, end_step, is_active=is_active)
        subscription = Subscription(self, subscriber, view)
        self._subscriptions.append(subscription)
        self.look_again()
        return subscription

    @property
    def num_subscribers(self) -> int:
        """Who takes batches here, or is about to."""
        return len(self._subscriptions)

    def is_only(self, subscription: Subscription) -> bool:
        """Nobody else takes batches here."""
        return self._subscriptions == [subscription]

    def outcome(self, step: int) -> Batch | Exception:
        """Of a sealed step."""
        return self._outcomes[step]

    def look_again(self) -> None:
        """Something changed: there may be room, or somebody waits."""
        self._changed.set()

    def forget(self, subscription: Subscription) -> None:
        """A subscriber has left; the memory goes on as another's share, or is given back."""
        self._subscriptions.remove(subscription)
        if self.is_closed:
            return
        if not self._subscriptions:
            self.close()
        elif subscription.subscriber is self.owner:
            self._inherit()
        self.look_again()

    def drain(self) -> None:
        """Begin no further step."""
        self._is_draining = True

    def close(self) -> None:
        """Fetch no more and let go of the memory: it lives on for those who still read it and is never used again."""
        if self.is_closed:
            return
        self.is_closed = True
        self._running.cancel()
        self._outcomes.clear()
        self._slots.clear()
        self._fetches.clear()
        for arena in self.arenas:
            arena.close()
        self.arenas.clear()
        self._started.set()

    def _inherit(self) -> None:
        heirs = [each.subscriber for each in self._subscriptions if not each.subscriber.owns_a_feed]
        if heirs:
            self.owner = heirs[0]
            return
        for each in list(self._subscriptions):  # they are on their way here, each in a feed of its own
            each.subscriber.cast_off()

    async def _run(self) -> None:
        workers = self._machinery.workers
        self.arenas.append(await workers.run(self.owner.flow, 0, 0, lambda: Arena(self.share.num_bytes)))
        self._started.set()
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                while begun := self._begin():
                    group.create_task(_leaving_nothing(self._fill(begun)))
                    await asyncio.sleep(0)  # planning is computation: let the loop breathe
                await self._wait()

    def _run_done(self, task: asyncio.Task[None]) -> None:
        """A feed that cannot go on tells its subscribers instead of leaving them to wait."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        reason = error if isinstance(error, GyreError) else GyreError(f"the daemon failed to prefetch: {error!r}; see its log")
        if reason is not error:
            log_event("prefetch failed", {"dataset": self.spec.dataset.name, "error": repr(error)}, logging.ERROR)
        for each in list(self._subscriptions):
            each.subscriber.fail(reason)
        self.close()

    async def _wait(self) -> None:
        """Until something changes; meanwhile patience with a subscriber that others wait for runs out."""
        laggard = self._laggard() if self._is_full else None
        if laggard is None:
            await self._changed.wait()
            return
        clock = self._machinery.clock
        began = clock()
        try:
            async with asyncio.timeout(self._patience.left_s(began)):
                await self._changed.wait()
        except TimeoutError:
            log_event("reader falls behind", {"dataset": self.spec.dataset.name, "job": laggard.subscriber.flow.name})
            laggard.subscriber.cast_off()
        self._patience.lose(began, clock())

    def _laggard(self) -> Subscription | None:
        """Who keeps the memory that others wait for."""
        view = self.window.laggard()
        if view is None or not any(each.subscriber.is_starved for each in self._subscriptions if each.view is not view):
            return None
        return next(each for each in self._subscriptions if each.view is view)

    def _begin(self) -> list[tuple[Fetch, Slot]]:
        """Begin the steps that are fetched together, as soon as the window has room for as many and the arena for one."""
        begun: list[tuple[Fetch, Slot]] = []
        room = self.window.room
        self._is_full = False
        if self._is_draining or room == 0 or (room < self._bulk and self.window.next_to_begin + room != self.window.end_step):
            return begun
        for _ in range(min(room, self._bulk)):
            fetch = self._next_fetch()
            slot = self._take(fetch.layout.num_bytes)
            if slot is None:
                self._is_full = True
                break
            self._fetches.popleft()
            self._slots[self.window.begin()] = slot
            begun.append((fetch, slot))
        return begun

    def _take(self, num_bytes: int) -> Slot | None:
        return next((slot for arena in self.arenas if (slot := arena.take(num_bytes))), None)

    def _free(self, step: int) -> None:
        """Nobody needs a step any more."""
        if self.is_closed:
            return
        slot = self._slots.pop(step)
        del self._outcomes[step]
        slot.arena.put_back(slot)

    def _next_fetch(self) -> Fetch:
        """The step to begin next, laid out together with those that follow it."""
        if not self._fetches:
            plans = self._plan.batches(self._next_to_plan, self._num_to_plan, self.spec.rank, self.spec.world_size)
            self._next_to_plan += len(plans)
            self._fetches.extend(self._fetcher.prepare(plans))
        return self._fetches[0]

    @property
    def _num_to_plan(self) -> int:
        wanted = max(self._bulk, min(self.window.size, _MAX_PLANNED))
        return min(wanted, max(self.window.room, 1)) if self.window.end_step is not None else wanted

    async def _fill(self, begun: list[tuple[Fetch, Slot]]) -> None:
        try:
            outcomes: Sequence[Batch | Exception] = await self._fetcher.fill(begun, self.owner.flow)
        except Exception as error:
            if len(begun) > 1:  # find out which of them fails: the others are sound
                for single in begun:
                    await self._fill([single])
                return
            outcomes = [first_error(error) if isinstance(error, ExceptionGroup) else error]
        for (fetch, _), outcome in zip(begun, outcomes, strict=True):
            self._outcomes[fetch.plan.step] = outcome
            self.window.seal(fetch.plan.step)
        for each in self._subscriptions:
            if each.view.head_is_sealed:
                each.subscriber.wake()


async def _leaving_nothing(work: Coroutine[None, None, None]) -> None:
    """Run a coroutine; if it is cancelled, its frames let go of the arena now and not at some garbage collection.

    A task group keeps the CancelledError that ends it in its own frame, which the error's traceback keeps in turn.
    """
    try:
        await work
    except asyncio.CancelledError as error:
        traceback.clear_frames(error.__traceback__)
        raise


def _bulk_size(dataset: Dataset, share: Share) -> int:
    """How many batches are read together: several small ones where that is cheaper, but at most a quarter of the window."""
    return max(1, min(_BULK_BYTES // share.batch_bytes, share.num_ahead // 4)) if dataset.storage.reads_in_bulk else 1
