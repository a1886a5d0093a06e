"""`gyre-train run` with real ranks and a real daemon."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from gyre_trainer.training.records.history import committed, digest, resumes
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.conftest import Daemon, to_toml
from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import IMPORTS, Job, Jobs

DEADLINE_S = 150.0
NUM_SAMPLES, SEQUENCE_LENGTH, BATCH_SIZE, SEED = 60, 16, 8, 11
CONFIG = f"""
[run]
steps = 12
log_every = 1
device = "cpu"
threads = 1
out = "set by the test"
[data]
dataset = "bytes"
batch_size = {BATCH_SIZE}
sequence_length = {SEQUENCE_LENGTH}
seed = {SEED}
[model]
vocab_size = 257
num_layers = 2
dim = 32
num_heads = 2
num_kv_heads = 2
hidden_dim = 64
[optimizer]
warmup_steps = 3
[checkpoint]
every = 4
"""


@dataclass
class Trainer:
    """Starts `gyre-train` on one configuration."""

    config_path: Path
    address: str
    jobs: Jobs

    def start(self, out: Path, *flags: str, launch: tuple[str, ...] = ()) -> Job:
        module, *words = [*launch, "gyre_trainer"]
        return self.jobs.start(
            *words,
            "run",
            str(self.config_path),
            f"--set=run.out={out}",
            *flags,
            environment={**os.environ, "GYRE_ADDRESS": self.address},
            module=module,
        )

    def run(self, out: Path, *flags: str, launch: tuple[str, ...] = ()) -> tuple[int, str]:
        """Run to the end; return the exit status and standard error."""
        job = self.start(out, *flags, launch=launch)
        errors = job.errors(DEADLINE_S)
        return job.wait(DEADLINE_S), errors


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter(IMPORTS)
    yield interpreter
    interpreter.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one daemon that serves all runs of this file."""
    folder = tmp_path_factory.mktemp("daemon")
    data = folder / "data"
    data.mkdir()
    generator = np.random.default_rng(3)
    for shard in range(2):
        tokens = generator.integers(
            0, 256, NUM_SAMPLES // 2 * (SEQUENCE_LENGTH + 1), dtype=np.uint8
        )
        (data / f"{shard}.bin").write_bytes(tokens.tobytes())
    dataset = {
        "uri": str(data),
        "format": "tokens",
        "dtype": "uint8",
        "sequence_length": SEQUENCE_LENGTH + 1,
    }
    address = f"unix:{folder}/run/gyre.sock"
    config = {
        "listen": [address],
        "index_dir": str(folder / "index"),
        "drain_timeout_s": 3.0,
        "datasets": {"bytes": dataset},
    }
    (folder / "gyre.toml").write_text(to_toml(config))
    daemon = Daemon(folder / "gyre.toml", address, folder / "log", {}).start()
    yield address
    daemon.stop()


@pytest.fixture
def trainer(tmp_path: Path, address: str, interpreter: Interpreter) -> Iterator[Trainer]:
    config_path = tmp_path / "train.toml"
    config_path.write_text(CONFIG)
    jobs = Jobs(interpreter, tmp_path)
    yield Trainer(config_path, address, jobs)
    jobs.end(DEADLINE_S)


def planned(address: str, step: int, **flags: object) -> list[int]:
    """The sample ids that `gyre plan` prints for a step."""
    order = {"batch-size": BATCH_SIZE, "seed": SEED, "step": step, **flags}
    words = [f"--{name}={value}" for name, value in order.items()]
    command = [
        str(Path(sys.executable).with_name("gyre")),
        "plan",
        "bytes",
        "--address",
        address,
        "--json",
        *words,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120)
    return [int(sample_id) for sample_id in json.loads(done.stdout)["sample_ids"]]


def assert_planned(out: Path, address: str, num_steps: int) -> None:
    """Each step is committed once, with the samples that the order has for it."""
    records = committed(out / "history.jsonl")
    assert [record.step for record in records] == list(range(num_steps))
    ids = planned(address, 0, **{"batch-size": BATCH_SIZE * num_steps})
    batches = [ids[start : start + BATCH_SIZE] for start in range(0, len(ids), BATCH_SIZE)]
    assert [record.sample_ids for record in records] == [digest(batch) for batch in batches]
    assert [record.epoch for record in records] == [
        step * BATCH_SIZE // NUM_SAMPLES for step in range(num_steps)
    ]


def weights(checkpoint: Path) -> Mapping[str, torch.Tensor]:
    """Every tensor of a checkpoint, model and optimizer, whole."""
    path = checkpoint.parent / f"{checkpoint.name}.pt"
    dcp_to_torch_save(checkpoint, path)
    state = torch.load(path, weights_only=True)
    return {
        f"{part}.{name}": value
        for part in ("model", "optimizer")
        for name, value in state[part].items()
        if torch.is_tensor(value)
    }


def wait_for_lines(path: Path, num_lines: int, job: Job) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert job.poll() is None, job.errors(DEADLINE_S)
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


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
    assert resumes(killed / "history.jsonl") == [resumed_from]
    assert_planned(killed, trainer.address, 12)
    losses = [
        [record.loss for record in committed(out / "history.jsonl")] for out in (whole, killed)
    ]
    assert losses[0] == losses[1]
    expected, found = (weights(out / "checkpoints" / "step-00000012") for out in (whole, killed))
    assert expected.keys() == found.keys()
    assert len(expected) > 40  # weights, and two moments of each
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


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
        [record.loss for record in committed(out / "history.jsonl")]
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
    assert "gyre-train: rank 1 is at fault: no sign of life" in errors  # and not "rank 0 failed: "
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(ranks, timeout=120)
    assert not alive


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
    records = committed(out / "history.jsonl")
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


def test_a_resumed_run_leaves_steps_of_its_data_out(tmp_path: Path, trainer: Trainer) -> None:
    """At a private daemon, whose data is that of the other one."""
    out, folder = tmp_path / "run", Path(trainer.address.removeprefix("unix:")).parents[1]
    private = [
        f"--set=data.dataset={folder}/data",
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
    records = committed(out / "history.jsonl")
    steps = [0, 1, 2, 7, 8]
    expected = [digest(planned(trainer.address, step)) for step in steps]
    assert [record.sample_ids for record in records] == expected
    assert [record.epoch for record in records] == [step * 8 // NUM_SAMPLES for step in steps]
    report = json.loads((out / "report.json").read_text())
    assert (report["steps"], report["position"]) == (5, 9 * BATCH_SIZE)


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
