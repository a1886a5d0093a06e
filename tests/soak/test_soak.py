"""A small soak: every fault once while three jobs read, and the checker finds nothing."""

import tempfile
from pathlib import Path

import pytest

from tests.soak import checker, driver, plan

SEED = 16


@pytest.mark.timeout(480)
def test_every_fault_once_and_nothing_is_lost_doubled_or_wrong() -> None:
    # the paths of sockets are short
    with tempfile.TemporaryDirectory(prefix="gyre-soak-") as folder:
        histories = driver.run(Path(folder), plan.SMALL, SEED, seconds=None)
        report = checker.check(histories)
    assert report.problems == []
    assert (report.num_lost, report.num_doubled, report.num_wrong) == (0, 0, 0)
    assert report.num_samples > 10_000
    assert set(report.faults.values()) == {1}
