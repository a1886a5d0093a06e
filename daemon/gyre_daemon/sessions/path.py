"""A session's way through feeds: it reads along in another's where it can, and goes on by itself where it must.

What it promises: the steps come in order, each once, whichever feeds they come from. At most two feeds are on the path at a
time: one that is read from, and one that will go on where that one ends.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gyre_daemon.errors import GyreError
from gyre_daemon.fetching.fetch import Strip
from gyre_daemon.fetching.prefetch import Spec
from gyre_daemon.fetching.window import View
from gyre_daemon.memory.arena import Arena
from gyre_daemon.memory.share import Share
from gyre_daemon.runtime.fair import Flow
from gyre_daemon.sessions.feed import Feed, Machinery, Subscription
from gyre_daemon.sessions.patience import Patience

_PATIENCE = ((0.25, 1.0), (1.0, 0.05))  # seconds that a reader may cost others at once, and the part of all time besides
_REACH = 4  # so many windows behind another feed, a session may still catch up with it


class Traveller(Protocol):
    """Whose path it is: a session."""

    def wake(self) -> None:
        """The batch of the next step is ready."""

    def end(self, reason: GyreError) -> None:
        """Nothing will come any more."""


class Path:
    """The steps `[first_step, end_step)` of one spec.

    Attributes:
        flow: the job that reads.
        share: memory that was reserved for it.
        is_starved: its client may soon have nothing to go on with, and no batch is ready.
        patience: that others have with it.
    """

    def __init__(
        self, traveller: Traveller, spec: Spec, share: Share, steps: tuple[int, int | None], flow: Flow, machinery: Machinery
    ) -> None:
        """Begin to fetch, or to read along.

        Args:
            traveller: is told what happens.
            spec: what is read.
            share: memory that was reserved for it.
            steps: the first, and the first that is not wanted, if any.
            flow: the job that reads.
            machinery: where feeds are.
        """
        self.flow = flow
        self.is_starved = False
        self.patience = Patience(_PATIENCE)
        self._traveller = traveller
        self._spec = spec
        self.share = share
        self._end_step = steps[1]
        self._machinery = machinery
        self._is_draining = False
        self._held: dict[int, Subscription] = {}  # where what was taken at once came from, by its first step
        self._subscriptions = self._begin(steps[0])

    @property
    def feed(self) -> Feed:
        """What is read from now."""
        return self._here.feed

    @property
    def view(self) -> View:
        """Where it stands there."""
        return self._here.view

    @property
    def num_held(self) -> int:
        """Steps taken and not released."""
        return sum(subscription.view.num_held for subscription in {*self._held.values(), *self._subscriptions})

    @property
    def at_end(self) -> bool:
        """Every step has been taken."""
        return self.view.next_to_send == self._end_step

    @property
    def head_is_whole(self) -> bool:
        """The next step is ready and did not fail."""
        return self.head_is_ready and self.view.next_to_send not in self.feed.outcome(self.view.next_to_send).errors

    @property
    def head_is_ready(self) -> bool:
        """The next step can be taken now."""
        while len(self._subscriptions) > 1 and self.view.at_end:
            self._subscriptions.popleft().leave()
            self._here.activate()
        return self.view.head_is_sealed

    def take(self, max_batches: int) -> Strip | Exception:
        """Batches of the next steps, or why there is none of the first; call only where the head is ready.

        What is taken at once stays in memory until its release.
        """
        here = self._here
        self._held[here.view.next_to_send] = here
        return here.take(max_batches)

    def release(self, first_step: int) -> None:
        """The memory of what was taken at once, from this step on, is no longer needed; what is unknown changes nothing."""
        subscription = self._held.pop(first_step, None)
        if subscription:
            subscription.release(first_step)

    def reshape(self, share: Share) -> None:
        """Less is reserved for it from now on."""
        self.share = share
        for feed in self._own_feeds:
            feed.reshape(share)

    @property
    def first_arena_bytes(self) -> int:
        """Of memory that it cannot do without."""
        return max((feed.arenas.first_bytes for feed in self._own_feeds), default=0)

    @property
    def _own_feeds(self) -> list[Feed]:
        return [subscription.feed for subscription in self._subscriptions if subscription.feed.owner is self]

    def held_in(self, arena: Arena) -> list[int]:
        """What was taken at once and lies in an arena, by first steps."""
        return [step for step, subscription in self._held.items() if subscription.feed.lies_in(step, arena)]

    def drain(self) -> None:
        """Begin no further step."""
        self._is_draining = True
        for subscription in self._subscriptions:
            subscription.feed.drain()

    def leave(self, when_unread: Callable[[Callable[[], None]], None]) -> None:
        """Want nothing further.

        Args:
            when_unread: does what it is given once nobody reads what was taken.
        """
        for step, subscription in self._held.items():
            when_unread(partial(subscription.release, step))
        self._held.clear()
        for subscription in self._subscriptions:
            subscription.leave()

    @property
    def owns_a_feed(self) -> bool:
        """The memory that was reserved for it is in use."""
        return bool(self._own_feeds)

    def wake(self) -> None:
        """The batch it takes next is ready."""
        self._traveller.wake()

    def fail(self, reason: GyreError) -> None:
        """The feed cannot go on."""
        self._traveller.end(reason)

    def cast_off(self) -> None:
        """Others do not wait any longer: it goes on in a feed of its own."""
        while len(self._subscriptions) > 1:
            self._subscriptions.pop().leave()
        here = self._here
        if here.feed.is_only(here) and here.feed.owner is self and not here.feed.is_stuck:
            here.feed.is_following = False
            here.view.extend(self._end_step)
        else:
            here.leave()
            here = self._subscriptions[0] = self._found(here.view.next_to_send, self._end_step)
        here.feed.stay_apart(here.view.next_to_send)
        here.feed.look_again()

    def follow(self, feed: Feed, step: int) -> None:
        """Where its feed ends now, another goes on."""
        self._subscriptions.append(feed.subscribe(self, step, self._end_step, is_active=False))

    @property
    def _here(self) -> Subscription:
        return self._subscriptions[0]

    def _begin(self, step: int) -> deque[Subscription]:
        """Read along in another feed, or in one of its own up to where another begins, or in one of its own."""
        end = self._end_step
        for feed in list(self._machinery.feeds):
            if not feed.may_be_joined(self._spec):
                continue
            if feed.window.has(step):
                return deque([feed.subscribe(self, step, end)])
            meet = feed.window.next_to_begin
            if 0 < meet - step <= _REACH * self.share.num_ahead and (end is None or meet < end):
                own = self._found(step, meet)
                own.feed.is_following = True
                return deque([own, feed.subscribe(self, meet, end, is_active=False)])
        return deque([self._found(step, end)])

    def _found(self, first_step: int, end_step: int | None) -> Subscription:
        feed = Feed(self._spec, self.share, first_step, self, self._machinery)
        if self._is_draining:
            feed.drain()
        return feed.subscribe(self, first_step, end_step)
