import logging

import pytest
from gyre_client.errors import (
    CursorRejected,
    DaemonUnavailable,
    Fenced,
    GyreError,
    LeaseExpired,
    Overloaded,
    StorageUnavailable,
)
from gyre_client.transport.connection import FIRST_PAUSE_S, MAX_PAUSE_S, Outage


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, pause_s: float) -> bool:
        self.now_s += pause_s
        return False


def longest(_low: float, high: float) -> float:
    return high


def test_pauses_double_up_to_a_ceiling_and_end_at_the_limit() -> None:
    clock = Clock()
    outage = Outage(20.0, clock, longest)
    pauses_s = []
    for _ in range(15):
        pauses_s.append(outage.next_pause_s(DaemonUnavailable("gone")))
        clock.wait(pauses_s[-1])
    with pytest.raises(DaemonUnavailable, match=r"gone \(gave up after 20\.0 s and 16 attempts\)"):
        outage.next_pause_s(DaemonUnavailable("gone"))
    assert pauses_s[:7] == [FIRST_PAUSE_S * 2**n for n in range(6)] + [MAX_PAUSE_S]
    assert sum(pauses_s) == pytest.approx(20.0)


def test_a_pause_is_jittered_but_never_shorter_than_the_daemon_wishes() -> None:
    outage = Outage(60.0, Clock(), lambda low, high: low + (high - low) / 3)
    assert outage.next_pause_s(DaemonUnavailable("gone")) == pytest.approx(FIRST_PAUSE_S / 3)
    assert outage.next_pause_s(Overloaded("full", {"retry_after_s": "7.5"})) == 7.5


TOO_LARGE = Overloaded("no", {"needed_bytes": "4097", "free_bytes": "4096", "limit_bytes": "4096"})


@pytest.mark.parametrize(
    "failure", [CursorRejected("no"), Fenced("no"), GyreError("no"), TOO_LARGE]
)
def test_an_error_that_no_retry_can_cure_is_raised_at_once(failure: GyreError) -> None:
    with pytest.raises(type(failure)) as caught:
        Outage(60.0, Clock(), longest).next_pause_s(failure)
    assert caught.value is failure


def test_only_silence_counts_and_adds_up_until_a_batch() -> None:
    clock = Clock()
    outage = Outage(10.0, clock, longest)
    for _ in range(2):  # 4 s away each time, 100 s of waiting for storage in between
        outage.next_pause_s(LeaseExpired("late"))
        clock.wait(4.0)
        outage.heard()
        clock.wait(100.0)
    assert outage.next_pause_s(LeaseExpired("late")) <= 2.0
    outage.batch_received()
    outage.next_pause_s(LeaseExpired("late"))
    clock.wait(9.0)
    outage.next_pause_s(LeaseExpired("late"))
    clock.wait(1.0)
    with pytest.raises(LeaseExpired, match="gave up"):
        outage.next_pause_s(LeaseExpired("late"))


def test_a_daemon_that_speaks_does_not_excuse_a_storage_that_stays_away() -> None:
    clock = Clock()
    outage = Outage(10.0, clock, longest)
    for _ in range(2):
        outage.next_pause_s(StorageUnavailable("no answer"))
        outage.heard()
        clock.wait(6.0)
    with pytest.raises(StorageUnavailable, match=r"gave up after 12\.0 s and 3 attempts"):
        outage.next_pause_s(StorageUnavailable("no answer"))


def test_attempts_are_repeated_logged_once_and_bounded_by_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    timeouts_s = []

    def attempt(timeout_s: float) -> str:
        timeouts_s.append(timeout_s)
        if len(timeouts_s) < 4:
            clock.wait(5.0)
            raise DaemonUnavailable("gone")
        return "found"

    with caplog.at_level(logging.WARNING):
        assert Outage(15.0, clock, longest).retry(attempt, clock.wait) == "found"
    assert timeouts_s[1] == pytest.approx(15.0 - FIRST_PAUSE_S)
    assert timeouts_s[2:] == pytest.approx(
        [15.0 - 5 - 3 * FIRST_PAUSE_S, 15.0 - 10 - 7 * FIRST_PAUSE_S]
    )
    assert [record.getMessage() for record in caplog.records] == [
        "gone; trying again for up to 15 s"
    ]


def test_a_stream_that_is_closing_does_not_retry() -> None:
    failure = DaemonUnavailable("gone")
    with pytest.raises(DaemonUnavailable) as caught:
        Outage(60.0).pause(failure, lambda _: True)
    assert caught.value is failure


def test_no_pause_is_negative_though_the_limit_passes_meanwhile() -> None:
    times = iter([0.0, 0.0, *(1.0 for _ in range(9))])  # the limit passes between two looks
    outage = Outage(0.5, lambda: next(times), longest)
    assert outage.next_pause_s(DaemonUnavailable("gone")) >= 0
