"""Ranks that torchrun starts are one job, read from one private daemon, and compare their data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import StartDaemon
from tests.daemons import private_daemons, status
from tests.secure_daemons import free_port

DEADLINE_S = 300.0
TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": 8}
SCRIPT = """
import json, os, sys, tempfile, time
from pathlib import Path
import torch.distributed as dist
from gyre_client import GyreError, Loader

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place, tokens, options = Path(sys.argv[1]), sys.argv[2], {"dtype": "uint16", "sequence_length": 8}
path = {"dataset": tokens, "format": "tokens", "options": options}


def tell(name, what=""):
    (place / f"{name}.{os.getpid()}.new").write_text(json.dumps(what))
    (place / f"{name}.{os.getpid()}.new").rename(place / name)


def wait(name):
    while not (place / name).exists():
        time.sleep(0.02)
"""
EARLY_AND_LATE = """
early = Loader("numbers", batch_size=8, seed=1, rank=rank, world_size=world_size)
next(early)
dist.init_process_group("gloo")
late = Loader("numbers", batch_size=8, seed=1)
alone = Loader("numbers", batch_size=8, rank=0, world_size=1)
for loader in (late, alone):
    next(loader)
tell(f"reading-{rank}")
wait("go")
for loader in (early, late, alone):
    for batch, _ in zip(loader.stream(), range(100)):
        pass
tell(f"done-{rank}")
dist.destroy_process_group()
"""
COMPARING = """
tempfile.tempdir = f"{os.environ['TMPDIR']}/{rank}"
dist.init_process_group("gloo")
with Loader("numbers", batch_size=8) as loader:
    next(loader)
try:
    with Loader("numbers", batch_size=8, seed=2, address=os.environ[f"ADDRESS_{rank}"]) as loader:
        next(loader)
    tell(f"error-{rank}")
except GyreError as error:
    tell(f"error-{rank}", [type(error).__name__, str(error), error.facts])
try:
    with Loader("numbers", batch_size=4, seed=rank, tail="drop") as loader:
        next(loader)
    tell(f"argument-{rank}")
except GyreError as error:
    tell(f"argument-{rank}", [type(error).__name__, str(error), error.facts])
with Loader(**path, batch_size=8) as loader:
    next(loader)
    dist.barrier()
dist.destroy_process_group()
"""
PRIVATE = """
with (
    Loader(**path, batch_size=8, rank=rank, world_size=world_size) as loader,
    Loader(**path, batch_size=4, seed=1, epochs=None, restart=True, rank=0, world_size=1) as check,
):
    next(loader), next(iter(check))
    tell(f"reading-{rank}-of-{world_size}", os.getpid())
    for num_batches, batch in enumerate(loader.stream()):
        if num_batches % 100 == 0:
            tell(f"step-{rank}", num_batches)
        if (place / "end").exists():
            break
