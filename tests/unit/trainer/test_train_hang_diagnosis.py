"""The rank at fault, from the progress that the ranks report; all ranks take one verdict."""

import threading
from datetime import timedelta

import pytest
from gyre_trainer.comm.hang_diagnosis import RankProgress, Verdict, Verdicts, _end, diagnose
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from tests.waiting import until

WAITS = "receiving weights"


@pytest.mark.parametrize(
    ("there", "missing", "expected"),
    [
        (
            {0: RankProgress(7, WAITS), 2: RankProgress(7, WAITS)},
            [1],
            "rank 1 is at fault: no sign of life",
        ),
        (
            {0: RankProgress(7, WAITS), 3: RankProgress(2, "")},
            [1, 2],
            "ranks 1, 2 are at fault: no sign of life",
        ),
        (
            {0: RankProgress(7, WAITS), 1: RankProgress(6, WAITS), 2: RankProgress(6, "")},
            [],
            "rank 2 is at fault: alive, but it stands",
        ),
        (
            {0: RankProgress(7, WAITS), 1: RankProgress(5, ""), 2: RankProgress(6, "")},
            [],
            "rank 1 is at fault: alive",
        ),
        (
            {0: RankProgress(7, WAITS), 1: RankProgress(7, WAITS), 2: RankProgress(4, WAITS)},
            [],
            "rank 2 is at fault: it came too late",
        ),
        (
            {0: RankProgress(7, WAITS), 1: RankProgress(7, WAITS)},
            [],
            "all ranks are alive and wait for each other",
        ),
    ],
)
def test_the_rank_at_fault_is_named(
    there: dict[int, RankProgress], missing: list[int], expected: str
) -> None:
    assert diagnose(there, missing).startswith(expected)


def verdicts(store: Store, *ranks: int) -> list[Verdicts]:
    return [Verdicts(store, rank, range(3)) for rank in ranks]


def test_the_first_verdict_stays_and_those_who_live_read_it() -> None:
    zero, one, two = verdicts(HashStore(), 0, 1, 2)
    assert zero.first() is None
    first = one.publish(Verdict("rank 2 is at fault", missing=[2]))
    assert zero.publish(Verdict("rank 1 is at fault: no sign of life")) == first
    zero.wait_until_read(first, timeout_s=600.0)  # at once: rank 2 is missing
    assert two.first() == first
    for again in verdicts(HashStore(), 0, 1):
        assert again.seen is None


def test_the_rank_that_serves_the_store_ends_once_the_others_have_read_the_verdict() -> None:
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=5)
    theirs = TCPStore("127.0.0.1", served.port, timeout=timeout, wait_for_workers=False)
    (zero,), (one,) = verdicts(served, 0), verdicts(theirs, 1)
    verdict = zero.publish(Verdict("rank 2 is at fault", missing=[2]))
    ending = threading.Thread(target=zero.wait_until_read, args=(verdict, 600.0))
    ending.start()
    assert ending.is_alive()
    until(lambda: one.first() is not None)
    ending.join()
    del served, zero, ending
    assert one.first() == verdict  # without the store


def test_the_collector_may_end_a_diagnosis_in_its_own_thread() -> None:
    stop = threading.Event()
    _end(threading.current_thread(), stop)
    assert stop.is_set()
