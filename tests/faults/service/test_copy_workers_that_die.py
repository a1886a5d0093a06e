"""Copy workers that are killed or die of a file that shrinks: jobs read the same bytes on."""

import contextlib
import os
import signal
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import CorruptSample
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection

from tests.conftest import Daemon, StartDaemon
from tests.waiting import eventually

NUM_TOKENS = 1 << 20
NUM_THREADS = 4  # the default of a daemon
TOKENS = {"format": "tokens", "dtype": "int16", "sequence_length": 512}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "noise.bin"
    path.write_bytes(os.urandom(2 * NUM_TOKENS))
    return path


@pytest.fixture
def daemon(gyred: StartDaemon, shard: Path) -> Daemon:
    return gyred({"datasets": {"noise": {"uri": str(shard), **TOKENS}}})


def processes(daemon: Daemon) -> list[psutil.Process]:
    """The fork server and the copy workers of a daemon."""
    assert daemon.process
    return psutil.Process(daemon.process.pid).children(recursive=True)


def kill_copy_workers(daemon: Daemon) -> None:
    """Kill all processes but the fork server, which has children."""
    for process in processes(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not process.children():
                process.send_signal(signal.SIGKILL)


def test_jobs_read_on_while_copy_workers_are_killed(daemon: Daemon, shard: Path) -> None:
    samples = [shard.read_bytes()[begin : begin + 1024] for begin in range(0, 2 * NUM_TOKENS, 1024)]
    with Loader("noise", batch_size=32, seed=1, address=daemon.address) as loader:
        for step in range(600):
            batch = next(loader)
            if step % 100 == 50:
                kill_copy_workers(daemon)
            for sample_id, tokens in zip(batch["sample_id"].tolist(), batch["tokens"], strict=True):
                assert tokens.numpy().tobytes() == samples[sample_id], f"step {step}"
    assert any(event["event"] == "copy worker died" for event in daemon.events())
    assert daemon.stop() == 0


def test_jobs_read_on_once_the_fork_server_is_killed(daemon: Daemon, shard: Path) -> None:
    """With the workers that are left, and without any."""
    samples = [shard.read_bytes()[begin : begin + 1024] for begin in range(0, 2 * NUM_TOKENS, 1024)]
    assert num_copy_workers(daemon) > 0

    def check(loader: Loader, num_batches: int) -> None:
        for batch in islice(loader, num_batches):
            for sample_id, tokens in zip(batch["sample_id"].tolist(), batch["tokens"], strict=True):
                assert tokens.numpy().tobytes() == samples[sample_id]

    with Loader("noise", batch_size=32, seed=1, address=daemon.address) as loader:
        check(loader, 20)
        (fork_server,) = (process for process in processes(daemon) if process.children())
        copy_workers = fork_server.children()
        fork_server.kill()
        check(loader, 100)
        for copy_worker in copy_workers:
            copy_worker.kill()
        check(loader, 100)
        with Loader("noise", batch_size=32, seed=2, address=daemon.address) as later:
            check(later, 100)
        assert num_copy_workers(daemon) == 0
    told = [event["event"] for event in daemon.events()]
    assert told.count("copy workers are not replaced any more") == 1
    assert daemon.stop() == 0


def num_copy_workers(daemon: Daemon) -> int:
    with Connection(parse_address(daemon.address)) as connection:
        return connection.status().num_copy_workers


def test_a_file_that_shrinks_kills_no_more_workers_than_have_a_copy_of_it(
    daemon: Daemon, shard: Path
) -> None:
    """However often jobs ask for the file."""
    with (
        Loader("noise", batch_size=32, seed=1, address=daemon.address) as loader,
        pytest.raises(CorruptSample),
    ):
        next(loader)
        os.truncate(shard, 4096)
        for _ in range(1000):
            next(loader)
    for seed in range(3):
        loader = Loader("noise", batch_size=32, seed=seed, address=daemon.address)
        with loader, pytest.raises(CorruptSample, match=r"noise\.bin"):
            next(loader)
    num_deaths = sum(event["event"] == "copy worker died" for event in daemon.events())
    assert num_deaths <= NUM_THREADS, (
        "each thread may have had a copy under way when the file shrank"
    )
    assert daemon.stop() == 0


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_copy_workers_end_with_their_daemon(daemon: Daemon, how: str) -> None:
    with Loader("noise", batch_size=32, address=daemon.address) as loader:
        next(loader)
    forked = processes(daemon)
    assert len(forked) >= 2, "a copy worker and the fork server"
    for process in forked:
        process.send_signal(signal.SIGINT)  # as Ctrl-C does
    time.sleep(0.1)
    assert all(process.is_running() for process in forked), "they end only when the daemon does"
    if how == "killed":
        daemon.kill()
    else:
        assert daemon.stop() == 0
    assert eventually(lambda: not any(process.is_running() for process in forked), 120)
