"""When a response is late, and how many requests are sent twice."""

import random
from unittest.mock import Mock

from gyre_daemon.runtime.threads import NO_JOB
from gyre_daemon.storage.engine.policies import Attempt, CredentialRefresh, Hedges, RangeRequest
from gyre_daemon.storage.response import ByteRange
from gyre_daemon.storage.shard import Shard


def request() -> RangeRequest:
    """Of 2 KiB."""
    wanted = ByteRange([Shard("0.bin", 4096, "")], 0, 0, 2048)
    return RangeRequest(CredentialRefresh(Mock()), "0.bin", wanted, NO_JOB, 0, 0.0)


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


def test_the_oldest_of_the_late_are_hedged_while_there_are_tokens() -> None:
    hedges = Hedges()
    for _ in range(32):
        hedges.record(2048, 0.5)
    requests = [request() for _ in range(20)]
    for number, each in enumerate(requests):
        hedges.begin(Attempt(each, number / 100, 0, is_hedge=False))
    assert hedges.take_late(0.6) == requests[:11]
    assert hedges.take_late(2.0) == requests[11:16]
    assert hedges.take_late(2.0) == []