"""


class Runs:
    """Launches scripts, and what they tell."""

    def __init__(self, place: Path, tokens: Path, temporary: Path) -> None:
        self.place = place
        self.temporary = temporary
        self.started: list[subprocess.Popen[str]] = []
        self._arguments = [str(place), str(tokens)]
        self._environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        self._environment.pop("GYRE_ADDRESS", None)

    def launch(
        self, script: str, launcher: tuple[str, ...], **environment: str
    ) -> "subprocess.Popen[str]":
        file = self.place / "script.py"
        file.write_text(SCRIPT + script)
        with (self.place / f"errors-{len(self.started)}").open("w") as errors:
            run = subprocess.Popen(
                [sys.executable, *launcher, str(file), *self._arguments],
                env=self._environment | environment,
                stderr=errors,
                text=True,
            )
        self.started.append(run)
        return run

    def torchrun(self, script: str, *flags: str, **environment: str) -> "subprocess.Popen[str]":
        launcher = ("-m", "torch.distributed.run", *flags)
        return self.launch(script, launcher, **environment)

    def told(self, name: str) -> Any:
        """Waits until a rank tells this, and returns what it says."""
        self.wait_until((self.place / name).exists)
        return json.loads((self.place / name).read_text())

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.errors()
            failed = [each.returncode for each in self.started if each.poll()]
            assert not [each for each in failed if each > 0], self.errors()
            time.sleep(0.02)

    def errors(self) -> str:
        return "\n".join(each.read_text() for each in sorted(self.place.glob("errors-*")))

    def daemons(self) -> list[psutil.Process]:
        return private_daemons(self.temporary)

    def readers(self) -> list[tuple[str, int, int]]:
        """Returns the job, rank and world size of what the only private daemon serves."""
        (socket,) = self.temporary.glob("gyred-*/gyre.sock")
        with Connection(parse_address(f"unix:{socket}")) as connection:
            readers = [each.reader for each in connection.status().sessions]
        return sorted((each.job, each.rank, each.world_size) for each in readers)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "place"
    place.mkdir()
    np.arange(8000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # the path of a socket has few letters
    runs = Runs(place, tmp_path / "tokens.bin", temporary)
    yield runs
    for each in runs.started:
        for child in psutil.Process(each.pid).children() if each.poll() is None else ():
            child.kill()
        each.kill()
        each.wait(DEADLINE_S)
    runs.wait_until(lambda: not runs.daemons())
    shutil.rmtree(temporary)


def test_two_launches_are_two_jobs_and_none_ends_a_session_of_another(
    runs: Runs, gyred: StartDaemon, tmp_path: Path
) -> None:
    """Loaders that were made before and after the process group have one job in each of them."""
    uri = str(tmp_path / "tokens.bin")
    datasets = {"numbers": {"uri": uri, **TOKENS}}
    daemon = gyred({"metrics_listen": "tcp:127.0.0.1:0", "datasets": datasets})
    places = [runs.place / str(number) for number in range(2)]
    for place in places:
        place.mkdir()
        runs._arguments[0] = str(place)
        flags = "--standalone", "--nproc-per-node", "2"
        runs.torchrun(EARLY_AND_LATE, *flags, GYRE_ADDRESS=daemon.address)
    for place in places:
        for rank in range(2):
            runs.wait_until((place / f"reading-{rank}").exists)
    readers = [each.reader for each in status(daemon).sessions]
    assert len(readers) == 12
    jobs = {each.job for each in readers}
    assert len(jobs) == 2
    for job in jobs:
        ranks = sorted((each.rank, each.world_size) for each in readers if each.job == job)
        assert ranks == [(0, 1)] * 2 + [(0, 2)] * 2 + [(1, 2)] * 2
    assert len({(each.fence, each.rank, each.peer) for each in readers}) == 12
    ready = next(event for event in daemon.events() if event["event"] == "ready")
    url = f"http://{ready['metrics'].removeprefix('tcp:')}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    (sessions,) = (each for each in families if each.name == "gyre_job_sessions")
    assert {each.labels["job_name"]: each.value for each in sessions.samples} == dict.fromkeys(
        jobs, 6.0
    )
    for place in places:
        (place / "go").touch()
    for run in runs.started:
        assert run.wait(DEADLINE_S) == 0, runs.errors()
    assert not list(runs.temporary.glob("gyre*"))


def test_ranks_whose_nodes_have_other_data_or_no_common_folder_say_so(
    runs: Runs, gyred: StartDaemon, tmp_path: Path
) -> None:
    np.arange(8000, dtype=np.uint16)[::-1].tofile(tmp_path / "others.bin")
    addresses = []
    for name in ("tokens", "others"):
        uri = str(tmp_path / f"{name}.bin")
        addresses.append(gyred({"datasets": {"numbers": {"uri": uri, **TOKENS}}}).address)
    for rank in range(2):
        (runs.temporary / str(rank)).mkdir()
    run = runs.torchrun(
        COMPARING,
        *("--standalone", "--nproc-per-node", "2"),
        GYRE_ADDRESS=addresses[0],
        ADDRESS_0=addresses[0],
        ADDRESS_1=addresses[1],
    )
    assert run.wait(DEADLINE_S) == 0, runs.errors()
    (found,) = filter(None, [runs.told(f"error-{rank}") for rank in range(2)])
    kind, message, facts = found
    assert (kind, facts) == ("CursorRejected", {"differs": "fingerprint"})
    assert f"on node {os.uname().nodename} and rank" in message
    (found,) = filter(None, [runs.told(f"argument-{rank}") for rank in range(2)])
    kind, message, facts = found
    assert (kind, facts) == ("CursorRejected", {"differs": "seed"})
    assert "this argument differs. Pass the same on all ranks" in message
    assert f"on node {os.uname().nodename} and rank" in message
    assert runs.errors().count("have a private daemon each") == 1


def test_a_private_daemon_outlives_each_rank_and_ends_with_the_last(runs: Runs) -> None:
    with_variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    for rank in range(2):
        runs.launch(PRIVATE, (), **with_variables, RANK=str(rank))
    pids = [runs.told(f"reading-{rank}-of-2") for rank in range(2)]
    (daemon,) = runs.daemons()
    os.kill(pids[0], signal.SIGKILL)
    assert runs.started[0].wait(DEADLINE_S) == -signal.SIGKILL
    step = runs.told("step-1")
    runs.wait_until(lambda: runs.told("step-1") > step)
    assert runs.daemons() == [daemon]
    os.kill(pids[1], signal.SIGKILL)
    daemon.wait(DEADLINE_S)
    assert not list(runs.temporary.glob("gyred-*"))


def test_an_elastic_restart_with_fewer_ranks_goes_on(runs: Runs) -> None:
    """Two agents of one rank each: one dies, the rank of the other too, and is started again."""
    flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
    flags += ["--rdzv-backend", "c10d", "--rdzv-id", "elastic"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    conf = "last_call_timeout=5,join_timeout=120,is_host="
    first, second = (
        runs.torchrun(PRIVATE, *flags, "--rdzv-conf", f"{conf}{is_host}") for is_host in (1, 0)
    )
    pids = [runs.told(f"reading-{rank}-of-2") for rank in range(2)]
    assert runs.readers() == [("elastic", 0, 1)] * 2 + [("elastic", 0, 2), ("elastic", 1, 2)]
    second.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert runs.told("reading-0-of-1") not in pids
    runs.wait_until(lambda: len(runs.daemons()) == 1)
    assert runs.readers() == [("elastic", 0, 1)] * 2
    (runs.place / "end").touch()
    assert first.wait(DEADLINE_S) == 0, runs.errors()
