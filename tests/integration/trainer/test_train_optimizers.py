"""`optimizer.name`: each optimizer trains from TOML, and resumes with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import Adafactor, AdamW8bit, Muon, rotate, stochastically_rounded
from gyre_trainer.training.history import read
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

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
    losses = [each.loss for each in read(whole / "history.jsonl").steps]
    assert losses[-1] < losses[0] - 0.05
    assert [each.loss for each in read(again / "history.jsonl").steps] == losses[3:]


def test_codes_of_matrices_that_are_cut_otherwise_are_refused(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    """Two ranks share the two heads, so they cut the output's columns, and three its rows."""
    config = tmp_path / "train.toml"
    config.write_text(
        tiny_run(
            tmp_path,
            data={"batch_size": 6},
            model=WIDE,
            optimizer={"name": "adamw-8bit"},
            checkpoint={"every": 2},
        )
    )
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=2")
    assert status == 0, errors
    more = "--resume", "--set=run.steps=4"
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=3", *more)
    assert (status, "Resume on 2 ranks." in errors.splitlines()[-1]) == (2, True), errors
    status, errors = tiny_jobs.ran("run", str(config), "--nproc=1", *more)
    assert status == 0, errors


@pytest.mark.parametrize(
    "kind", [Adafactor, AdamW8bit, Muon, stochastically_rounded(torch.optim.AdamW)]
)
def test_a_backward_over_the_values_before_a_step_is_refused(kind: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        layer = rotate(nn.Linear(4, 4, bias=False).bfloat16(), mesh=make_mesh("cpu"))
        loss, other = (layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum() for _ in range(2))
        other.backward()
        kind(layer.parameters(), lr=0.1).step()
        with pytest.raises(RotationError, match="changed between forward and backward"):
            loss.backward()
    finally:
        dist.destroy_process_group()


def test_a_rank_without_a_matrix_sends_nothing_from_the_device_of_the_others() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        local = torch.empty(2, 4, device="meta")
        matrix = nn.Parameter(DTensor.from_local(local, make_mesh("cpu"), [Shard(0)]))
        matrix.grad = torch.zeros_like(matrix)
        Muon([matrix], lr=0.1).step()
    finally:
        dist.destroy_process_group()
    assert matrix._version == 1
