"""When a request is late, and how many may be sent twice."""

import random
from dataclasses import dataclass

from gyre_daemon.storage.engine.hedges import Hedges, most_needed_first, size_class


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


def test_half_of_what_is_saved_up_is_kept_for_what_is_needed_first() -> None:
    hedges = Hedges()
    assert sum(hedges.take(is_needed_first=False) for _ in range(100)) == 8
    assert sum(hedges.take() for _ in range(100)) == 8


def test_the_first_to_come_say_nothing_while_more_than_three_of_the_first_sent_are_awaited() -> None:
    hedges, size = Hedges(), size_class(2048)
    early = [hedges.begin(size) for _ in range(300)]
    assert early == [True] * 64 + [False] * 236
    for number in range(60):
        hedges.note(2048, 0.001 * number)
        hedges.end_early(size)
        hedges.note(2048, 0.001)  # one that was sent later
    assert hedges.late_after_s(size) is None
    hedges.note(2048, 0.1)
    hedges.end_early(size)
    assert hedges.late_after_s(size) == 0.1


def test_what_fails_among_the_first_does_not_keep_others_waiting() -> None:
    hedges, size = Hedges(), size_class(2048)
    for _ in range(64):
        hedges.begin(size)
    for _ in range(32):
        hedges.note(2048, 0.02)
        hedges.end_early(size)
    for _ in range(28):
        hedges.end_early(size)
    assert hedges.late_after_s(size) is None
    hedges.end_early(size)
    assert hedges.late_after_s(size) == 0.02


def test_second_requests_go_to_what_each_job_needs_first() -> None:
    @dataclass(frozen=True)
    class Late:
        flow: str
        urgency: int

    mine, others = [Late("mine", step) for step in (7, 5, 9)], [Late("others", step) for step in (1002, 1001)]
    assert [(each.flow, each.urgency) for each in most_needed_first([*mine, *others])] == [
        ("mine", 5),
        ("others", 1001),
        ("mine", 7),
        ("others", 1002),
        ("mine", 9),
    ]
