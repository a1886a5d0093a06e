"""The prefetch window against a simple model: a list that says of every step what has become of it."""

from gyre_daemon.window import Window
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


class WindowModel(RuleBasedStateMachine):
    """Every step goes from `waiting` to `in flight`, `ready`, `held` and `released`."""

    @initialize(first=st.integers(0, 1000), length=st.none() | st.integers(0, 12), size=st.integers(1, 5))
    def start(self, first: int, length: int | None, size: int) -> None:
        self.first, self.size, self.length = first, size, length
        self.window = Window(first, None if length is None else first + length, size)
        self.states: list[str] = []  # of the steps from `first` on
        self.credits = 0
        self.sent: list[int] = []

    def steps(self, state: str) -> list[int]:
        return [self.first + index for index, its in enumerate(self.states) if its == state]

    @rule()
    def begin(self) -> None:
        ahead = len(self.states) - len(self.sent)
        room = self.size - ahead if self.length is None else min(self.size - ahead, self.length - len(self.states))
        assert self.window.room() == room
        if room:
            assert self.window.begin() == self.first + len(self.states)
            self.states.append("in flight")

    @precondition(lambda self: self.steps("in flight"))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(self.steps("in flight")))
        self.window.seal(step)
        self.states[step - self.first] = "ready"

    @rule(num_batches=st.integers(1, 4))
    def add_credit(self, num_batches: int) -> None:
        self.window.add_credit(num_batches)
        self.credits += num_batches

    @rule()
    def send(self) -> None:
        following = self.first + len(self.sent)
        possible = self.credits > 0 and following in self.steps("ready")
        step = self.window.send()
        assert step == (following if possible else None)
        if possible:
            self.states[following - self.first] = "held"
            self.sent.append(following)
            self.credits -= 1

    @rule(step=st.integers(-3, 1020))
    def release_any(self, step: int) -> None:
        held = step in self.steps("held")
        assert self.window.release(step) == held
        assert not self.window.release(step), "a second release changes nothing"
        if held:
            self.states[step - self.first] = "released"

    @precondition(lambda self: self.steps("held"))
    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        self.release_any(data.draw(st.sampled_from(self.steps("held"))))

    @invariant()
    def counts_are_right(self) -> None:
        window = self.window
        assert window.num_in_flight == len(self.steps("in flight"))
        assert window.num_ready == len(self.steps("ready"))
        assert window.num_held == len(self.steps("held"))
        assert window.credits == self.credits
        assert window.num_in_flight + window.num_ready <= self.size

    @invariant()
    def order_is_kept(self) -> None:
        assert self.sent == list(range(self.first, self.first + len(self.sent)))
        assert self.window.next_to_send == self.first + len(self.sent)
        assert self.window.next_to_begin == self.first + len(self.states)
        assert self.window.head_ready == (self.window.next_to_send in self.steps("ready"))
        assert self.window.at_end == (len(self.sent) == self.length)


TestWindow = WindowModel.TestCase
TestWindow.settings = settings(max_examples=60, stateful_step_count=60)
