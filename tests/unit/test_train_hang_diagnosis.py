"""The rank at fault, from the progress that the ranks report."""

import pytest
from gyre_trainer.comm.hang_diagnosis import RankProgress, diagnose

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
