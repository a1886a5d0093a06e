"""A daemon that may open few descriptors: its reading leaves room for clients."""

import contextlib
import itertools
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from gyre_client import Loader
from gyre_client.errors import Overloaded

from tests.conftest import Daemon, StartDaemon, to_toml
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script
from tests.waiting import until

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


def num_of(daemon: Daemon, folder: Path) -> tuple[int, int]:
    """How many descriptors and mappings of files in a folder the daemon has."""
    assert daemon.process
    process = Path(f"/proc/{daemon.process.pid}")
    links = []
    for each in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(str(each.readlink()))
    maps = (process / "maps").read_text().splitlines()
    return sum(f"{folder}/" in link for link in links), sum(f" {folder}/" in line for line in maps)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_dataset_that_is_removed_is_closed(
    gyred: StartDaemon, tmp_path: Path, is_read: bool
) -> None:
    """A session that goes on opens what it needs; when it has ended, nothing stays open."""
    folders = [tmp_path / name for name in ("gone", "kept")]
    for folder in folders:
        folder.mkdir()
        for number in range(20):
            np.arange(LENGTH * 8, dtype=np.int32).tofile(folder / f"{number:02}.bin")
    datasets = {folder.name: {"uri": str(folder), **ABOUT} for folder in folders}
    mixture = {"weights": {"gone": 1.0, "kept": 1.0}}
    daemon = gyred({"datasets": datasets, "mixtures": {"m": mixture}})
    text = to_toml({"listen": [daemon.address], "datasets": {"kept": datasets["kept"]}})
    with Loader("m", batch_size=8, epochs=None, address=daemon.address) as loader:
        for _ in range(50):
            next(loader)
        assert num_of(daemon, folders[0]) == (40, 20)
        if is_read:
            assert daemon.reconfigure(text)["removed"] == ["gone", "m"]
            for _ in range(400):
                next(loader)
    if not is_read:
        assert daemon.reconfigure(text)["removed"] == ["gone", "m"]
    until(lambda: num_of(daemon, folders[0]) == (0, 0))


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


def test_a_daemon_outlives_seconds_without_a_free_descriptor(daemon: Daemon) -> None:
    """It looks at its memory each second, and opens a file for that."""
    assert daemon.process
    with Loader("local", batch_size=64, address=daemon.address) as loader:
        check_batch(loader)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (3, LIMIT))
        time.sleep(2.5)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        for _ in range(50):
            check_batch(loader)
        with Loader("local", batch_size=64, seed=1, address=daemon.address) as other:
            check_batch(other)


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


def test_sessions_that_decode_chunks_stay_within_their_share(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """Each chunk that is decoded takes two descriptors, and many jobs decode at once."""
    lines = [f'{{"text": "{number:06}"}}\n' for number in range(20_000)]
    for shard in range(8):
        (tmp_path / f"{shard}.jsonl").write_text("".join(lines))
    texts = {"uri": f"{tmp_path}/*.jsonl", "format": "jsonl", "columns": ["text"], "cache": False}
    daemon = gyred({"datasets": {"texts": texts}}, command=SERVE)
    assert daemon.process
    process = psutil.Process(daemon.process.pid)
    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(
                Loader("texts", batch_size=256, seed=seed, epochs=None, address=daemon.address)
            )
            for seed in range(6)
        ]
        most = 0
        for _ in range(20):
            for loader in loaders:
                assert len(next(loader)["sample_id"]) == 256
            most = max(most, process.num_fds())
    assert most < LIMIT - 20
    assert not [event for event in daemon.events() if event["level"] == "error"]
