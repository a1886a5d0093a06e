"""When a response is late, and how many requests are sent twice."""

import random
from unittest.mock import Mock

from gyre_daemon.runtime.threads import NO_JOB, Flow
from gyre_daemon.storage.engine.policies import (
    CredentialRefresh,
    Hedges,
    RangeRequest,
    most_needed_first,
)
from gyre_daemon.storage.response import ByteRange
from gyre_daemon.storage.shard import Shard


def request(flow: Flow = NO_JOB, urgency: int = 0) -> RangeRequest:
    """Of 2 KiB."""
    wanted = ByteRange([Shard("0.bin", 4096, "")], 0, 0, 2048)
    return RangeRequest(CredentialRefresh(Mock()), "0.bin", wanted, flow, urgency, 0.0)


def test_nothing_is_late_before_enough_is_known() -> None:
    hedges = Hedges()
    for _ in range(31):
        hedges.record(2048, 0.02)
    assert hedges.late_after_s(2048) is None
    hedges.record(2048, 0.02)
    assert hedges.late_after_s(2048) == 0.02


def test_one_response_in_twenty_is_late() -> None:
    hedges, dice = Hedges(), random.Random(1)
    durations = [dice.lognormvariate(-4, 1) for _ in range(512)]
    for duration in durations:
        hedges.record(2048, duration)
    late = hedges.late_after_s(2048)
    assert late is not None
    assert sum(duration > late for duration in durations) == 512 // 20


def test_lateness_follows_the_storage() -> None:
    hedges = Hedges()
    for duration in [0.01] * 600 + [0.5] * 600:
        hedges.record(2048, duration)
    assert hedges.late_after_s(2048) == 0.5


def test_sizes_have_their_own_lateness() -> None:
    hedges = Hedges()
    for _ in range(64):
        hedges.record(2 << 10, 0.01)
        hedges.record(8 << 20, 1.0)
    assert hedges.late_after_s(3 << 10) == 0.01
    assert hedges.late_after_s(8 << 20) == 1.0
    assert hedges.late_after_s(100) is None


def test_one_request_in_twenty_is_hedged() -> None:
    hedges = Hedges()
    num_taken = 0
    for _ in range(10_000):
        hedges.earn()
        num_taken += hedges.take()
    assert 500 <= num_taken <= 516


def test_half_of_the_reserve_is_kept_for_what_is_needed_first() -> None:
    hedges = Hedges()
    assert sum(hedges.take(is_needed_first=False) for _ in range(100)) == 8
    assert sum(hedges.take() for _ in range(100)) == 8


def test_hedges_go_first_to_what_each_job_needs_first() -> None:
    mine, other = Flow("mine"), Flow("other")
    late = [request(mine, step) for step in (7, 5, 9)]
    late += [request(other, step) for step in (1002, 1001)]
    assert [(each.flow.name, each.urgency) for each in most_needed_first(late)] == [
        ("mine", 5),
        ("other", 1001),
        ("mine", 7),
        ("other", 1002),
        ("mine", 9),
    ]
