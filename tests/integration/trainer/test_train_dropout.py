"""Runs of a model that drops out, in its blocks and beside them."""

from pathlib import Path

import pytest
from gyre_trainer.training.history import read

from tests.train_jobs import Jobs, tiny_run

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 65,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 16,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
}


def losses(run: Path) -> list[float]:
    return [each.loss for each in read(run / "history.jsonl").steps]


@pytest.mark.parametrize(
    "memory",
    [
        {"recompute": "block"},
        pytest.param({"recompute": "layer"}, marks=pytest.mark.models),
    ],
)
def test_a_resumed_run_drops_out_the_same(
    memory: dict[str, bool], tmp_path: Path, tiny_jobs: Jobs
) -> None:
    config = tmp_path / "train.toml"
    config.write_text(
        tiny_run(
            tmp_path,
            run={"steps": 4},
            model={"config": GPT2},
            memory=memory,
            checkpoint={"every": 2},
        )
    )
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2")
    assert status == 0, errors
    resumed, at_2 = tmp_path / "resumed", tmp_path / "run/checkpoints/step-00000002"
    flags = ("--nproc=2", "--resume", str(at_2), f"--set=run.out={resumed}")
    status, errors = tiny_jobs.ran("run", str(config), *flags)
    assert status == 0, errors
    assert losses(resumed) == losses(tmp_path / "run")[2:]
