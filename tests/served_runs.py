"""Runs of `gyre-train` on the data of one daemon, and what the daemon's order has for them."""

import contextlib
import io
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gyre_client.command.cli import main
from gyre_trainer.training.history import digest, read

from tests.train_jobs import Job, Jobs

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
[memory]
min_numel = 0
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


def write_data(folder: Path) -> dict[str, object]:
    """Writes two shards of random bytes; returns the dataset as a daemon's configuration has it."""
    folder.mkdir()
    generator = np.random.default_rng(3)
    for shard in range(2):
        tokens = generator.integers(
            0, 256, NUM_SAMPLES // 2 * (SEQUENCE_LENGTH + 1), dtype=np.uint8
        )
        (folder / f"{shard}.bin").write_bytes(tokens.tobytes())
    return {
        "uri": str(folder),
        "format": "tokens",
        "dtype": "uint8",
        "sequence_length": SEQUENCE_LENGTH + 1,
    }


def planned(address: str, step: int, **flags: object) -> list[int]:
    """The sample ids that `gyre plan` prints for a step."""
    order = {"batch-size": BATCH_SIZE, "seed": SEED, "step": step, **flags}
    words = [f"--{name}={value}" for name, value in order.items()]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["plan", "bytes", "--address", address, "--json", *words]) == 0
    return [int(sample_id) for sample_id in json.loads(printed.getvalue())["sample_ids"]]


def assert_planned(out: Path, address: str, num_steps: int) -> None:
    """Each step is committed once, with the samples that the order has for it."""
    records = read(out / "history.jsonl").steps
    assert [record.step for record in records] == list(range(num_steps))
    ids = planned(address, 0, **{"batch-size": BATCH_SIZE * num_steps})
    batches = [ids[start : start + BATCH_SIZE] for start in range(0, len(ids), BATCH_SIZE)]
    assert [record.sample_ids for record in records] == [digest(batch) for batch in batches]
    assert [record.epoch for record in records] == [
        step * BATCH_SIZE // NUM_SAMPLES for step in range(num_steps)
    ]


def wait_for_lines(path: Path, num_lines: int, job: Job) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert job.poll() is None, job.errors(DEADLINE_S)
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
