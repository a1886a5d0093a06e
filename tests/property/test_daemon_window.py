"""The prefetch window against a simple model: of every view, a set of what it wants, and one of what it holds.

The window counts by strips, the model looks at every step."""

from dataclasses import dataclass, field

from gyre_daemon.fetching.window import View, Window
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


@dataclass(eq=False)
class Reader:
    """What a view must be like."""

    view: View
    next_to_send: int
    end_step: int | None
    is_active: bool
    held: dict[int, range] = field(default_factory=dict)  # by the first step of what was sent at once
    has_left: bool = False

    def wants(self, step: int) -> bool:
        return not self.has_left and step >= self.next_to_send and (self.end_step is None or step < self.end_step)


class WindowModel(RuleBasedStateMachine):
    """Strips go from in flight to sealed to freed; readers come, send, release, cut and leave."""

    @initialize(first=st.integers(0, 1000), size=st.integers(1, 8))
    def start(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.freed_strips: list[int] = []
        self.window = Window(first, size, self.freed_strips.append)
        self.strips: dict[int, range] = {}  # by first step
        self.sealed_strips: set[int] = set()
        self.readers: list[Reader] = []

    @property
    def present(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.has_left]

    @property
    def num_begun(self) -> int:
        return sum(map(len, self.strips.values()))

    @property
    def sealed(self) -> set[int]:
        return {step for first in self.sealed_strips for step in self.strips[first]}

    @property
    def freed(self) -> set[int]:
        return {step for first in self.freed_strips for step in self.strips[first]}

    def strip_of(self, step: int) -> range:
        return next(strip for strip in self.strips.values() if step in strip)

    def in_memory(self, step: int) -> bool:
        return self.first <= step < self.first + self.num_begun and step not in self.freed

    @rule(back=st.integers(0, 8), length=st.none() | st.integers(0, 12), is_active=st.booleans())
    def join(self, back: int, length: int | None, is_active: bool) -> None:
        end_of_begun = self.first + self.num_begun
        step = max(end_of_begun - back, 0)
        possible = all(self.in_memory(later) for later in range(step, end_of_begun))
        assert self.window.has(step) == possible
        assert not self.window.has(end_of_begun + 1)
        if possible and len(self.readers) < 6:
            end = None if length is None else step + length
            view = self.window.join(step, end, is_active=is_active)
            self.readers.append(Reader(view, step, end, is_active))

    @rule(num_steps=st.integers(1, 4))
    def begin(self, num_steps: int) -> None:
        active = [reader.next_to_send for reader in self.present if reader.is_active]
        step = self.first + self.num_begun
        room = 0
        if active:
            room = max(0, self.size - (step - max(active)))
            if all(reader.end_step is not None for reader in self.present):
                room = max(0, min(room, max(reader.end_step for reader in self.present if reader.end_step is not None) - step))
        assert self.window.room == room
        if room:
            steps = range(step, step + min(room, num_steps))
            assert self.window.begin(len(steps)) == steps
            self.strips[step] = steps

    @rule(back=st.integers(0, 12))
    def rewind(self, back: int) -> None:
        limit = self.first + self.num_begun - back
        self.window.rewind(limit)
        while self.strips and (last := max(self.strips)) >= limit:
            front = self.front_of(last)
            if front is None:
                break
            if front > last:
                self.strips[last] = range(last, front)
                break
            assert last == self.freed_strips.pop(self.freed_strips.index(last))
            self.sealed_strips.remove(last)
            del self.strips[last]
        assert self.window.next_to_begin == self.first + self.num_begun

    def front_of(self, first_step: int) -> int | None:
        """From which step on a strip may be forgotten."""
        strip = self.strips[first_step]
        wanting = [reader for reader in self.present if any(map(reader.wants, strip))]
        fronts = {max(reader.next_to_send, first_step) for reader in wanting}
        furthest = max((reader.next_to_send for reader in self.present if reader.is_active), default=0)
        is_alike = first_step in self.sealed_strips and len(fronts) == 1
        return min(fronts) if is_alike and furthest <= min(fronts) else None

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        in_flight = sorted(self.strips.keys() - self.sealed_strips)
        if in_flight:
            first_step = data.draw(st.sampled_from(in_flight))
            self.sealed_strips.add(first_step)
            self.window.seal(first_step)

    @precondition(lambda self: self.present)
    @rule(data=st.data(), max_steps=st.integers(1, 5))
    def send(self, data: st.DataObject, max_steps: int) -> None:
        reader = data.draw(st.sampled_from(self.present))
        step = reader.next_to_send
        possible = step in self.sealed and self.in_memory(step) and reader.wants(step)
        assert reader.view.head_is_sealed == possible
        if possible:
            strip = self.strip_of(step)
            assert self.window.strip_of(step) == strip.start
            wanted = [later for later in range(step, min(strip.stop, step + max_steps)) if reader.wants(later)]
            sent = reader.view.send(max_steps)
            assert list(sent) == wanted
            reader.next_to_send = sent.stop
            reader.held[step] = sent

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), step=st.integers(-3, 1020))
    def release(self, data: st.DataObject, step: int) -> None:
        reader = data.draw(st.sampled_from(self.readers))  # also after it left
        if data.draw(st.booleans()) and reader.held:
            step = data.draw(st.sampled_from(sorted(reader.held)))
        assert reader.view.release(step) == (step in reader.held)
        reader.held.pop(step, None)
        assert not reader.view.release(step), "a second release changes nothing"

    @precondition(lambda self: self.present)
    @rule(data=st.data(), ahead=st.integers(-2, 8))
    def cut(self, data: st.DataObject, ahead: int) -> None:
        reader = data.draw(st.sampled_from(self.present))
        end = max(reader.next_to_send, reader.next_to_send + ahead)
        if reader.end_step is None or end <= reader.end_step:
            reader.view.cut(reader.next_to_send + ahead)
            reader.end_step = end

    @precondition(lambda self: self.present)
    @rule(data=st.data(), more=st.none() | st.integers(0, 8))
    def extend(self, data: st.DataObject, more: int | None) -> None:
        reader = data.draw(st.sampled_from(self.present))
        if reader.end_step is not None and self.first + self.num_begun <= reader.end_step:
            reader.end_step = None if more is None else reader.end_step + more
            reader.view.extend(reader.end_step)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.present))
        assert reader.view.leave() == reader.held.keys()
        reader.has_left = True

    @invariant()
    def memory_is_free_exactly_when_nobody_needs_it(self) -> None:
        assert len(self.freed_strips) == len(set(self.freed_strips))
        for first, steps in self.strips.items():
            needed = any(reader.wants(step) for reader in self.readers for step in steps)
            needed = needed or any(sent.start in steps for reader in self.readers for sent in reader.held.values())
            assert (first in self.freed_strips) >= (first in self.sealed_strips and not needed)
            assert not (first in self.freed_strips and needed)
            assert not (first in self.freed_strips and first not in self.sealed_strips)

    @invariant()
    def counts_are_right(self) -> None:
        for reader in self.present:
            begun = [step for step in range(self.first, self.first + self.num_begun) if reader.wants(step)]
            assert reader.view.num_begun == len(begun)
            assert reader.view.num_ready == len(set(begun) & self.sealed)
            assert reader.view.num_held == sum(map(len, reader.held.values()))
            assert reader.view.next_to_send == reader.next_to_send
            assert reader.view.at_end == (reader.next_to_send == reader.end_step)

    @invariant()
    def laggard_is_behind_and_needs_the_oldest_step_of_those(self) -> None:
        front = max((reader.next_to_send for reader in self.present), default=0)
        behind = [reader for reader in self.present if reader.next_to_send < front]
        laggard = self.window.laggard()
        assert (laggard is None) == (not behind)
        if laggard is not None:
            assert laggard in [reader.view for reader in behind]
            assert laggard.oldest_needed == min(min([*reader.held, reader.next_to_send]) for reader in behind)

    @invariant()
    def keeper_is_there_where_nothing_is_under_way(self) -> None:
        keeper = self.window.keeper()
        assert (keeper is None) == (not self.present or any(reader.view.num_begun for reader in self.present))
        held = [min(reader.held) for reader in self.present if reader.held]
        if keeper is not None and held:
            assert keeper.num_held
            assert keeper.oldest_needed == min(held)


TestWindow = WindowModel.TestCase
TestWindow.settings = settings(max_examples=100, stateful_step_count=60)


def test_who_is_behind_is_the_laggard_also_where_the_furthest_keeps_an_older_step() -> None:
    window = Window(0, 8, lambda step: None)
    front, behind, further_behind = (window.join(0, None) for _ in range(3))
    assert window.laggard() is None
    for _ in range(6):
        window.seal(window.begin(1).start)
    for view, num_sent in ((front, 6), (behind, 4), (further_behind, 3)):
        for step in range(num_sent):
            view.send(1)
            if (view, step) != (front, 0):
                view.release(step)
    assert front.oldest_needed == 0
    assert window.laggard() is further_behind
    further_behind.leave()
    assert window.laggard() is behind
    behind.leave()
    assert window.laggard() is None
