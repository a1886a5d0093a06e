"""The prefetch window against a simple model: of every view, a set of what it wants, and one of what it holds."""

from dataclasses import dataclass, field

from gyre_daemon.window import View, Window
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
    held: set[int] = field(default_factory=set)
    has_left: bool = False

    def wants(self, step: int) -> bool:
        return not self.has_left and step >= self.next_to_send and (self.end_step is None or step < self.end_step)


class WindowModel(RuleBasedStateMachine):
    """Steps go from in flight to sealed to freed; readers come, send, release, cut and leave."""

    @initialize(first=st.integers(0, 1000), size=st.integers(1, 5))
    def start(self, first: int, size: int) -> None:
        self.first, self.size = first, size
        self.freed: list[int] = []
        self.window = Window(first, size, self.freed.append)
        self.num_begun = 0
        self.sealed: set[int] = set()
        self.readers: list[Reader] = []

    @property
    def present(self) -> list[Reader]:
        return [reader for reader in self.readers if not reader.has_left]

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

    @rule()
    def begin(self) -> None:
        active = [reader.next_to_send for reader in self.present if reader.is_active]
        step = self.first + self.num_begun
        room = 0
        if active:
            room = max(0, self.size - (step - max(active)))
            if all(reader.end_step is not None for reader in self.present):
                room = max(0, min(room, max(reader.end_step for reader in self.present if reader.end_step is not None) - step))
        assert self.window.room == room
        if room:
            assert self.window.begin() == step
            self.num_begun += 1

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        in_flight = [step for step in range(self.first, self.first + self.num_begun) if step not in self.sealed]
        if in_flight:
            step = data.draw(st.sampled_from(in_flight))
            self.sealed.add(step)
            self.window.seal(step)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.present))
        step = reader.next_to_send
        possible = step in self.sealed and self.in_memory(step) and reader.wants(step)
        assert reader.view.head_is_sealed == possible
        if possible:
            assert reader.view.send() == step
            reader.next_to_send += 1
            reader.held.add(step)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), step=st.integers(-3, 1020))
    def release(self, data: st.DataObject, step: int) -> None:
        reader = data.draw(st.sampled_from(self.readers))  # also after it left
        if data.draw(st.booleans()) and reader.held:
            step = data.draw(st.sampled_from(sorted(reader.held)))
        assert reader.view.release(step) == (step in reader.held)
        reader.held.discard(step)
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
        assert reader.view.leave() == reader.held
        reader.has_left = True

    @invariant()
    def memory_is_free_exactly_when_nobody_needs_it(self) -> None:
        assert len(self.freed) == len(set(self.freed))
        for step in range(self.first, self.first + self.num_begun):
            needed = any(reader.wants(step) or step in reader.held for reader in self.readers)
            assert (step in self.freed) >= (step in self.sealed and not needed)
            assert not (step in self.freed and needed)
            assert not (step in self.freed and step not in self.sealed)

    @invariant()
    def counts_are_right(self) -> None:
        for reader in self.present:
            begun = [step for step in range(self.first, self.first + self.num_begun) if reader.wants(step)]
            assert reader.view.num_begun == len(begun)
            assert reader.view.num_ready == len(set(begun) & self.sealed)
            assert reader.view.num_held == len(reader.held)
            assert reader.view.next_to_send == reader.next_to_send
            assert reader.view.at_end == (reader.next_to_send == reader.end_step)

    @invariant()
    def laggard_needs_the_oldest_step(self) -> None:
        oldest = {reader.view: min(reader.held | {reader.next_to_send}) for reader in self.present}
        laggard = self.window.laggard()
        if laggard is not None:
            assert oldest[laggard] == min(oldest.values())
            assert laggard.next_to_send < max(reader.next_to_send for reader in self.present)


TestWindow = WindowModel.TestCase
TestWindow.settings = settings(max_examples=100, stateful_step_count=60)


def test_who_is_behind_is_the_laggard_also_where_the_furthest_keeps_an_older_step() -> None:
    window = Window(0, 8, lambda step: None)
    front, behind, further_behind = (window.join(0, None) for _ in range(3))
    assert window.laggard() is None
    for _ in range(6):
        window.seal(window.begin())
    for view, num_sent in ((front, 6), (behind, 4), (further_behind, 3)):
        for step in range(num_sent):
            view.send()
            if (view, step) != (front, 0):
                view.release(step)
    assert front.oldest_needed == 0
    assert window.laggard() is further_behind
    further_behind.leave()
    assert window.laggard() is behind
    behind.leave()
    assert window.laggard() is None
