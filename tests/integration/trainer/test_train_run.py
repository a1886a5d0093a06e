"""`gyre-train run` with real ranks and a real daemon."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_client.page.training_run import TrainingRun
from gyre_trainer.training.history import digest, read

from tests.served_runs import (
    BATCH_SIZE,
    DEADLINE_S,
    NUM_SAMPLES,
    SEQUENCE_LENGTH,
    Trainer,
    assert_planned,
    planned,
    wait_for_lines,
    write_data,
)


def weights(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Every tensor of a checkpoint, model and optimizer, whole."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, path)
    state = torch.load(path, weights_only=True)
    return {
        f"{part}.{name}": value
        for part in ("model", "optimizer")
        for name, value in state[part].items()
        if torch.is_tensor(value)
    }


def test_a_killed_job_goes_on_as_if_nothing_had_happened(tmp_path: Path, trainer: Trainer) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, errors = trainer.run(whole, "--nproc=2")
    assert status == 0, errors
    assert "Warning" not in errors
    assert_planned(whole, trainer.address, 12)
    report = json.loads((whole / "report.json").read_text())
    assert (report["steps"], report["world_size"], report["position"]) == (12, 2, 96)
    assert report["num_tokens"] == 12 * BATCH_SIZE * SEQUENCE_LENGTH
    assert report["epochs"] == pytest.approx(96 / NUM_SAMPLES)
    assert len(report["peak_memory_bytes"]) == 2
    assert all(100 << 20 < peak < 4 << 30 for peak in report["peak_memory_bytes"])
    assert 0 <= report["data_wait_share"] < 1
    assert (whole / "loss.png").stat().st_size > 10_000
    check_status(whole, report["peak_memory_bytes"])
    assert len(list((whole / "tensorboard").glob("events.*"))) == 1
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == [
        "latest",
        "step-00000008",
        "step-00000012",
    ]

    job = trainer.start(killed, "--nproc=2")
    wait_for_lines(killed / "history.jsonl", 6, job)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait(DEADLINE_S)
    resumed_from = int(
        (killed / "checkpoints" / "latest").read_text().strip().removeprefix("step-")
    )
    status, errors = trainer.run(killed, "--nproc=2", "--resume")
    assert status == 0, errors
    assert read(killed / "history.jsonl").resumed_at == [resumed_from]
    assert_planned(killed, trainer.address, 12)
    losses = [
        [record.loss for record in read(out / "history.jsonl").steps] for out in (whole, killed)
    ]
    assert losses[0] == losses[1]
    expected, found = (weights(out / "checkpoints" / "step-00000012") for out in (whole, killed))
    assert expected.keys() == found.keys()
    assert len(expected) > 40  # weights, and two moments of each
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def check_status(out: Path, peaks: list[int]) -> None:
    """The status is that of the last step; the page reads samples by its cursor."""
    run = TrainingRun(0, out)
    run.look()
    shown = run.plain()
    assert (shown["state"], shown["step"], shown["steps"]) == ("finished", 12, 12)
    assert shown["loss"] == read(out / "history.jsonl").steps[-1].loss
    assert shown["tokens_per_s"] > 0
    assert len(shown["ranks"]) == 2
    for rank, peak in zip(shown["ranks"], peaks, strict=True):
        assert 0 < rank["hop_wait_s"] < rank["step_s"]
        assert 0 <= rank["data_wait_s"] < rank["step_s"]
        assert rank["memory_bytes"] <= peak
    assert run.curve()["step"] == list(range(12))
    assert run.request(3).batch == 3
    (out / "checkpoints").rename(out / "moved")  # the status is enough, too
    assert run.request(3).cursor.startswith(b"GYRE")
    (out / "moved").rename(out / "checkpoints")


def test_torchrun_and_another_world_size_consume_and_learn_the_same(
    tmp_path: Path, trainer: Trainer
) -> None:
    launched, under_torchrun = tmp_path / "launched", tmp_path / "torchrun"
    status, errors = trainer.run(
        launched, "--set=run.steps=4", "--set=optimizer.accumulation_steps=2"
    )
    assert status == 0, errors
    torchrun = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
    )
    status, errors = trainer.run(under_torchrun, "--set=run.steps=4", launch=torchrun)
    assert status == 0, errors
    for out in (launched, under_torchrun):
        assert_planned(out, trainer.address, 4)
    one_rank, two_ranks = (
        [record.loss for record in read(out / "history.jsonl").steps]
        for out in (launched, under_torchrun)
    )
    assert one_rank == pytest.approx(two_ranks, rel=1e-5)

    # A checkpoint of two ranks goes on on one.
    status, errors = trainer.run(
        under_torchrun,
        "--set=run.steps=6",
        "--resume",
        str(under_torchrun / "checkpoints/step-00000004"),
    )
    assert status == 0, errors
    assert_planned(under_torchrun, trainer.address, 6)


def test_padding_evaluation_and_bfloat16_in_one_run(tmp_path: Path, trainer: Trainer) -> None:
    """An epoch of 60 samples is 7 batches of 8 and one of 4.

    With `pad`, the eighth counts half its targets.
    """
    out = tmp_path / "run"
    flags = [
        "data.tail=pad",
        "run.steps=9",
        "eval.dataset=bytes",
        "eval.every=5",
        "eval.batches=2",
        "checkpoint.every=0",
    ]
    flags += [
        "precision.compute_dtype=bfloat16",
        "precision.grad_dtype=bfloat16",
        "run.log_every=4",
    ]
    status, errors = trainer.run(out, "--nproc=2", *(f"--set={flag}" for flag in flags))
    assert status == 0, errors
    records = read(out / "history.jsonl").steps
    assert [record.num_targets for record in records] == [BATCH_SIZE * SEQUENCE_LENGTH] * 7 + [
        4 * SEQUENCE_LENGTH,
        128,
    ]
    assert [record.epoch for record in records] == [0] * 8 + [1]
    assert records[7].sample_ids == digest(planned(trainer.address, 7, tail="pad"))
    report = json.loads((out / "report.json").read_text())
    assert report["epochs"] == pytest.approx(9 / 8)
    assert report["eval_loss"] == pytest.approx(np.log(256), abs=0.5)
    assert not (out / "checkpoints").exists()


def test_a_resumed_run_leaves_steps_of_its_data_out(tmp_path: Path, trainer: Trainer) -> None:
    """At a private daemon, whose data is that of the other one."""
    out, data = tmp_path / "run", write_data(tmp_path / "bytes")
    private = [
        f"--set=data.dataset={data['uri']}",
        "--set=data.format=tokens",
        f'--set=data.options={{dtype = "uint8", sequence_length = {SEQUENCE_LENGTH + 1}}}',
    ]
    private += ["--set=optimizer.warmup_steps=0"]
    status, errors = trainer.run(out, *private, "--set=run.steps=2")
    assert status == 0, errors
    less = [*private, "--resume", "--set=run.steps=5"]
    status, errors = trainer.run(out, *less, "--set=data.skip_steps=[[1, 9]]")
    assert (status, "it stands at step 2" in errors) == (2, True), errors
    status, errors = trainer.run(out, *less, "--set=data.skip_steps=[[3, 7]]")
    assert status == 0, errors
    records = read(out / "history.jsonl").steps
    steps = [0, 1, 2, 7, 8]
    expected = [digest(planned(trainer.address, step)) for step in steps]
    assert [record.sample_ids for record in records] == expected
    assert [record.epoch for record in records] == [step * 8 // NUM_SAMPLES for step in steps]
    report = json.loads((out / "report.json").read_text())
    assert (report["steps"], report["position"]) == (5, 9 * BATCH_SIZE)
