"""Runs of `gyre-train` that end early: with whose fault, which status, and how many sentences."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.served_runs import DEADLINE_S, Trainer, wait_for_lines


def test_a_rank_that_dies_ends_the_job(tmp_path: Path, trainer: Trainer) -> None:
    job = trainer.start(
        tmp_path / "run", "--nproc=2", "--set=run.steps=100000", "--set=checkpoint.every=0"
    )
    wait_for_lines(tmp_path / "run" / "history.jsonl", 2, job)
    ranks = psutil.Process(job.pid).children(recursive=True)
    assert len(ranks) == 2
    ranks[1].kill()
    errors = job.errors(DEADLINE_S)
    assert job.returncode == 1
    assert "was ended by SIGKILL" in errors
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert not alive


def test_a_stopped_rank_ends_the_job_and_is_named(tmp_path: Path, trainer: Trainer) -> None:
    """A stopped rank does not end, so the other ranks find out when their wait times out.

    The timeout holds for the start as well: while ranks open their records and take their first
    step, each of them waits for the slowest. So it is several times what that takes on a busy
    machine; else the job ends before this test stops a rank.
    """
    flags = [
        "--nproc=3",
        "--set=data.batch_size=6",
        "--set=run.steps=100000",
        "--set=run.timeout_s=12",
        "--set=checkpoint.every=0",
    ]
    job = trainer.start(tmp_path / "run", *flags)
    wait_for_lines(tmp_path / "run" / "history.jsonl", 2, job)
    ranks = psutil.Process(job.pid).children(recursive=True)
    [stopped] = [rank for rank in ranks if rank.name() == "gyre-rank-1"]
    stopped.suspend()
    errors = job.errors(DEADLINE_S)
    assert job.returncode == 1
    assert "gyre-train: rank 1 is at fault: no sign of life" in errors  # and not "rank 0: "
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert not alive


def test_a_run_that_cannot_train_ends_with_status_2_and_one_sentence(
    tmp_path: Path, trainer: Trainer
) -> None:
    expected = {
        "data.dataset=words": "words",
        "data.sequence_length=15": "needs samples of 16 tokens",
        "optimizer.lr=1e30": "the loss is nan",
    }
    jobs = {flag: trainer.start(tmp_path / flag, f"--set={flag}") for flag in expected}
    for flag, job in jobs.items():
        errors = job.errors(DEADLINE_S)
        assert (job.returncode, errors.count("gyre-train: error:")) == (2, 1), errors
        assert expected[flag] in errors
        assert "Traceback" not in errors


def test_weights_that_are_not_finite_do_not_become_the_newest_checkpoint(
    tmp_path: Path, trainer: Trainer
) -> None:
    """The loss of a step is that of the weights before it, so it does not tell."""
    huge = "--set=optimizer.lr=1e38", "--set=optimizer.weight_decay=100"
    status, errors = trainer.run(tmp_path / "run", *huge, "--set=checkpoint.every=1")
    assert (status, errors.count("gyre-train: error:")) == (2, 1), errors
    assert "weights are not finite after 1 step" in errors
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_damaged_runs_are_refused_with_one_sentence(tmp_path: Path, trainer: Trainer) -> None:
    """A checkpoint whose step is not that of its place in the data, and a damaged history."""
    out = tmp_path / "run"
    status, errors = trainer.run(out, "--set=run.steps=4")
    assert status == 0, errors
    folder = out / "checkpoints" / "step-00000004"
    manifest = json.loads((folder / "checkpoint.json").read_text())
    history = (out / "history.jsonl").read_text()

    def refused(*flags: str, to: Path = out) -> str:
        status, errors = trainer.run(to, f"--resume={folder}", *flags)
        assert (status, errors.count("gyre-train: error:")) == (2, 1), errors
        assert "Traceback" not in errors
        return errors

    (folder / "checkpoint.json").write_text(json.dumps(manifest | {"step": 3}))
    assert "`step` is 3, but its place in the data is before step 4" in refused()
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    assert "of step 4, but `run.steps` is 3" in refused("--set=run.steps=3")
    assert "nothing is left to train" in refused("--set=run.steps=4", to=tmp_path / "other")
    (out / "history.jsonl").write_text("garbage\n" + history)
    assert "history.jsonl is damaged: line 1 is no record of a step" in refused()


def test_a_run_goes_on_where_nobody_reads_what_it_says(tmp_path: Path, trainer: Trainer) -> None:
    command = [sys.executable, "-m", "gyre_trainer", "run", str(trainer.config_path)]
    flags = [f"--set=run.out={tmp_path}/run", "--set=run.steps=3"]
    environment = {**os.environ, "GYRE_ADDRESS": trainer.address}
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, env=environment) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(timeout=DEADLINE_S) == 0
    assert json.loads((tmp_path / "run" / "report.json").read_text())["steps"] == 3


def test_records_that_cannot_be_written_end_a_run_with_one_sentence(
    tmp_path: Path, trainer: Trainer
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file in the way")
    status, errors = trainer.run(tmp_path / "run", "--set=run.steps=3")
    assert (status, errors.count("gyre-train: error:")) == (2, 1), errors
    assert "the records of the run cannot be written: " in errors
    assert f"{tmp_path}/run" in errors
    assert "Traceback" not in errors
