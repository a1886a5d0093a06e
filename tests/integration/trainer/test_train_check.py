"""`gyre-train check` finds this machine exact on the CPU, and fails where a step is wrong."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from gyre_trainer.check import programs, report
from gyre_trainer.comm.ring import Hop
from gyre_trainer.errors import ConfigError


def checked(*flags: str) -> tuple[int, dict[int, Any]]:
    """The exit status, and the rows by their numbers."""
    done = subprocess.run(
        [sys.executable, "-m", "gyre_trainer", "check", "--device", "cpu", "--json", *flags],
        capture_output=True,
        text=True,
        timeout=1500,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    content = json.loads(done.stdout)
    assert content["device"] == "cpu"
    return done.returncode, {row["number"]: row for row in content["rows"]}


def test_a_few_models_are_exact_here() -> None:
    status, rows = checked("--quick", "--rows", "1", "2", "3", "5")
    assert status == 0
    assert [*rows] == [1, 2, 3, 5]
    assert all(row["status"] == "ok" for row in rows.values()), rows
    assert rows[1]["figures"]["torch"] == torch.__version__
    assert 0 < rows[3]["figures"]["largest distance"] < programs.EXACT


@pytest.mark.models
@pytest.mark.timeout(1800)  # five minutes' work, on a machine that may be busy
def test_every_row_holds_here() -> None:
    status, rows = checked()
    assert status == 0
    assert [*rows] == [*range(1, report.NUM_ROWS + 1)]
    assert all(row["status"] == "ok" for row in rows.values()), rows


def poisoned_without_waiting(device: torch.device, case: str) -> dict[str, float]:
    """As row 4, by a ring that does not wait for its hops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hop, "wait", lambda hop: None)
        return programs.ranks_against_one(device, [case], ("block",))


def test_a_read_that_does_not_wait_for_its_hop_is_found() -> None:
    """By NaN, or because gloo ends a process whose buffers go before their transfers."""
    try:
        found = report.Checker("cpu").run(
            2, poisoned_without_waiting, "gathered on use", late="arrivals"
        )
    except report.ProgramFailed:
        return
    for of_rank in found:
        assert of_rank == {"gathered on use, block": float("inf")}


def test_a_distance_above_the_bound_fails_its_row() -> None:
    row = report.Row(3, "compare")
    row.require_small({"one": 1e-13, "other": 1e-9}, programs.EXACT)
    assert row.status == "failed"
    assert row.notes == ["other: 1.0e-09 is more than 1e-11"]
    assert "1 failed" in report.table([row])


def test_a_device_that_is_not_here_is_refused() -> None:
    report.require_device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            report.require_device("cuda")
