"""Ranks read the same data from the same place, and the history says which epoch it was."""

import os
import socket
from pathlib import Path

import numpy as np
from gyre_trainer.training.records.history import committed

from tests.train_jobs import DEADLINE_S, Jobs, tiny_run


def configuration(folder: Path, data: Path, steps: int) -> str:
    options = {"dtype": "uint16", "sequence_length": 9, "append": True}
    return tiny_run(
        folder,
        run={"steps": steps, "log_every": 1},
        data={"dataset": str(data), "options": options},
    )


def write(shard: Path, num_samples: int) -> None:
    shard.parent.mkdir(exist_ok=True)
    (np.arange(num_samples * 9) % 64).astype(np.uint16).tofile(shard)


def test_the_history_of_a_dataset_that_grows_says_the_epochs(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    write(tmp_path / "data/0.bin", 8)
    config = tmp_path / "train.toml"
    for steps, flags in ((3, []), (9, ["--resume"])):
        config.write_text(configuration(tmp_path, tmp_path / "data", steps))
        job = tiny_jobs.start("run", str(config), *flags)
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 0, errors
        write(tmp_path / "data/1.bin", 8)
    epochs = [each.epoch for each in committed(tmp_path / "run/history.jsonl")]
    assert epochs == [0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert '"epochs": 3.25' in (tmp_path / "run/report.json").read_text()


def test_a_rank_with_other_data_is_named_before_the_first_step(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, num_samples in enumerate([8, 12]):  # as on two nodes
        write(tmp_path / f"data-{rank}/0.bin", num_samples)
        config = tmp_path / f"{rank}.toml"
        data = tmp_path / f"data-{rank}"
        config.write_text(configuration(tmp_path, data, 2))
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
        started.append(tiny_jobs.start("run", str(config), environment={**os.environ, **variables}))
    for job in started:
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 2, errors
        assert "rank 1 would read other data, or from another place" in errors
    assert not (tmp_path / "run/history.jsonl").exists()
