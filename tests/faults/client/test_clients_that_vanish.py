"""Clients that are killed or frozen.

What they had comes back, their successors go on, and nothing of them is left.
"""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from gyre_client import Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.waiting import until

LEASE_S = 2.0
SAMPLE_BYTES = 8 << 20

# A daemon that logs the names of its tasks, and how many sessions it has objects of, on SIGUSR1.
COUNTED = """
import asyncio, gc, signal, sys
from pathlib import Path
from gyre_daemon.config import load
from gyre_daemon.workers.copy_workers import CopyWorkers
from gyre_daemon.runtime.events import log_event, start_log
from gyre_daemon.server import serve

async def main(copy_workers: CopyWorkers) -> None:
    def tell():
        names = sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())
        gc.collect()
        kinds = [type(each).__name__ for each in gc.get_objects()]
        num_kept = sum(kinds.count(each) for each in ("Session", "ClientArenas"))
        log_event("tasks", {"names": names, "kept": num_kept})

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    path = Path(sys.argv[1])
    await serve(load(path, {}, {}).config, path.parent, None, None, copy_workers)

start_log("info")
with CopyWorkers(2) as copy_workers:
    asyncio.run(main(copy_workers))
"""

# A client that holds a batch, and reads on when it is told to.
READER = """
import sys
import threading
from gyre_client import Loader
from gyre_client.errors import GyreError
loader = Loader(
    "tokens",
    batch_size=20,
    seed=3,
    prefetch_batches=2,
    reattach_timeout_s=5,
    job="train",
    address=sys.argv[1],
)
batch = next(loader)
print("reading", flush=True)
sys.stdin.readline()
print(batch["sample_id"].tolist(), batch["tokens"].long().sum(dim=1).tolist(), flush=True)
try:
    for _ in range(100):
        next(loader)
except GyreError as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def daemon(gyred: StartDaemon, token_files: Path) -> Daemon:
    tokens = {"uri": str(token_files), "format": "tokens", "dtype": "int16", "sequence_length": 10}
    return gyred({"lease_s": LEASE_S, "datasets": {"tokens": tokens}}, command=("-c", COUNTED))


def num_sessions(daemon: Daemon) -> int:
    with Connection(parse_address(daemon.address)) as connection:
        return len(connection.status().sessions)


def read(daemon: Daemon, num_batches: int) -> list[list[int]]:
    with Loader("tokens", batch_size=20, seed=3, job="train", address=daemon.address) as loader:
        return [next(loader)["sample_id"].tolist() for _ in range(num_batches)]


@contextlib.contextmanager
def reader(daemon: Daemon) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", READER, daemon.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "reading\n"
        try:
            yield process
        finally:
            process.kill()


def holdings(daemon: Daemon) -> dict[str, Any]:
    """All that a daemon may hold of its clients."""
    assert daemon.process
    begin = daemon.log_path.stat().st_size
    daemon.process.send_signal(signal.SIGUSR1)
    until(lambda: any(event["event"] == "tasks" for event in daemon.events(begin)))
    (tasks,) = (event for event in daemon.events(begin) if event["event"] == "tasks")
    process = psutil.Process(daemon.process.pid)
    folder = daemon.config_path.parent
    return {
        "tasks": tasks["names"],
        "kept": tasks["kept"],
        "descriptors": process.num_fds(),
        "sockets": len(process.net_connections("unix")),
        "threads": process.num_threads(),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
        "arenas": Path(f"/proc/{process.pid}/maps").read_text().count("gyre-arena"),
    }


def is_at_rest(held: dict[str, Any]) -> bool:
    """Whether calls and streams of readers have ended, and threads have read what they began."""
    is_over = {"_schedule_rpc_coro", "SharedStream._run"}.isdisjoint(held["tasks"])
    return is_over and not held["arenas"]


def test_nothing_is_left_of_clients_that_were_killed_or_frozen(daemon: Daemon) -> None:
    for _ in range(3):
        read(daemon, 50)  # all threads of the pool have begun
    until(lambda: is_at_rest(holdings(daemon)))
    before = holdings(daemon)
    for _ in range(2):
        with reader(daemon) as victim:
            victim.kill()
            until(lambda: num_sessions(daemon) == 0, 2.0)
            until(lambda: holdings(daemon)["arenas"] == 0, 2.0)
    with reader(daemon) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        assert num_sessions(daemon) == 1, "it may be slow: its lease has not run out"
        until(lambda: num_sessions(daemon) == 0)
        until(lambda: holdings(daemon)["arenas"] == 0, 2.0)
    # a task that began before, by the clock, may be over
    until(lambda: not Counter(holdings(daemon)["tasks"]) - Counter(before["tasks"]))
    until(lambda: holdings(daemon)["sockets"] <= before["sockets"])
    after = holdings(daemon)
    assert after["files"] == before["files"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["threads"] <= before["threads"] + 2  # gRPC has some of its own, which come and go


def open_over(side: socket.socket, channel: grpc.Channel, token: str, job: str) -> str:
    """Open a session whose arenas come over a connection that others may share; return its id."""
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(global_batch_size=4),
        reader=pb.Reader(job=job, world_size=1),
        transport=pb.TRANSPORT_ARENA,
    )
    metadata = (("gyre-side-token", token),)
    opened = pb_grpc.LoaderStub(channel).OpenSession(request, metadata=metadata, timeout=60)
    assert opened.arena_bytes
    _, (descriptor,), _, _ = socket.recv_fds(side, 100, 1)
    os.close(descriptor)
    return str(opened.session_id)


def test_a_connection_keeps_nothing_of_sessions_that_are_over(daemon: Daemon) -> None:
    """However many it has had; those that are open end with it."""
    with (
        identified_channel(daemon.address) as channel,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side,
    ):
        side.settimeout(60)
        side.connect(daemon.address.removeprefix("unix:") + ".side")
        token = side.recv(100).decode()
        stub = pb_grpc.LoaderStub(channel)
        for number in range(20):
            session_id = open_over(side, channel, token, f"job-{number}")
            stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), timeout=60)
        # a thread or a call may still refer to the last of them
        until(lambda: holdings(daemon)["kept"] < 20)
        for number in range(2):
            open_over(side, channel, token, f"open-{number}")
        assert num_sessions(daemon) == 2
    until(lambda: num_sessions(daemon) == 0)
    reasons = [each["reason"] for each in daemon.events() if each["event"] == "session closed"]
    assert reasons[-2:] == ["the client has gone before it read anything"] * 2


def silence(until_set: threading.Event) -> Iterator[pb.StreamRequest]:
    """A client that says nothing more, and goes then."""
    until_set.wait()
    yield from ()


def test_a_client_that_stops_in_the_middle_of_a_payload_keeps_no_memory(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    """Over TCP; its call waits for as long as the client is there."""
    (tmp_path / "zeros.bin").touch()
    os.truncate(tmp_path / "zeros.bin", 4 * SAMPLE_BYTES)
    zeros = {
        "uri": str(tmp_path / "zeros.bin"),
        "format": "tokens",
        "dtype": "int16",
        "sequence_length": SAMPLE_BYTES // 2,
        "allow": "anyone",
    }
    daemon = gyred(
        {"listen": ["tcp:127.0.0.1:0"], "lease_s": LEASE_S, "datasets": {"zeros": zeros}},
        command=("-c", COUNTED),
    )
    (address,) = next(event["listen"] for event in daemon.events() if event["event"] == "ready")
    with grpc.insecure_channel(address.removeprefix("tcp:")) as channel:
        stub = pb_grpc.LoaderStub(channel)
        opened = stub.OpenSession(
            pb.OpenSessionRequest(
                dataset=pb.DatasetRef(name="zeros"),
                order=pb.OrderSpec(global_batch_size=2),
                reader=pb.Reader(job="stuck", world_size=1),
            )
        )
        said = iter(
            [
                pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)),
                pb.StreamRequest(credit=pb.Credit(num_batches=1)),
            ]
        )
        still = threading.Event()
        stream = stub.Stream(itertools.chain(said, silence(still)))
        assert next(iter(stream)).batches.groups
        payload = stub.ReadPayload(pb.ReadPayloadRequest(session_id=opened.session_id))
        assert next(iter(payload)).data
        assert holdings(daemon)["arenas"] > 0
        until(lambda: holdings(daemon)["arenas"] == 0)
        still.set()


def test_a_frozen_client_wakes_to_intact_bytes_and_learns_that_it_is_fenced(daemon: Daemon) -> None:
    with reader(daemon) as frozen:
        assert frozen.stdin
        assert frozen.stdout
        frozen.send_signal(signal.SIGSTOP)
        until(lambda: num_sessions(daemon) == 0)
        with Loader(
            "tokens", batch_size=20, seed=3, job="train", address=daemon.address
        ) as successor:
            batches = [next(successor) for _ in range(300)]  # many times the slots there are
            frozen.send_signal(signal.SIGCONT)
            print("go on", file=frozen.stdin, flush=True)
            ids, sums = (
                batches[0]["sample_id"].tolist(),
                batches[0]["tokens"].long().sum(dim=1).tolist(),
            )
            assert frozen.stdout.readline().strip() == f"{ids} {sums}"
            line = frozen.stdout.readline()
            assert line.startswith("Fenced generation ")
            assert "of rank 0 of job 'train' is older than generation" in line
            assert len([next(successor) for _ in range(20)]) == 20, (
                "the successor was not disturbed"
            )
