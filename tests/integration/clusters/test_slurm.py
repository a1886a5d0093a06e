"""The files of docker/slurm on a real cluster: jobs lose nodes, and shared daemons come and go.

All nodes are on one kernel. Where it has no control groups of version 1, these tests do not show
that the memory of a step's daemon is the step's.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import StartDaemon
from tests.integration.clusters import recorded_training as training
from tests.slurm_cluster import DEADLINE_S, REPOSITORY, Cluster, cluster, why_none
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(why_none()), reason=f"no Slurm cluster here: {why_none()}")

ALICE = 21002
SLURM = REPOSITORY / "docker" / "slurm"
SCRIPT = str(Path(training.__file__))
NUM_SAMPLES = 200
DATASET = {"format": "tokens", "dtype": "int32", "sequence_length": training.SAMPLE_LENGTH}
ENVIRONMENT = {
    "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
    "HOME": "/srv/job",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "GYRE_MEMORY_BUDGET": "256MiB",
    "GYRE_CACHE_MEMORY": "16MiB",
}
SMALL = ("--gpus-per-node=0", "--cpus-per-task=2", "--mem=2G", "--output=/srv/job/out")


class Jobs:
    """What one user runs on a cluster, in a folder that all nodes share."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "job"
        self.folder.mkdir()
        os.chown(self.folder, ALICE, ALICE)
        numbers = np.arange(NUM_SAMPLES * training.SAMPLE_LENGTH, dtype=np.int32)
        numbers.tofile(self.folder / "numbers.bin")
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in DATASET.items()]
        self.configuration = '[datasets.numbers]\nuri = "/srv/job/numbers.bin"\n' + "".join(lines)
        (self.folder / "gyre.toml").write_text(self.configuration)

    def submit(self, *arguments: str, **more: str) -> str:
        command = ["sbatch", "--parsable", "--chdir=/srv/job", *SMALL, *arguments]
        environment = ENVIRONMENT | more
        return self.cluster.run(command, user="alice", environment=environment).strip()

    def state(self, job: str) -> str:
        found = self.cluster.run(["scontrol", "show", "job", job])
        (state,) = re.findall(r"JobState=(\S+)", found)
        return str(state)

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Waits; an error shows what the jobs and the cluster said."""
        try:
            until(holds, DEADLINE_S)
        except AssertionError:
            logs = [self.folder / "out", *sorted(self.cluster.folder.glob("*.log"))]
            said = [f"{path}:\n{path.read_text()[-4000:]}" for path in logs if path.exists()]
            raise AssertionError("\n".join(said)) from None

    def steps(self, num_nodes: int, rank: int) -> list[dict[str, Any]]:
        path = self.folder / f"steps-{num_nodes}-{rank}"
        return steps_in(path) if path.exists() else []


def steps_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def alone() -> Iterator[Jobs]:
    """A cluster whose operator knows nothing of Gyre."""
    with cluster(2) as running:
        yield Jobs(running)


@pytest.fixture
def operated() -> Iterator[Jobs]:
    """A cluster with the prolog and the epilog."""
    scripts = f"Prolog={SLURM}/prolog\nEpilog={SLURM}/epilog\n"
    settings = f"{scripts}PrologFlags=Alloc\nBatchStartTimeout=300\n"
    with cluster(2, settings) as running:
        jobs = Jobs(running)
        running.run(["cp", "/srv/job/gyre.toml", "/etc/gyre/gyre.toml"])
        yield jobs


def undisturbed(jobs: Jobs, gyred: StartDaemon, folder: Path) -> list[dict[str, Any]]:
    """The steps of one process without Slurm."""
    numbers = {"uri": str(jobs.folder / "numbers.bin"), **DATASET}
    daemon = gyred({"datasets": {"numbers": numbers}})
    environment = {**os.environ, "GYRE_ADDRESS": daemon.address}
    command = [sys.executable, SCRIPT, str(folder)]
    subprocess.run(command, env=environment, check=True, timeout=DEADLINE_S)
    return steps_in(folder / "steps-1-0")


@pytest.mark.parametrize("lost", ["n1", "n2"])
def test_a_job_goes_on_with_the_nodes_that_are_left(
    lost: str, alone: Jobs, gyred: StartDaemon, tmp_path: Path
) -> None:
    """The batch script runs on n1."""
    jobs, nodes = alone, alone.cluster
    script = f"{SLURM}/train.sbatch", SCRIPT, "/srv/job", "2:7"
    job = jobs.submit("--nodes=1-2", *script, RANKS_PER_NODE="1")
    jobs.wait_for(lambda: len(jobs.steps(2, 0)) == 7)
    nodes.kill_node(lost)
    jobs.wait_for(lambda: jobs.state(job) == "COMPLETED")

    expected = undisturbed(jobs, gyred, tmp_path)
    for num_nodes, steps in ((2, range(7)), (1, range(4, training.NUM_STEPS))):
        by_rank = [jobs.steps(num_nodes, rank) for rank in range(num_nodes)]
        for ranks in by_rank:
            assert [each["step"] for each in ranks] == list(steps)
        for found in zip(*by_rank, strict=True):
            wanted = expected[found[0]["step"]]
            assert [sample for each in found for sample in each["samples"]] == wanted["samples"]
            for each in found:
                assert each["loss"] == pytest.approx(wanted["loss"], rel=1e-9)
                if nodes.has_control_groups:
                    assert f"/job_{job}/step_0" in each["own_group"]
                    assert each["daemon_group"] == each["own_group"]
                    assert each["shared_bytes"] > 1 << 20

    def folders(name: str) -> list[str]:
        return [path for path in nodes.files(name) if path.startswith(f"gyre-{ALICE}/")]

    (left,) = {"n1", "n2"} - {lost}
    assert not folders(left)
    assert f"gyre-{ALICE}/{job}/cache" in folders(lost), "nothing ran when the node died"
    nodes.start_node(lost)
    jobs.wait_for(lambda: nodes.states()[lost] == "idle")
    probe = f"{SLURM}/train.sbatch", "--no-python", "true"
    job = jobs.submit("--nodes=1", f"--nodelist={lost}", *probe, RANKS_PER_NODE="1")
    jobs.wait_for(lambda: jobs.state(job) == "COMPLETED")
    assert not folders(lost)


def test_jobs_of_a_node_share_the_daemon_of_its_prolog(operated: Jobs) -> None:
    jobs, nodes = operated, operated.cluster

    def num_events() -> list[int]:
        log = nodes.run(["cat", "/var/log/gyred.log"])
        return [log.count(f'"event": "{event}"') for event in ("ready", "stopped")]

    script = f"{SLURM}/shared.sbatch", SCRIPT
    first = jobs.submit("--nodes=2", *script, "/srv/job", "2:6", RANKS_PER_NODE="2")
    jobs.wait_for(lambda: len(jobs.steps(2, 0)) == 6)
    nodes.run(["mkdir", "/srv/job/second"], user="alice")
    second = jobs.submit(
        "--nodes=1", "--nodelist=n1", *script, "/srv/job/second", RANKS_PER_NODE="1"
    )
    jobs.wait_for(lambda: jobs.state(second) == "COMPLETED")
    assert num_events() == [2, 0], "a daemon on each node, and the first job goes on"
    nodes.run(["scancel", first], user="alice")
    jobs.wait_for(lambda: jobs.state(first) == "CANCELLED")
    assert num_events() == [2, 2]

    whole = steps_in(jobs.folder / "second" / "steps-1-0")
    assert len(whole) == training.NUM_STEPS
    by_rank = [jobs.steps(2, rank) for rank in range(4)]
    for found, wanted in zip(zip(*by_rank, strict=True), whole, strict=False):
        assert [sample for each in found for sample in each["samples"]] == wanted["samples"]
    for step in (*by_rank[0], *whole):
        assert "/job_" not in step["daemon_group"], "its memory is not the job's"

    left = f"/tmp/gyre-{ALICE}/$SLURM_JOB_ID/cache"
    third = jobs.submit("--nodes=1", "--nodelist=n2", f"--wrap=mkdir -p {left} && ls {left}")
    jobs.wait_for(lambda: jobs.state(third) == "COMPLETED")
    assert nodes.files("n2").count(f"gyre-{ALICE}") == 1
    assert f"gyre-{ALICE}/{third}" not in nodes.files("n2")
    assert num_events() == [3, 3]

    nodes.run(["sh", "-c", "echo nonsense >/etc/gyre/gyre.toml"])
    fourth = jobs.submit("--nodes=1", "--nodelist=n2", "--wrap=true")
    jobs.wait_for(lambda: nodes.states()["n2"] == "drain")
    jobs.wait_for(lambda: jobs.state(fourth) == "PENDING")
    held = nodes.run(["squeue", "--noheader", "--format=%r", f"--jobs={fourth}"])
    assert held.strip() == "launch failed requeued held"


# A Loader is refused; with a process group, it reads from the private daemon of its node.
_TASK = """
import json, os, tempfile
from pathlib import Path
import torch.distributed
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from gyre_client.loader.ranks import ranks_of_loader

