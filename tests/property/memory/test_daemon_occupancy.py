"""The integrals of a window against sums over all moments, and the bound on the number of jobs."""

from itertools import pairwise

from gyre_daemon.monitoring.metrics import (
    OTHERS,
    JobKey,
    Jobs,
    Occupancy,
    SessionTotals,
    WindowTimes,
)
from hypothesis import given
from hypothesis import strategies as st

# States of a window: ready batches, size, credits, whether the next batch is ready, and how many
# seconds it lasts.
STATES = st.lists(
    st.tuples(
        st.integers(0, 8), st.integers(0, 8), st.integers(0, 3), st.booleans(), st.integers(0, 5)
    ),
    max_size=12,
)
SHARE = 0.25  # of storage in each wait


@given(STATES)
def test_integrals_are_the_sums_over_all_moments(
    states: list[tuple[int, int, int, bool, int]],
) -> None:
    now, expected = 100.0, WindowTimes()
    occupancy = Occupancy(now - 7)  # nothing counts before the first note
    for ready, size, num_credits, head, seconds in states:
        occupancy.note(now, ready, size, num_credits, is_head_ready=head, storage_share=SHARE)
        for _ in range(seconds):
            late_s = float(size > 0 and num_credits > 0 and not head)
            expected += WindowTimes(
                ready, size, late_s * SHARE, float(head and not num_credits), late_s * (1 - SHARE)
            )
        now += seconds
    assert occupancy.at(now) == expected
    assert occupancy.at(now) == expected, "a reading changes nothing"


@given(STATES)
def test_no_integral_falls_and_waits_do_not_overlap(
    states: list[tuple[int, int, int, bool, int]],
) -> None:
    now, readings = 0.0, [WindowTimes()]
    occupancy = Occupancy(now)
    for ready, size, num_credits, head, seconds in states:
        occupancy.note(now, min(ready, size), size, num_credits, is_head_ready=head)
        now += seconds
        readings.append(occupancy.at(now))
    for before, after in pairwise(readings):
        assert before.window_ready_batch_s <= after.window_ready_batch_s
        assert before.window_size_batch_s <= after.window_size_batch_s
        assert before.wait_storage_s <= after.wait_storage_s
        assert before.wait_trainer_s <= after.wait_trainer_s
        assert before.wait_processor_s <= after.wait_processor_s
    last = readings[-1]
    assert last.window_ready_batch_s <= last.window_size_batch_s
    assert last.wait_storage_s + last.wait_trainer_s + last.wait_processor_s <= now


# A session opens, with the number of its job, or closes, with its age: the youngest is 0.
EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=60)


@given(EVENTS)
def test_jobs_are_bounded_and_no_counter_falls_while_its_job_is_open(
    events: list[tuple[bool, int]],
) -> None:
    jobs, live, num_sent = Jobs(max_jobs=3), list[tuple[JobKey, JobKey]](), 0
    seen: dict[JobKey, int] = {}
    for begins, number in events:
        if begins:
            key = JobKey(f"uid:{number % 2}", f"job-{number // 2}")
            live.append((jobs.open(key), key))
        elif live:
            counted_as, _ = live.pop(-1 - number % len(live))
            jobs.close(counted_as, SessionTotals(num_batches=1))
            num_sent += 1
        totals = jobs.totals((counted_as, SessionTotals(num_batches=1)) for counted_as, _ in live)
        assert set(totals) == set(jobs)
        assert len(set(totals) - {OTHERS}) <= 3
        assert {counted_as for counted_as, _ in live} <= set(totals)
        assert all(counted_as in (name, OTHERS) for counted_as, name in live)
        for counted_as, _ in live:
            assert totals[counted_as].num_batches >= seen.get(counted_as, 0)
        seen = {name: total.num_batches for name, total in totals.items()}
        assert sum(seen.values()) <= num_sent + len(live)


def test_only_a_job_without_a_session_makes_room_for_another() -> None:
    a, b, c, d, e = (JobKey("uid:1", name) for name in "abcde")
    jobs = Jobs(max_jobs=2)
    assert [jobs.open(key) for key in (a, b, c, a)] == [a, b, OTHERS, a]
    jobs.close(b, SessionTotals(num_batches=5))
    assert jobs.totals([])[b].num_batches == 5, "the totals of an ended job can still be read"
    assert jobs.open(d) == d
    assert jobs.open(b) == OTHERS
    jobs.close(a, SessionTotals())
    assert jobs.open(e) == OTHERS, "one of its two sessions is open"
    jobs.close(a, SessionTotals())
    assert jobs.open(e) == e
