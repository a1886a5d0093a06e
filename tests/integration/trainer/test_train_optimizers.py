"""`optimizer.name`: each optimizer trains from TOML, and resumes with the same bits."""

from pathlib import Path

import pytest
from gyre_trainer.training.history import committed

from tests.train_jobs import TINY_GPT, Jobs, tiny_run

WIDE = {**TINY_GPT, "dim": 64, "hidden_dim": 128}  # matrices large enough for codes


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw-8bit", "stochastic_rounding": True},
        {"name": "muon"},
        {"name": "adafactor", "lr": 0.05},
    ],
    ids=lambda each: each["name"],
)
def test_a_run_learns_and_resumes_with_the_same_bits(
    tmp_path: Path, tiny_jobs: Jobs, optimizer: dict[str, object]
) -> None:
    def run(out: str, *flags: str) -> Path:
        config = tmp_path / f"{out}.toml"
        config.write_text(
            tiny_run(
                tmp_path,
                run={"out": str(tmp_path / out), "steps": 6, "log_every": 1},
                model=WIDE,
                optimizer={"lr": 0.01, "schedule": "constant", **optimizer},
                checkpoint={"every": 3},
            )
        )
        status, errors = tiny_jobs.ran("run", str(config), "--nproc=2", *flags)
        assert status == 0, errors
        return tmp_path / out

    whole = run("whole")
    again = run("again", f"--resume={whole}/checkpoints/step-00000003")
    losses = [each.loss for each in committed(whole / "history.jsonl")]
    assert losses[-1] < losses[0] - 0.05
    assert [each.loss for each in committed(again / "history.jsonl")] == losses[3:]
