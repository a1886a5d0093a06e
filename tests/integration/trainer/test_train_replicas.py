"""`run.replicas`: rings beside each other, resumed on other numbers of rings and ranks."""

import json
from pathlib import Path

import pytest
from gyre_trainer.training.history import read

from tests.train_jobs import Jobs, tiny_run


def files(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Size and CRC-32 of the tensors of each rank."""
    table = json.loads((checkpoint / "checkpoint.json").read_text())["files"]
    return {name: tuple(each) for name, each in table.items() if name != ".metadata"}


def test_two_rings_of_two_train_as_one_ring_and_resume_on_any(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    def run(out: str, *flags: str) -> tuple[int, str]:
        config = tmp_path / f"{out}.toml"
        config.write_text(
            tiny_run(
                tmp_path,
                run={"out": str(tmp_path / out), "steps": 4, "log_every": 1},
                data={"batch_size": 12},
                optimizer={"lr": 0.01, "clip_norm": 0.5},
                checkpoint={"every": 2},
            )
        )
        return tiny_jobs.ran("run", str(config), *flags)

    rings = ["--nproc=4", "--set=run.replicas=2"]
    status, errors = run("whole", *rings)
    assert status == 0, errors
    checkpoints = tmp_path / "whole/checkpoints"
    halfway = f"--resume={checkpoints}/step-00000002"
    for out, ranks in {"again": rings, "one-ring": ["--nproc=3"]}.items():
        status, errors = run(out, *ranks, halfway)
        assert status == 0, errors
    whole = read(tmp_path / "whole/history.jsonl").steps
    again = read(tmp_path / "again/history.jsonl").steps
    one_ring = read(tmp_path / "one-ring/history.jsonl").steps
    assert [each.step for each in again] == [2, 3]
    for expected, same, close in zip(whole[2:], again, one_ring, strict=True):
        assert expected.sample_ids == same.sample_ids == close.sample_ids
        assert same.loss == expected.loss
        assert close.loss == pytest.approx(expected.loss, rel=1e-5)
    last = "checkpoints/step-00000004"
    assert files(tmp_path / "again" / last) == files(tmp_path / "whole" / last)
    status, errors = run("odd", "--nproc=3", "--set=run.replicas=2")
    assert (status, "make the number of ranks a multiple" in errors) == (2, True), errors
