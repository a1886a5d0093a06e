"""A feed: the batches of one spec, fetched ahead once for all sessions that want the same.

What it promises: a batch is the same bytes for every subscriber, and its memory is not used again before all of them have
released it; a step that fails is an error for those who come to it and not before; memory stays within the arenas. Who keeps
the others waiting for longer than patience lasts is cast off and goes on by itself.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_daemon.errors import GyreError, first_error
from gyre_daemon.fetching.account import Accounts
from gyre_daemon.fetching.fetch import Strip
from gyre_daemon.fetching.prefetch import Begun, Outcome, Prefetcher, Spec, account_of
from gyre_daemon.fetching.window import View, Window
from gyre_daemon.memory.arena import Arena, Slot
from gyre_daemon.memory.arenas import Arenas
from gyre_daemon.memory.budget import Budget
from gyre_daemon.memory.mapped import Mapped
from gyre_daemon.memory.share import Share
from gyre_daemon.monitoring.occupancy import StorageShare
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.sessions.growth import Growth
from gyre_daemon.sessions.subscriber import Subscriber
from gyre_daemon.storage.delays import Delays

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Machinery:
    """What all feeds of a daemon share.

    Attributes:
        budget: of what windows that grow take more.
        mapped: what the budget's memory is used for.
        arena_limit_bytes: so much memory a feed may have in all.
        feeds: all that are open.
        accounts: what batches took.
    """

    budget: Budget
    mapped: Mapped
    workers: FairExecutor
    arena_limit_bytes: int
    clock: Clock
    feeds: "set[Feed]" = field(default_factory=set)
    accounts: Accounts = field(default_factory=Accounts)


class Subscription:
    """One subscriber's part in a feed."""

    def __init__(self, feed: "Feed", subscriber: "Subscriber[Feed]", view: View) -> None:
        self.feed = feed
        self.subscriber = subscriber
        self.view = view

    def take(self, max_batches: int) -> Strip | Exception:
        """Batches of the steps that are sent next, or why there is none of the first; call only where the head is sealed.

        What is taken at once stays in memory until its release.
        """
        outcome = self.feed.outcome(self.view.next_to_send)
        head = range(self.view.next_to_send, self.view.next_to_send + max_batches)
        num_good = len(outcome.good(head))
        steps = self.view.send(num_good or 1)
        self.feed.taken()
        return outcome.strip.part(steps) if num_good else outcome.errors[steps.start]

    def release(self, first_step: int) -> None:
        """The memory of what was taken at once, from this step on, is no longer needed here."""
        if self.view.release(first_step):
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
        arenas: where batches lie; the first is the owner's share.
        is_following: it only leads up to another feed.
        storage_share: of what its batches wait for.
    """

    def __init__(self, spec: Spec, share: Share, first_step: int, owner: "Subscriber[Feed]", machinery: Machinery) -> None:
        self.spec = spec
        self.share = share
        self.owner = owner
        self.window = Window(first_step, share.num_ahead, self._free)
        self._in_bulk = spec.dataset.storage.reads_in_bulk
        limit_bytes = machinery.arena_limit_bytes
        self.arenas = Arenas(share, machinery.budget, machinery.mapped, limit_bytes, machinery.workers, in_bulk=self._in_bulk)
        self.is_closed = False
        self.is_following = False
        self._machinery = machinery
        self._prefetcher = Prefetcher(spec, share, first_step, owner.flow, machinery.workers)
        self._slots: dict[int, Slot] = {}  # of each strip, by its first step
        self._outcomes: dict[int, Outcome] = {}  # likewise
        self._subscriptions: list[Subscription] = []
        self._changed = asyncio.Event()
        self._started = asyncio.Event()
        self._is_read = asyncio.Event()
        self._is_full = False
        self._is_draining = False
        self._growth = Growth(share, in_bulk=self._in_bulk)
        self.storage_share = StorageShare(until_known=0.0 if self._in_bulk else 1.0)
        self._apart_until = first_step
        machinery.feeds.add(self)
        self._running = asyncio.create_task(self._run(), name="feed")
        self._running.add_done_callback(self._run_done)

    async def started(self) -> None:
        """Wait until its memory is there, or it is closed."""
        await self._started.wait()

    @property
    def hot_position(self) -> int:
        """Where it reads now, as a position of a job that started at 0: what another job reads from there is at hand."""
        return self.spec.plan.running_position(self.window.next_to_begin)

    def subscribe(
        self, subscriber: "Subscriber[Feed]", first_step: int, end_step: int | None, *, is_active: bool = True
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

    @property
    def is_stuck(self) -> bool:
        """All its memory is full of batches that are kept, here or by those who have left."""
        return self._is_full and self.window.keeper() is not None

    def may_be_joined(self, spec: Spec) -> bool:
        """Sessions that want this can read along, however much memory they have themselves."""
        is_open = not self.is_closed and not self.is_following and not self._is_apart
        return is_open and self.spec.is_as(spec)

    def stay_apart(self, step: int) -> None:
        """Neither join nor be joined until a window of steps from this one on has been taken.

        Who was cast off may still find its next step in the others' memory; if it came back, they would wait for it again.
        """
        self._apart_until = step + self.share.num_ahead

    def outcome(self, step: int) -> Outcome:
        """Of the strip that a sealed step is a part of."""
        return self._outcomes[self.window.strip_of(step)]

    def look_again(self) -> None:
        """Something changed: there may be room, or somebody waits."""
        self._changed.set()

    def taken(self) -> None:
        """Batches were taken."""
        self._is_read.set()
        self.look_again()

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
        """Fetch no more and give the memory back; it is never used again."""
        if self.is_closed:
            return
        self.is_closed = True
        self._machinery.feeds.discard(self)
        self._running.cancel()
        self._outcomes.clear()
        self._slots.clear()
        self.arenas.close()
        self._started.set()

    def shrink(self) -> asyncio.Event | None:
        """Give back what a longer window took, as soon as no batch lies there, which the event tells; None for nothing."""
        self._growth.shrunk(self._machinery.clock())
        shrinking = self.arenas.shrink()
        self._vacate()
        self._resize()
        return shrinking

    def reshape(self, share: Share) -> None:
        """Go on with less memory: what was taken stays where it is until it is released."""
        self.share = share
        self._growth = Growth(share, in_bulk=self._in_bulk)
        self._growth.shrunk(self._machinery.clock())
        self.arenas.reshape(share)
        self._vacate()
        self._resize()

    def _vacate(self) -> None:
        """What is ready, was sent to nobody, and lies in memory that is given back, is read again later.

        Strips are forgotten from the last one back, and none that is in flight: so look again whenever one is ready.
        """
        steps = [step for step in self._outcomes if self.arenas.is_leaving(self._slots[step]) and self.window.is_wanted(step)]
        if steps:
            self.window.rewind(min(steps))
            self._prefetcher.rewind(self.window.next_to_begin)

    def lies_in(self, step: int, arena: Arena) -> bool:
        """A step that is in memory lies in that arena."""
        slot = self._slots.get(self.window.strip_of(step))
        return slot is not None and slot.arena is arena

    def _inherit(self) -> None:
        heirs = [each.subscriber for each in self._subscriptions if not each.subscriber.owns_a_feed]
        if heirs:
            self.owner = max(heirs, key=lambda heir: heir.share.reserved_bytes)
            if self.owner.share.reserved_bytes < self.share.reserved_bytes:
                self.reshape(self.owner.share)
            return
        for each in list(self._subscriptions):  # they are on their way here, each in a feed of its own
            each.subscriber.cast_off()

    async def _run(self) -> None:
        await self.arenas.allocate(self.owner.flow)
        self._started.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._complete())
            while True:
                self._changed.clear()
                while begun := self._begin():
                    group.create_task(self._fill(begun))
                    await asyncio.sleep(0)  # planning is computation: let the loop breathe
                await self._wait()

    async def _complete(self) -> None:
        """More memory as it is needed, but not before a first batch was taken, which would share the processor with it."""
        await self._is_read.wait()
        await self.arenas.complete(self.owner.flow, self.look_again)

    def _run_done(self, task: asyncio.Task[None]) -> None:
        """A feed that cannot go on tells its subscribers instead of leaving them to wait."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        error = first_error(error) if isinstance(error, ExceptionGroup) else error
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
        clock, patience = self._machinery.clock, laggard.subscriber.patience
        waiting = [each.subscriber for each in self._subscriptions if each is not laggard and each.subscriber.is_starved]
        began = clock()
        try:
            async with asyncio.timeout(patience.left_s(began)):
                await self._changed.wait()
        except TimeoutError:
            log_event("reader falls behind", {"dataset": self.spec.dataset.name, "job": laggard.subscriber.flow.name})
            laggard.subscriber.cast_off()
        patience.lose(began, now := clock())
        for subscriber in waiting:
            subscriber.patience.regain(began, now)

    def _laggard(self) -> Subscription | None:
        """Who keeps the memory that others wait for; or that all wait for, where batches that are kept fill all of it."""
        behind, keeper = self.window.laggard(), self.window.keeper()
        starved = [each.view for each in self._subscriptions if each.subscriber.is_starved]
        view = behind if any(each is not behind for each in starved) else None
        view = view or (keeper if starved else None)
        return next((each for each in self._subscriptions if each.view is view), None)

    @property
    def _is_apart(self) -> bool:
        return all(view.next_to_send < self._apart_until for view in self.window.views)

    def _merge(self) -> bool:
        """Let another feed go on for this one, where that has what would be begun next in memory."""
        step = self.window.next_to_begin
        for other in list(self._machinery.feeds):
            if other is not self and other.may_be_joined(self.spec) and other.window.has(step):
                self.is_following = True
                for each in list(self._subscriptions):
                    each.view.cut(step)
                    each.subscriber.follow(other, step)
                return True
        return False

    def _begin(self) -> Begun | None:
        """Begin the next strip, unless another feed does; nothing where there is no room for it."""
        self._is_full = False
        may_merge = self.window.room and not self.is_following and not self._is_apart
        if may_merge and len(self._machinery.feeds) > 1 and self._merge():
            return None
        if self._is_draining or not self._prefetcher.may_begin(self.window):
            return None
        begun = self._prefetcher.begin(self.window, self.arenas)
        self._is_full = begun is None and self.arenas.is_complete
        if begun:
            self._slots[begun.first_step] = begun.slot
        return begun

    def _free(self, first_step: int) -> None:
        """Nobody needs a strip any more."""
        if not self.is_closed:
            del self._outcomes[first_step]
            self.arenas.put_back(self._slots.pop(first_step))

    async def _fill(self, begun: Begun) -> None:
        arena, delays, began = begun.slot.arena, Delays(), self._machinery.clock()
        if not arena.acquire():
            return
        try:
            outcome = await self._prefetcher.fill(begun, self.owner.flow, delays)
        finally:
            arena.release()
        if self.is_closed:
            return
        times, job = (began, self._machinery.clock()), self.owner.flow.name
        self.storage_share.add(delays.storage_s, times[1] - times[0])
        account = account_of(self.spec, job, outcome, times, delays, is_awaited=self._is_awaited)
        self._machinery.accounts.add(account)
        self._outcomes[begun.first_step] = outcome
        self.window.seal(begun.first_step)
        if self.arenas.is_giving_back:
            self._vacate()
        self._grow_if_awaited(len(outcome.strip.plan))
        for each in self._subscriptions:
            if each.view.head_is_sealed:
                each.subscriber.wake()

    @property
    def _is_awaited(self) -> bool:
        """Somebody waits for batches that are not whole."""
        return any(each.subscriber.is_starved for each in self._subscriptions)

    def _grow_if_awaited(self, num_sealed: int) -> None:
        """Where subscribers waited long enough, have memory for more windows, if there is any."""
        now, has = self._machinery.clock(), self.arenas.num_windows
        wanted = self._growth.sealed(num_sealed, has, now, is_awaited=self._is_awaited)
        growing = self.arenas.grow(wanted, self.owner.flow) if wanted > has else None
        if growing:
            growing.add_done_callback(lambda _: self._resize())

    def _resize(self) -> None:
        """Windows, and strips that are read in bulk, become as long as there is memory for."""
        self.window.size = self.share.num_ahead * self.arenas.num_windows
        self._prefetcher.num_together = self.arenas.extent.num_together
        self.look_again()
