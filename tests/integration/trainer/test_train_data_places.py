"""Ranks read the same data from the same place, and the history says which epoch it was."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gyre_trainer.training.records.history import committed

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import IMPORTS, Jobs

DEADLINE_S = 240.0
CONFIG = """
[run]
out = "{out}"
steps = {steps}
log_every = 1
device = "cpu"
threads = 1
[data]
dataset = "{data}"
format = "tokens"
options = {{ dtype = "uint16", sequence_length = 9, append = true }}
batch_size = 4
sequence_length = 8
[model]
vocab_size = 65
num_layers = 1
dim = 16
num_heads = 2
num_kv_heads = 2
hidden_dim = 32
"""


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    interpreter = Interpreter(IMPORTS)
    jobs = Jobs(interpreter, tmp_path)
    yield jobs
    jobs.end(DEADLINE_S)
    interpreter.close()


def write(shard: Path, num_samples: int) -> None:
    shard.parent.mkdir(exist_ok=True)
    (np.arange(num_samples * 9) % 64).astype(np.uint16).tofile(shard)


def test_the_history_of_a_dataset_that_grows_says_the_epochs(tmp_path: Path, jobs: Jobs) -> None:
    write(tmp_path / "data/0.bin", 8)
    config = tmp_path / "train.toml"
    for steps, flags in ((3, []), (9, ["--resume"])):
        config.write_text(CONFIG.format(out=tmp_path / "run", data=tmp_path / "data", steps=steps))
        job = jobs.start("run", str(config), *flags)
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 0, errors
        write(tmp_path / "data/1.bin", 8)
    epochs = [each.epoch for each in committed(tmp_path / "run/history.jsonl")]
    assert epochs == [0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert '"epochs": 3.25' in (tmp_path / "run/report.json").read_text()


def test_a_rank_with_other_data_is_named_before_the_first_step(tmp_path: Path, jobs: Jobs) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, num_samples in enumerate([8, 12]):  # as on two nodes
        write(tmp_path / f"data-{rank}/0.bin", num_samples)
        config = tmp_path / f"{rank}.toml"
        data = tmp_path / f"data-{rank}"
        config.write_text(CONFIG.format(out=tmp_path / "run", data=data, steps=2))
        place = {
            "RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "GROUP_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        variables = {name: str(value) for name, value in place.items()}
        started.append(jobs.start("run", str(config), environment={**os.environ, **variables}))
    for job in started:
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 2, errors
        assert "rank 1 would read other data, or from another place" in errors
    assert not (tmp_path / "run/history.jsonl").exists()
