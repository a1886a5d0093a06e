"""The record of how long batches took."""

from gyre_daemon.fetching.fetch import BatchTiming, BatchTimings
from gyre_daemon.service.replies import from_timing
from gyre_daemon.storage.reads import Delays


def timing(step: int, job: str = "a", dataset: str = "x", num_steps: int = 1) -> BatchTiming:
    readers = {"uid:1", "uid:2"}
    steps, times = (step, step + num_steps), (10.0, 0.5)
    return BatchTiming(dataset, job, "uid:1", readers, 0, 1, *steps, *times, False, Delays(), "")


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    timings = BatchTimings(max_kept=3)
    for step in range(5):
        timings.add(timing(step))
    assert len(timings) == 3
    assert [bool(timings.find("x", step)) for step in range(6)] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]


def test_the_newest_comes_first_and_a_job_can_be_named() -> None:
    timings = BatchTimings()
    first, second, other = timing(7, "a"), timing(7, "b"), timing(7, "a", "y")
    for each in (first, second, other):
        timings.add(each)
    assert timings.find("x", 7) == [second, first]
    assert timings.find("x", 7, "a") == [first]
    assert timings.find("y", 7) == [other]
    assert timings.find("z", 7) == []


def test_who_did_not_read_a_batch_does_not_find_it() -> None:
    timings = BatchTimings()
    timings.add(timing(7))
    assert [len(timings.find("x", 7, reader=user)) for user in ("uid:1", "uid:2", "uid:3")] == [
        1,
        1,
        0,
    ]


def test_a_batch_that_was_read_for_another_users_job_does_not_name_that_job() -> None:
    """Both users read it from one shared stream."""
    jobs = [from_timing(timing(7), 11.0, reader).job for reader in ("uid:1", "uid:2", None)]
    assert jobs == ["a", "", "a"]


def test_a_batch_that_was_read_with_others_is_found() -> None:
    timings = BatchTimings()
    timings.add(timing(8, num_steps=4))
    assert [bool(timings.find("x", step)) for step in (7, 8, 11, 12)] == [False, True, True, False]
