"""The hub's budget: a minute's worth at once, then the rate, and pauses that hold for all."""

import pytest
from gyre_daemon.storage.sources import hub
from gyre_daemon.storage.sources.hub import HubBudget

RATE = 8.0
BURST = 480  # a minute's worth


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(hub, "time", clock)
    return clock


def test_a_minutes_worth_is_sent_at_once_and_the_rest_at_the_rate(clock: Clock) -> None:
    budget = HubBudget(RATE)
    assert [budget.reserve() for _ in range(BURST)] == [0.0] * BURST
    assert [budget.reserve() for _ in range(20)] == [(1 + number) / RATE for number in range(20)]
    clock.now += 20 / RATE + 3
    assert [budget.reserve() for _ in range(25)] == [0.0] * 24 + [1 / RATE]
    clock.now += 3600
    waits = [budget.reserve() for _ in range(BURST + 1)]
    assert waits == [0.0] * BURST + [1 / RATE], "an hour saves up no more"


def test_a_refusal_holds_everybody_as_long_as_the_hub_says(clock: Clock) -> None:
    budget = HubBudget(RATE)
    budget.hold(7)
    assert budget.held_s() == 7
    assert [budget.reserve() for _ in range(2)] == [7.125, 7.25]
    budget.hold(3)
    assert budget.held_s() == 7, "a shorter pause ends none"
    clock.now += 8
    assert budget.held_s() == 0
    budget.hold(0)
    assert budget.held_s() > 0, "also where it does not say how long"
