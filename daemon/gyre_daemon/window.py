"""The prefetch window: which steps are fetched, ready, sent and held, and by whom. A state machine: nothing waits.

Several readers of the same batches look at one window, each with a view of its own. A step is `in flight` from `begin` to
`seal`, then ready for every view until that view sends it, and held from there until that view releases it. Its memory is free
when it is sealed and no view needs it any more. Steps are begun in order, and each view sends them in order; they are sealed
and released in any. The window bounds how far the steps that are begun run ahead of the view that is furthest.
"""

from collections.abc import Callable


class Window:
    """Steps from `first_step` on, in flight or in memory."""

    def __init__(self, first_step: int, size: int, on_free: Callable[[int], None]) -> None:
        """Nobody looks yet.

        Args:
            first_step: the first to begin.
            size: how many steps may be in flight or ready ahead of the furthest view.
            on_free: called with each step whose memory nobody needs any more.
        """
        self.size = size
        self.next_to_begin = first_step
        self.views: list[View] = []
        self._on_free = on_free
        self._needs: dict[int, int] = {}  # of each step that is in flight or in memory: views that are to send it or hold it
        self._sealed: set[int] = set()

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
        return step <= self.next_to_begin and all(later in self._needs for later in range(step, self.next_to_begin))

    def is_sealed(self, step: int) -> bool:
        """The step is whole and in memory."""
        return step in self._sealed

    def begin(self) -> int:
        """The step to fetch next; call only where there is room."""
        step = self.next_to_begin
        self.next_to_begin += 1
        self._needs[step] = sum(view.wants(step) for view in self.views)
        return step

    def seal(self, step: int) -> None:
        """A step's batch is whole."""
        self._sealed.add(step)
        self._free_if_unneeded(step)

    def join(self, first_step: int, end_step: int | None, *, is_active: bool = True) -> "View":
        """One reader more, where the window `has` its first step.

        Args:
            first_step: that it sends first.
            end_step: that it no longer wants; None for no end.
            is_active: whether steps are fetched ahead for it already.
        """
        view = View(self, first_step, end_step, is_active=is_active)
        self.views.append(view)
        for step in range(first_step, self.next_to_begin):
            self._needs[step] += view.wants(step)
        return view

    def laggard(self) -> "View | None":
        """Of the views behind the furthest, which may keep old steps too, the one that needs the oldest; None if none is."""
        front = max((view.next_to_send for view in self.views), default=0)
        behind = [view for view in self.views if view.next_to_send < front]
        return min(behind, key=lambda view: view.oldest_needed, default=None)

    def _unneeded(self, step: int) -> None:
        self._needs[step] -= 1
        self._free_if_unneeded(step)

    def _free_if_unneeded(self, step: int) -> None:
        if step in self._sealed and not self._needs[step]:
            self._sealed.remove(step)
            del self._needs[step]
            self._on_free(step)


class View:
    """One reader's place in a window.

    Attributes:
        next_to_send: the step it sends next.
        end_step: that it no longer wants; None for no end.
        is_active: whether steps are fetched ahead for it.
    """

    def __init__(self, window: Window, first_step: int, end_step: int | None, *, is_active: bool) -> None:
        self._window = window
        self.next_to_send = first_step
        self.end_step = end_step
        self.is_active = is_active
        self._held: set[int] = set()

    def wants(self, step: int) -> bool:
        """It is still to send this step."""
        return self.next_to_send <= step and (self.end_step is None or step < self.end_step)

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
        return sum(self._window.is_sealed(self.next_to_send + ahead) for ahead in range(self.num_begun))

    @property
    def num_held(self) -> int:
        """Sent and not released."""
        return len(self._held)

    @property
    def oldest_needed(self) -> int:
        """The first step that stays in memory for it."""
        return min(self._held, default=self.next_to_send)

    def send(self) -> int:
        """The step it sends now, and holds from now on; call only where the head is sealed."""
        step = self.next_to_send
        self.next_to_send += 1
        self._held.add(step)
        return step

    def release(self, step: int) -> bool:
        """A step that was sent is no longer needed; False where it is not held (twice released, or never sent)."""
        if step not in self._held:
            return False
        self._held.remove(step)
        self._window._unneeded(step)
        return True

    def cut(self, end_step: int) -> None:
        """Want no step from `end_step` on that was not sent yet."""
        unwanted = range(max(end_step, self.next_to_send), self.next_to_send + self.num_begun)
        self.end_step = max(end_step, self.next_to_send)
        for step in unwanted:
            self._window._unneeded(step)

    def extend(self, end_step: int | None) -> None:
        """Want more after all; only where no step was begun that it had not wanted."""
        assert self.end_step is None or self._window.next_to_begin <= self.end_step
        self.end_step = end_step

    def leave(self) -> frozenset[int]:
        """Look no longer; the steps that are still held, each until its `release`."""
        self.cut(self.next_to_send)
        self._window.views.remove(self)
        return frozenset(self._held)
