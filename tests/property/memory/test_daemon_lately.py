"""Rates of a session over the last seconds, however its batches are grouped."""

import pytest
from gyre_daemon.monitoring.metrics import (
    MIN_GAP_S,
    SILENCE_S,
    SPAN_S,
    Recorder,
    SessionTotals,
    StorageShare,
    WindowTimes,
)
from hypothesis import given
from hypothesis import strategies as st

BYTES = 1000


def totals(num_sent: int, now: float = 0.0) -> SessionTotals:
    return SessionTotals(
        num_sent, num_sent * BYTES, WindowTimes(now, 2 * now, 0.0, 0.0, now / 4), now / 8
    )


@given(
    rate=st.sampled_from([1.0, 50.0, 3000.0]),
    group=st.integers(1, 255),
    gaps=st.lists(st.floats(0.3, 1.5), min_size=20, max_size=60),
    look_after=st.floats(0.0, 1.0),
)
def test_a_steady_trainer_has_its_rate_whatever_the_batch_groups(
    rate: float, group: int, gaps: list[float], look_after: float
) -> None:
    recorder, now = Recorder(0.0), 0.0
    for gap in gaps:
        now += gap
        num_taken = int(rate * now)
        if recorder.is_due(now):
            recorder.mark(now, num_taken, totals((num_taken // group + 1) * group, now))
    lately = recorder.at(now + look_after, totals(int(rate * now), now + look_after))
    # at either end, a batch may be about to be taken
    error = 1.5 / (SPAN_S - 2 * MIN_GAP_S - 1.5)
    assert lately.batches_per_s == pytest.approx(rate, abs=error if now > SPAN_S else 2 / now)
    assert lately.bytes_per_s == pytest.approx(lately.batches_per_s * BYTES)
    assert SPAN_S <= lately.elapsed_s <= SPAN_S + 4 or now < SPAN_S + 2
    assert lately.times.window_ready_batch_s == pytest.approx(lately.elapsed_s)
    assert lately.trainer_waited_s == pytest.approx(lately.elapsed_s / 8)


def test_the_rate_of_a_trainer_that_stops_falls_to_zero() -> None:
    recorder = Recorder(0.0)
    for second in range(1, 21):
        recorder.mark(float(second), 50 * second, totals(50 * second))
    rates = [
        recorder.at(20.0 + later, totals(1000)).batches_per_s
        for later in (0.0, 1.0, SILENCE_S + 0.1, 6.0, 9.0, 11.0)
    ]
    assert rates[:2] == [50.0, 50.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == 0.0


def test_a_session_that_has_just_begun_has_no_rate() -> None:
    recorder = Recorder(5.0)
    assert recorder.at(5.0, SessionTotals()).batches_per_s == 0.0
    assert recorder.at(5.5, SessionTotals()).elapsed_s == 0.5


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.001, 10.0)), max_size=40))
def test_the_storage_share_lies_between_zero_and_one(groups: list[tuple[float, float]]) -> None:
    share = StorageShare(until_known=0.5)
    assert share.value == 0.5
    for storage_s, total_s in groups:
        share.add(storage_s, total_s)
        assert 0.0 <= share.value <= 1.0


def test_the_storage_share_follows_the_last_reads() -> None:
    share = StorageShare(until_known=0.0)
    for _ in range(5):
        share.add(0.9, 1.0)
    assert share.value == pytest.approx(0.9)
    for _ in range(40):
        share.add(0.0, 1.0)
    assert share.value < 0.1, "the cache has become warm"
