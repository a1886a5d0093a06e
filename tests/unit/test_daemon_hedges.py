"""When a request is late, and how many may be sent twice."""

import random

from gyre_daemon.storage.hedges import Hedges, size_class


def test_nothing_is_late_before_enough_is_known() -> None:
    hedges = Hedges()
    for _ in range(31):
        hedges.note(2048, 0.02)
    assert hedges.late_after_s(size_class(2048)) is None
    hedges.note(2048, 0.02)
    assert hedges.late_after_s(size_class(2048)) == 0.02


def test_late_is_what_nineteen_of_twenty_are_not() -> None:
    hedges, dice = Hedges(), random.Random(1)
    durations = [dice.lognormvariate(-4, 1) for _ in range(512)]
    for duration in durations:
        hedges.note(2048, duration)
    late = hedges.late_after_s(size_class(2048))
    assert late is not None
    assert sum(duration > late for duration in durations) == 512 // 20


def test_what_is_late_follows_the_storage() -> None:
    hedges = Hedges()
    for duration in [0.01] * 600 + [0.5] * 600:
        hedges.note(2048, duration)
    assert hedges.late_after_s(size_class(2048)) == 0.5


def test_sizes_are_told_apart() -> None:
    hedges = Hedges()
    for _ in range(64):
        hedges.note(2 << 10, 0.01)
        hedges.note(8 << 20, 1.0)
    assert hedges.late_after_s(size_class(3 << 10)) == 0.01
    assert hedges.late_after_s(size_class(8 << 20)) == 1.0
    assert hedges.late_after_s(size_class(100)) is None


def test_second_requests_are_one_in_twenty() -> None:
    hedges = Hedges()
    num_taken = 0
    for _ in range(10_000):
        hedges.earn()
        num_taken += hedges.take()
    assert 500 <= num_taken <= 516
