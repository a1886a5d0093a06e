"""Ranks read the same data from the same place, and the history says which epoch it was."""

import os
import socket
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from gyre_client import Loader
from gyre_client.command.cli import main
from gyre_trainer.training.history import digest, read

from tests.conftest import StartDaemon
from tests.train_jobs import DEADLINE_S, Job, Jobs, tiny_run


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
    epochs = [each.epoch for each in read(tmp_path / "run/history.jsonl").steps]
    assert epochs == [0, 0, 1, 1, 2, 2, 2, 2, 3]
    assert '"epochs": 3.25' in (tmp_path / "run/report.json").read_text()


def test_rewind_needs_nothing_but_the_folder_of_a_run(
    tmp_path: Path, tiny_jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "data/0.bin", 8)
    config = tmp_path / "train.toml"
    config.write_text(configuration(tmp_path, tmp_path / "data", 2))
    job = tiny_jobs.start("run", str(config))
    errors = job.errors(DEADLINE_S)
    assert job.wait(DEADLINE_S) == 0, errors
    status = main(["rewind", str(tmp_path / "run"), "--step", "1", "--num", "1"])
    found = capsys.readouterr()
    assert status == 0, found.err
    assert "the history has the same samples" in found.out


def start_as_on_two_nodes(
    tiny_jobs: Jobs, configs: list[Path], **variables: list[str]
) -> list[Job]:
    """Starts a rank with each configuration; each has its own values of more variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, config in enumerate(configs):
        place = {
            "RANK": rank,
            "WORLD_SIZE": len(configs),
            "LOCAL_RANK": 0,
            "GROUP_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        place |= {name: values[rank] for name, values in variables.items()}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        started.append(tiny_jobs.start("run", str(config), environment=environment))
    return started


def test_a_rank_with_other_data_is_named_before_the_first_step(
    tmp_path: Path, tiny_jobs: Jobs
) -> None:
    configs = [tmp_path / f"{rank}.toml" for rank in range(2)]
    for rank, num_samples in enumerate([8, 12]):
        write(tmp_path / f"data-{rank}/0.bin", num_samples)
        configs[rank].write_text(configuration(tmp_path, tmp_path / f"data-{rank}", 2))
    for job in start_as_on_two_nodes(tiny_jobs, configs):
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 2, errors
        assert "rank 1 would read other data, or from another place" in errors
    assert not (tmp_path / "run/history.jsonl").exists()


MIXTURE = {"weights": {"one": 0.5, "two": 0.5}, "block": 8}
LATER = {"schedule": [{"step": 3, "weights": {"one": 1}}]}


def two_sources(folder: Path) -> dict[str, dict[str, object]]:
    """Writes the sources of the mixture; returns their tables."""
    for name in ("one", "two"):
        write(folder / f"{name}/0.bin", 64)
    table = {"format": "tokens", "dtype": "uint16", "sequence_length": 9}
    return {name: {"uri": str(folder / name), **table} for name in ("one", "two")}


def test_a_resumed_run_with_weights_keeps_the_schedule(
    gyred: StartDaemon, tmp_path: Path, tiny_jobs: Jobs
) -> None:
    daemon = gyred({"datasets": two_sources(tmp_path), "mixtures": {"all": MIXTURE | LATER}})
    weights = {"one": 0.25, "two": 0.75}
    data = {"dataset": "all", "format": "", "options": {}, "weights": weights}
    config = tmp_path / "train.toml"
    for steps, flags in ((5, []), (8, ["--resume"])):
        config.write_text(tiny_run(tmp_path, run={"steps": steps, "log_every": 1}, data=data))
        environment = {**os.environ, "GYRE_ADDRESS": daemon.address}
        job = tiny_jobs.start("run", str(config), *flags, environment=environment)
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 0, errors
    with Loader("all", batch_size=4, address=daemon.address, weights=weights) as loader:
        batches = list(islice(loader.stream(), 8))
    assert [bool(batch["source"].any()) for batch in batches] == [True] * 3 + [False] * 5
    assert [each.sample_ids for each in read(tmp_path / "run/history.jsonl").steps] == [
        digest(batch["sample_id"].tolist()) for batch in batches
    ]


def test_ranks_with_other_weights_of_a_mixture_are_named_before_the_first_step(
    gyred: StartDaemon, tmp_path: Path, tiny_jobs: Jobs
) -> None:
    """Two daemons, of which one has a change in its schedule that the other has not."""
    datasets = two_sources(tmp_path)
    mixtures = [{"all": MIXTURE}, {"all": MIXTURE | LATER}]
    addresses = [gyred({"datasets": datasets, "mixtures": each}).address for each in mixtures]
    config = tmp_path / "train.toml"
    data = {"dataset": "all", "format": "", "options": {}}
    config.write_text(tiny_run(tmp_path, run={"steps": 6, "log_every": 1}, data=data))
    for job in start_as_on_two_nodes(tiny_jobs, [config] * 2, GYRE_ADDRESS=addresses):
        errors = job.errors(DEADLINE_S)
        assert job.wait(DEADLINE_S) == 2, errors
        assert "rank 1 would read other data, or from another place" in errors
    assert not (tmp_path / "run/history.jsonl").exists()
