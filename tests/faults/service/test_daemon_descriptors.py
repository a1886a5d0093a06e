"""A daemon that may open few descriptors: its reading leaves room for clients."""

import contextlib
import itertools
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import Overloaded

from tests.conftest import Daemon, StartDaemon
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

LIMIT = 256
LENGTH, NUM_SAMPLES, NUM_SHARDS = 16, 20_000, 200
FEW = f"resource.setrlimit(resource.RLIMIT_NOFILE, (64, {LIMIT}))"
PROGRAM = f"""
import resource, sys
from gyre_daemon.cli import main
{FEW}
main(['serve', '--config', sys.argv[1]])
"""
SERVE = ("-c", PROGRAM)
ABOUT = {"format": "tokens", "dtype": "int32", "sequence_length": LENGTH}


@pytest.fixture
def server() -> Iterator[ObjectServerProcess]:
    tokens = np.arange(NUM_SAMPLES * LENGTH, dtype=np.int32)
    with object_server() as process:
        for bucket in ("data", "other"):
            process.put(f"/{bucket}/0.bin", tokens.tobytes())
        process.follow(Script(first_byte_p50_s=0.02, first_byte_p99_s=0.1))
        yield process


@pytest.fixture
def daemon(gyred: StartDaemon, server: ObjectServerProcess, tmp_path: Path) -> Daemon:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, shard in enumerate(
        np.split(np.arange(NUM_SAMPLES * LENGTH, dtype=np.int32), NUM_SHARDS)
    ):
        shard.tofile(folder / f"{number:03}.bin")
    remote = {**ABOUT, "cache": False, "storage": server.storage_settings}
    datasets = {
        "data": {"uri": "s3://data/0.bin", **remote},
        "other": {"uri": "s3://other/0.bin", **remote},
        "local": {"uri": str(folder), **ABOUT},
        "local-again": {"uri": f"{folder}/*.bin", **ABOUT},
    }
    return gyred(
        {"memory_budget": "64MiB", "session_memory": "8MiB", "datasets": datasets}, command=SERVE
    )


def check_batch(loader: Loader) -> None:
    batch = next(loader)
    assert batch["tokens"][:, 0].tolist() == [
        LENGTH * sample_id for sample_id in batch["sample_id"].tolist()
    ]


def test_new_clients_connect_and_read_while_others_load_it(daemon: Daemon) -> None:
    assert daemon.process
    process = psutil.Process(daemon.process.pid)
    most_descriptors, most_connections = 0, 0
    over = threading.Event()

    def load(dataset: str) -> None:
        with Loader(dataset, batch_size=256, address=daemon.address) as loader:
            while not over.is_set():
                check_batch(loader)

    names = ("data", "other", "local", "local-again")
    readers = [threading.Thread(target=load, args=(name,)) for name in names]
    for reader in readers:
        reader.start()
    try:
        for name in names:
            with contextlib.ExitStack() as stack:
                newcomers = [
                    stack.enter_context(
                        Loader(
                            name,
                            batch_size=64,
                            seed=seed,
                            address=daemon.address,
                            reattach_timeout_s=20,
                        )
                    )
                    for seed in range(2)
                ]
                for newcomer in newcomers * 3:
                    check_batch(newcomer)
                most_descriptors = max(most_descriptors, process.num_fds())
                most_connections = max(most_connections, len(process.net_connections("tcp")))
        assert all(reader.is_alive() for reader in readers)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert 0 < most_connections <= LIMIT // 4 + 8, "to read, and a few to list"
    assert most_descriptors < LIMIT - 20
    (told,) = [event for event in daemon.events() if event["event"] == "limited by descriptors"]
    assert (told["descriptors"], told["max_requests"], told["configured"]) == (
        LIMIT,
        LIMIT // 4,
        1024,
    )
    assert not [event for event in daemon.events() if event["event"] == "side channel refused"]


@contextlib.contextmanager
def silent(daemon: Daemon, kind: socket.SocketKind, suffix: str, num: int) -> Iterator[None]:
    """Connections to a socket of the daemon that say nothing."""
    path = daemon.address.removeprefix("unix:") + suffix
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):  # the backlog is full
                connection.connect(path)
        yield


def test_who_is_connected_goes_on_and_newcomers_are_told(daemon: Daemon) -> None:
    with Loader("local", batch_size=64, address=daemon.address) as loader:
        check_batch(loader)
        with silent(daemon, socket.SOCK_SEQPACKET, ".side", 100):
            with pytest.raises(Overloaded, match="has 28 of the 32 connections"):
                next(Loader("local", batch_size=64, address=daemon.address, reattach_timeout_s=0.1))
            for _ in range(50):
                check_batch(loader)
        with silent(daemon, socket.SOCK_STREAM, "", 400):
            for _ in range(50):
                check_batch(loader)
        with Loader("local", batch_size=64, seed=1, address=daemon.address) as other:
            check_batch(other)
    assert len(daemon.events()) < 50


def test_without_any_descriptor_newcomers_are_told_and_it_recovers(daemon: Daemon) -> None:
    assert daemon.process
    pid = daemon.process.pid
    with Loader("local", batch_size=64, address=daemon.address) as loader:
        check_batch(loader)
        begin = daemon.log_path.stat().st_size
        with silent(daemon, socket.SOCK_STREAM, "", 20):
            answers: set[str] = set()
            while REFUSAL not in answers:  # the daemon closes shards, and has descriptors again
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_without_holes(pid), LIMIT))
                answers |= {answer(daemon) for _ in range(100)}
        assert daemon.log_path.stat().st_size - begin < 64 << 10
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        with Loader("local", batch_size=64, seed=1, address=daemon.address) as other:
            check_batch(other)
        for _ in range(50):
            check_batch(loader)


REFUSAL = "refused: the daemon cannot accept connections: Too many open files"


def answer(daemon: Daemon) -> str:
    """What the side channel says to a newcomer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side:
        side.settimeout(120)
        side.connect(daemon.address.removeprefix("unix:") + ".side")
        return side.recv(4096).decode()


def num_without_holes(pid: int) -> int:
    """The limit under which a process that has these descriptors finds no free number."""
    numbers = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in numbers)
