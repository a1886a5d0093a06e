"""The prefetch window: which steps are fetched, ready, sent and held, and by whom. A state machine: nothing waits.

Successive steps that are begun together are a *strip*: they are in flight from `begin` to `seal`, and share one piece of
memory. Several readers of the same steps look at one window, each with a view of its own. A sealed strip is ready for every
view until that view has sent all of it; what is sent at once is held until that view releases it. A strip's memory is free
when it is sealed and no view needs any part of it any more. Steps are begun in order, and each view sends them in order; strips
are sealed, and what was sent is released, in any. The window bounds how far the steps that are begun run ahead of the view that
is furthest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Strip:
    """Steps begun together.

    Attributes:
        steps: all of them.
        num_needs: how many views are to send some of them, and how many parts of them are held.
        is_sealed: they are whole.
    """

    steps: range
    num_needs: int
    is_sealed: bool = False


class Window:
    """Steps from `first_step` on, in flight or in memory."""

    def __init__(self, first_step: int, size: int, on_free: Callable[[int], None]) -> None:
        """Nobody looks yet.

        Args:
            first_step: the first to begin.
            size: how many steps may be in flight or ready ahead of the furthest view.
            on_free: called with the first step of each strip whose memory nobody needs any more.
        """
        self.size = size
        self.next_to_begin = first_step
        self.views: list[View] = []
        self._on_free = on_free
        self._strips: dict[int, _Strip] = {}  # by each step that is in flight or in memory

    @property
    def room(self) -> int:
        """How many steps more may be begun now."""
        front = max((view.next_to_send for view in self.views if view.is_active), default=None)
        if front is None:
            return 0
        room = self.size - (self.next_to_begin - front)
        end = self.end_step
        return max(room if end is None else min(room, end - self.next_to_begin), 0)

    @property
    def end_step(self) -> int | None:
        """The first step that no view wants; None where one wants all."""
        ends = [view.end_step for view in self.views if view.end_step is not None]
        return max(ends) if len(ends) == len(self.views) > 0 else None

    def has(self, step: int) -> bool:
        """A view may begin at this step: it and all that were begun after it are still here."""
        while (strip := self._strips.get(step)) is not None:
            step = strip.steps.stop
        return step == self.next_to_begin

    def strip_of(self, step: int) -> int:
        """The first step of a strip that is in flight or in memory, by any of its steps."""
        return self._strips[step].steps.start

    def is_sealed(self, step: int) -> bool:
        """The step is whole and in memory."""
        strip = self._strips.get(step)
        return strip is not None and strip.is_sealed

    def begin(self, num_steps: int) -> range:
        """The steps to fetch next, as one strip; call only where there is room for them."""
        steps = range(self.next_to_begin, self.next_to_begin + num_steps)
        self.next_to_begin = steps.stop
        strip = _Strip(steps, sum(view.wants(steps) for view in self.views))
        self._strips.update(dict.fromkeys(steps, strip))
        return steps

    def seal(self, first_step: int) -> None:
        """A strip is whole."""
        strip = self._strips[first_step]
        strip.is_sealed = True
        self._free_if_unneeded(strip)

    def is_wanted(self, step: int) -> bool:
        """Somebody is to be sent some of the strip that a step in memory is a part of."""
        return any(view.wants(self._strips[step].steps) for view in self.views)

    def rewind(self, first_step: int) -> None:
        """Forget steps of strips from `first_step` on, from the last one back, which are begun again later.

        Only those that are sealed and that nobody was sent: the first other one, seen from the end, ends it.
        """
        while (strip := self._strips.get(self.next_to_begin - 1)) and strip.steps.start >= first_step:
            wanting = [view for view in self.views if view.wants(strip.steps)]
            fronts = {max(view.next_to_send, strip.steps.start) for view in wanting}
            furthest = max((view.next_to_send for view in self.views if view.is_active), default=0)
            if not strip.is_sealed or len(fronts) != 1 or furthest > min(fronts):
                return
            self._shorten(strip, fronts.pop(), len(wanting))

    def _shorten(self, strip: _Strip, stop_step: int, num_wanting: int) -> None:
        """Forget the end of the last strip, or all of it."""
        start = strip.steps.start
        for step in range(stop_step, strip.steps.stop):
            del self._strips[step]
        strip.steps = range(start, stop_step)
        strip.num_needs -= num_wanting
        self.next_to_begin = stop_step
        if not strip.num_needs:
            for step in strip.steps:
                del self._strips[step]
            self._on_free(start)

    def join(self, first_step: int, end_step: int | None, *, is_active: bool = True) -> "View":
        """One reader more, where the window `has` its first step.

        Args:
            first_step: that it sends first.
            end_step: that it no longer wants; None for no end.
            is_active: whether steps are fetched ahead for it already.
        """
        view = View(self, first_step, end_step, is_active=is_active)
        self.views.append(view)
        for strip in self._strips_from(first_step):
            strip.num_needs += view.wants(strip.steps)
        return view

    def laggard(self) -> "View | None":
        """Of the views behind the furthest, which may keep old steps too, the one that needs the oldest; None if none is."""
        front = max((view.next_to_send for view in self.views), default=0)
        behind = [view for view in self.views if view.next_to_send < front]
        return min(behind, key=lambda view: view.oldest_needed, default=None)

    def keeper(self) -> "View | None":
        """Who keeps the oldest step that was sent; only where nothing is in flight or ready for anybody."""
        if any(view.num_begun for view in self.views):
            return None
        keepers = [view for view in self.views if view.num_held]
        return min(keepers or self.views, key=lambda view: view.oldest_needed, default=None)

    def _strips_from(self, step: int) -> "Iterator[_Strip]":
        while strip := self._strips.get(step):
            step = strip.steps.stop
            yield strip

    def _unneeded(self, strip: _Strip) -> None:
        strip.num_needs -= 1
        self._free_if_unneeded(strip)

    def _free_if_unneeded(self, strip: _Strip) -> None:
        if strip.is_sealed and not strip.num_needs:
            for step in strip.steps:
                del self._strips[step]
            self._on_free(strip.steps.start)


class View:
    """One reader's place in a window.

    Attributes:
        next_to_send: the step it sends next.
        end_step: that it no longer wants; None for no end.
        is_active: whether steps are fetched ahead for it.
        num_held: steps sent and not released.
    """

    def __init__(self, window: Window, first_step: int, end_step: int | None, *, is_active: bool) -> None:
        self._window = window
        self.next_to_send = first_step
        self.end_step = end_step
        self.is_active = is_active
        self.num_held = 0
        self._held: dict[int, tuple[range, _Strip]] = {}  # by the first step of what was sent at once

    def wants(self, steps: range) -> bool:
        """It is still to send some of these steps."""
        return self._num_wanted(steps) > 0

    @property
    def at_end(self) -> bool:
        """It has sent all it wanted."""
        return self.next_to_send == self.end_step

    @property
    def head_is_sealed(self) -> bool:
        """The step it sends next is whole."""
        return not self.at_end and self._window.is_sealed(self.next_to_send)

    @property
    def num_begun(self) -> int:
        """Steps in flight or ready for it."""
        end = self._window.next_to_begin if self.end_step is None else min(self._window.next_to_begin, self.end_step)
        return max(0, end - self.next_to_send)

    @property
    def num_ready(self) -> int:
        """Sealed and not sent."""
        strips = self._window._strips_from(self.next_to_send)
        return sum(self._num_wanted(strip.steps) for strip in strips if strip.is_sealed)

    @property
    def oldest_needed(self) -> int:
        """The first step that stays in memory for it."""
        return min(self._held, default=self.next_to_send)

    def send(self, max_steps: int) -> range:
        """The steps of one strip that it sends now and holds from now on, at least one; call only where the head is sealed."""
        strip = self._window._strips[self.next_to_send]
        steps = range(self.next_to_send, min(self._stop(strip.steps), self.next_to_send + max_steps))
        self.next_to_send = steps.stop
        self._held[steps.start] = steps, strip
        self.num_held += len(steps)
        strip.num_needs += self.wants(strip.steps)  # what is held takes the place of what was to be sent
        return steps

    def release(self, first_step: int) -> bool:
        """What was sent from this step on at once is no longer needed; False where nothing is held that begins there."""
        held = self._held.pop(first_step, None)
        if held is None:
            return False
        steps, strip = held
        self.num_held -= len(steps)
        self._window._unneeded(strip)
        return True

    def cut(self, end_step: int) -> None:
        """Want no step from `end_step` on that was not sent yet."""
        wanted = [strip for strip in self._window._strips_from(self.next_to_send) if self.wants(strip.steps)]
        self.end_step = max(end_step, self.next_to_send)
        for strip in wanted:
            if not self.wants(strip.steps):
                self._window._unneeded(strip)

    def extend(self, end_step: int | None) -> None:
        """Want more after all; only where no step was begun that it had not wanted."""
        assert self.end_step is None or self._window.next_to_begin <= self.end_step
        self.end_step = end_step

    def leave(self) -> frozenset[int]:
        """Look no longer; what is still held, each by its first step, until its `release`."""
        self.cut(self.next_to_send)
        self._window.views.remove(self)
        return frozenset(self._held)

    def _num_wanted(self, steps: range) -> int:
        return max(0, self._stop(steps) - max(steps.start, self.next_to_send))

    def _stop(self, steps: range) -> int:
        """The step behind the last of these that it wants."""
        return steps.stop if self.end_step is None else min(steps.stop, self.end_step)