rank, options = int(os.environ["SLURM_PROCID"]), {"dtype": "int32", "sequence_length": 4096}
arguments = {"batch_size": 12, "seed": 3, "format": "tokens", "options": options}
try:
    Loader("/srv/job/numbers.bin", **arguments)
except InvalidRequest as error:
    refusal = str(error)
torch.distributed.init_process_group(
    "gloo", init_method="tcp://n1:29500", rank=rank, world_size=int(os.environ["SLURM_NTASKS"])
)
num_local = ranks_of_loader(None, None, None, (None,) * 5).num_local
with Loader("/srv/job/numbers.bin", **arguments) as loader:
    batches = loader.stream()
    samples = [(next(batches)["tokens"][:, 0] // 4096).tolist() for _ in range(3)]
    torch.distributed.barrier()
    folders = Path(tempfile.gettempdir()).glob("gyred-*")
    daemons = sum(each.stat().st_uid == os.getuid() for each in folders)
    torch.distributed.barrier()
print(json.dumps([rank, num_local, daemons, samples, refusal]))
"""


def test_tasks_of_srun_find_each_other(alone: Jobs, gyred: StartDaemon, tmp_path: Path) -> None:
    """Without torchrun."""
    step = ["srun", "--nodes=2", "--ntasks=3", "--cpus-per-task=2", "--mem=2G", "--chdir=/srv/job"]
    command = [*step, "python", "-c", _TASK]
    printed = alone.cluster.run(command, user="alice", environment=ENVIRONMENT)
    tasks = sorted(map(json.loads, printed.splitlines()))
    assert [task[:3] for task in tasks] == [[0, 2, 1], [1, 2, 1], [2, 1, 1]]
    assert all("init_process_group" in task[4] for task in tasks)
    expected = undisturbed(alone, gyred, tmp_path)
    for number in range(3):
        read = [sample for task in tasks for sample in task[3][number]]
        assert read == [sample for sample, _ in expected[number]["samples"]]
