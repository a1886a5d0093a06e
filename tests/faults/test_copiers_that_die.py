"""Copiers are killed, or die of a file that shrinks: jobs read the same bytes on, and nothing outlives the daemon."""

import contextlib
import os
import signal
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
from gyre_client import Loader
from gyre_client.address import parse_address
from gyre_client.connection import Connection
from gyre_client.errors import CorruptSample

from tests.conftest import Daemon, StartDaemon
from tests.faults.test_daemon_faults import eventually

NUM_TOKENS = 1 << 20
NUM_THREADS = 4  # that a daemon has unless it is told otherwise
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
    """All that the daemon has forked."""
    assert daemon.process
    return psutil.Process(daemon.process.pid).children(recursive=True)


def kill_copiers(daemon: Daemon) -> None:
    """All but the keeper, which has children; those that were killed before may still be about to go."""
    for process in processes(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            if not process.children():
                process.send_signal(signal.SIGKILL)


def test_jobs_read_on_while_copiers_are_killed(daemon: Daemon, shard: Path) -> None:
    samples = [shard.read_bytes()[begin : begin + 1024] for begin in range(0, 2 * NUM_TOKENS, 1024)]
    with Loader("noise", batch_size=32, seed=1, address=daemon.address) as loader:
        for step in range(600):
            batch = next(loader)
            if step % 100 == 50:
                kill_copiers(daemon)
            for sample_id, tokens in zip(batch["sample_id"].tolist(), batch["tokens"], strict=True):
                assert tokens.numpy().tobytes() == samples[sample_id], f"step {step}"
    assert any(event["event"] == "copier died" for event in daemon.events())
    assert daemon.stop() == 0


def keeper_of(daemon: Daemon) -> psutil.Process | None:
    """The process that copiers are forked from, which is a child of the daemon; None where there is none now."""
    assert daemon.process
    found = [child for child in psutil.Process(daemon.process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    return found[0] if found else None


def num_copiers(daemon: Daemon) -> int:
    with Connection(parse_address(daemon.address)) as connection:
        return connection.status().num_copiers


def test_a_killed_keeper_is_replaced_and_jobs_read_on(daemon: Daemon, shard: Path) -> None:
    samples = [shard.read_bytes()[begin : begin + 1024] for begin in range(0, 2 * NUM_TOKENS, 1024)]
    wanted = num_copiers(daemon)
    assert wanted > 0

    def check(loader: Loader, num_batches: int) -> None:
        for batch in islice(loader, num_batches):
            for sample_id, tokens in zip(batch["sample_id"].tolist(), batch["tokens"], strict=True):
                assert tokens.numpy().tobytes() == samples[sample_id]

    with Loader("noise", batch_size=32, seed=1, address=daemon.address) as loader:
        check(loader, 20)
        before = keeper_of(daemon)
        assert before
        copiers = before.children()
        before.kill()
        check(loader, 100)
        for copier in copiers:
            copier.kill()
        check(loader, 100)
        assert eventually(lambda: (new := keeper_of(daemon)) is not None and len(new.children()) == wanted, 120)
        assert num_copiers(daemon) == wanted
        check(loader, 100)
        with Loader("noise", batch_size=32, seed=2, address=daemon.address) as later:
            check(later, 100)
    told = [event["event"] for event in daemon.events()]
    assert told.count("copier keeper died") == told.count("copier keeper replaced") == 1
    assert daemon.stop() == 0


def test_one_death_of_a_file_that_shrinks_and_the_daemon_serves_on(daemon: Daemon, shard: Path) -> None:
    """However often somebody asks for it."""
    with Loader("noise", batch_size=32, seed=1, address=daemon.address) as loader, pytest.raises(CorruptSample):
        next(loader)
        os.truncate(shard, 4096)
        for _ in range(1000):
            next(loader)
    for seed in range(3):
        loader = Loader("noise", batch_size=32, seed=seed, address=daemon.address)
        with loader, pytest.raises(CorruptSample, match=r"noise\.bin"):
            next(loader)
    num_deaths = sum(event["event"] == "copier died" for event in daemon.events())
    assert num_deaths <= NUM_THREADS, "each may have had a job under way when it shrank"
    assert daemon.stop() == 0


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_they_end_with_their_daemon(daemon: Daemon, how: str) -> None:
    with Loader("noise", batch_size=32, address=daemon.address) as loader:
        next(loader)
    forked = processes(daemon)
    assert len(forked) >= 2, "a copier, and their keeper"
    for process in forked:
        process.send_signal(signal.SIGINT)  # as Ctrl-C does
    time.sleep(0.1)
    assert all(process.is_running() for process in forked), "they end when the daemon does"
    if how == "killed":
        daemon.kill()
    else:
        assert daemon.stop() == 0
    assert eventually(lambda: not any(process.is_running() for process in forked), 120)
