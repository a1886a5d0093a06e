"""Ray Train on three raylets of this machine, each of which is a node to Ray."""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import ray.train
import ray.train.torch
import torch
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.integrations import ray as gyre_ray
from gyre_client.integrations.ray import GyreDataIterator
from gyre_client.transport.run import temporary_folder
from ray.cluster_utils import Cluster

from tests.examples import planned, run_example
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own

REPOSITORY = Path(__file__).parents[3]
LENGTH, NUM_SAMPLES, BATCH_SIZE = 8, 60, 12
STOP_AT, NUM_STEPS = 3, 7  # an epoch has five
# Ray's limits are for a machine that is not busy.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
}
OPTIONS: dict[str, Any] = {
    "format": "tokens",
    "options": {"sequence_length": LENGTH, "dtype": "uint16"},
}


def processes_of(folder: str) -> list[str]:
    """The command lines of processes that name a folder, or whose environment does."""
    found = []
    for process in psutil.process_iter():
        try:
            if folder in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three raylets that have a processor each; all that they started is gone at the end."""
    with (
        # Not in pytest's folder: the paths of Ray's sockets may have 107 characters.
        tempfile.TemporaryDirectory(dir="/tmp", prefix="ray") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TMPDIR", folder)
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for limit, value in PATIENT.items():
            patch.setenv(limit, value)
        patch.delenv("GYRE_ADDRESS", raising=False)
        node: dict[str, Any] = {
            "num_cpus": 1,
            "object_store_memory": 80 << 20,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,  # of what an autoscaler would start
        }
        cluster = Cluster()
        try:
            for _ in range(3):
                cluster.add_node(**node)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()  # type: ignore[no-untyped-call]
        until(lambda: not processes_of(f"{folder}/"))


def train(config: dict[str, Any]) -> None:
    """What a worker runs: it goes on at the checkpoint, and saves at the end."""
    data = GyreDataIterator(config["tokens"], batch_size=BATCH_SIZE, **OPTIONS)
    if config["checkpoint"]:
        with ray.train.Checkpoint(config["checkpoint"]).as_directory() as folder:
            data.load_state_dict(torch.load(Path(folder, "data.pt"), weights_only=True))
    with pytest.raises(InvalidRequest, match="batch_size: a worker's batches have"):
        data.iter_torch_batches(batch_size=5)
    steps: list[list[int]] = []
    while data.loader.step < config["num_steps"]:
        for batch in data.iter_torch_batches(batch_size=data.loader.local_batch_size):
            steps.append(batch["sample_id"].tolist())
            if data.loader.step == config["num_steps"]:
                break
    rank, daemon = ray.train.get_context().get_world_rank(), data.loader._place.target.private
    assert daemon
    Path(config["out"], f"{rank}.json").write_text(json.dumps([daemon.pid, steps]))
    if rank:
        ray.train.report({})
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(data.state_dict(), Path(folder, "data.pt"))
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def fit(
    folder: Path, num_workers: int, checkpoint: str, num_steps: int
) -> tuple[str, set[int], list[list[int]]]:
    """The path of a run's checkpoint, the daemons of its workers, and its global batches."""
    out = folder / f"{num_workers}-workers"
    out.mkdir()
    config = {"checkpoint": checkpoint, "num_steps": num_steps, "out": str(out)}
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={**config, "tokens": str(folder / "tokens.bin")},
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(name=out.name, storage_path=str(folder / "storage")),
    ).fit()
    assert result.checkpoint
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_workers)]
    daemons, parts = zip(*found, strict=True)
    steps = [[*itertools.chain(*step)] for step in zip(*parts, strict=True)]
    return str(result.checkpoint.path), set(daemons), steps


def test_a_run_resumes_with_fewer_workers_and_the_daemons_of_their_nodes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Three workers on three nodes, then two; no worker of the first three is left by then."""
    tokens = tmp_path / "tokens.bin"
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.uint16).tofile(tokens)
    with Loader(tokens, batch_size=BATCH_SIZE, **OPTIONS) as loader:
        expected = [next(loader)["sample_id"].tolist() for _ in range(NUM_STEPS)]
    saved, daemons, first = fit(tmp_path, 3, "", STOP_AT)
    assert len(daemons) == 3
    _, of_two, then = fit(tmp_path, 2, saved, NUM_STEPS)
    assert first + then == expected
    assert of_two < daemons


def test_the_actor_ends_when_nothing_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the driver's node, whose actor another test may have started."""
    context = ray.get_runtime_context()
    actor = {"name": f"gyre-{context.get_node_id()}", "namespace": f"gyre-{context.get_job_id()}"}
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(**actor))
    monkeypatch.setattr(gyre_ray, "IDLE_S", 1.0)
    name = gyre_ray._daemon_of_this_node()
    until(lambda: actor not in ray.util.list_named_actors(all_namespaces=True))
    until(lambda: not (temporary_folder() / f"gyred-{name}").exists())


def test_the_example_consumes_what_is_planned(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        run_example("ray_train", tmp_path)
    for rank in range(2):
        consumed = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert consumed == planned(tmp_path, rank, 2), f"rank {rank}"
