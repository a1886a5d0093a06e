"""Batches that clients keep of sessions that are over stay as they are.

They keep no arena in memory, and count against the budget until the client has let go of them.
"""

import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from gyre_client import Loader
from gyre_client.batches.arena import Arena
from gyre_client.errors import DaemonUnavailable, StorageUnavailable
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.arenas import mapped_arena_bytes
from tests.channels import identified_channel
from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.waiting import until

PAGE = mmap.PAGESIZE
LENGTH = 1 << 11


def mapped_files() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "gyre-arena" in line}


def mappings() -> list[tuple[int, int]]:
    """The addresses that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    pairs = [line.split()[0].split("-") for line in lines]
    return [(int(begin, 16), int(end, 16)) for begin, end in pairs]


@pytest.fixture
def arena() -> Iterator[Arena]:
    """An arena of eight pages, each full of its number."""
    descriptor = os.memfd_create("gyre-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, b"".join(bytes([page]) * PAGE for page in range(8)))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    arena = Arena(descriptor)
    yield arena
    arena.close()


def test_what_is_lent_is_moved_out_and_stays_as_it_is(arena: Arena) -> None:
    before = mapped_files()
    kept = [arena.lend(page * PAGE, (page + 1) * PAGE - 7)[0] for page in (1, 2, 5)]
    kept[1][:] = 99  # what a trainer wrote stays, too
    addresses = [array.ctypes.data for array in kept]
    assert arena.close()
    assert len(mapped_files()) == len(before) - 1
    assert [array.ctypes.data for array in kept] == addresses
    assert [set(array.tolist()) for array in kept] == [{1}, {99}, {5}]
    kept[0][0] = 7
    assert kept[0][0] == 7
    kept.clear()
    assert not any(address in range(*each) for each in mappings() for address in addresses)
    with pytest.raises(DaemonUnavailable):
        arena.lend(0, PAGE)


def test_threads_that_read_meanwhile_read_on(arena: Arena) -> None:
    kept, _ = arena.lend(3 * PAGE, 6 * PAGE)
    tensor, stopping, wrong = torch.from_numpy(kept), threading.Event(), []

    def read() -> None:
        while not stopping.is_set():
            if int(tensor.to(torch.int64).sum()) != 12 * PAGE:
                wrong.append(1)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert arena.close()
    stopping.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    (tmp_path / "tokens.bin").write_bytes(np.arange(1 << 21, dtype="<u2").tobytes())
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": LENGTH,
    }
    return gyred(
        {
            "memory_budget": "128MiB",
            "metrics_listen": "tcp:127.0.0.1:0",
            "datasets": {"tokens": tokens},
        }
    )


def test_a_small_batch_of_each_of_many_loaders_keeps_no_arena(daemon: Daemon) -> None:
    kept, wanted = [], []
    for seed in range(30):
        with Loader("tokens", batch_size=4, seed=seed, address=daemon.address) as loader:
            for _ in range(5):
                batch = next(loader)
            kept.append(batch["tokens"])
            wanted.append(batch["tokens"].clone())
    assert mapped_files() == set()
    until(lambda: status(daemon).memory_abandoned_bytes == 0)
    assert status(daemon).memory_reserved_bytes == 0
    process = daemon.process
    assert process
    until(lambda: mapped_arena_bytes(process.pid) == 0)
    assert all(torch.equal(batch, other) for batch, other in zip(kept, wanted, strict=True))
    daemon.kill()
    assert all(torch.equal(batch, other) for batch, other in zip(kept, wanted, strict=True))


def test_a_batch_of_a_session_that_failed_keeps_no_arena_while_the_loader_is_open(
    daemon: Daemon,
) -> None:
    loader = Loader("tokens", batch_size=4, reattach_timeout_s=0.5, address=daemon.address)
    with loader:
        kept = next(loader)["tokens"]
        wanted = kept.clone()
        daemon.kill()
        with pytest.raises((DaemonUnavailable, StorageUnavailable)):
            while True:
                next(loader)
        assert mapped_files() == set()
        assert torch.equal(kept, wanted)


def open_session(
    daemon: Daemon, side: socket.socket, channel: grpc.Channel, batch_size: int = 4
) -> tuple[pb.SessionOpened, int]:
    """Open a session by the bare contract, with its first arena's descriptor."""
    side.settimeout(10)
    side.connect(daemon.address.removeprefix("unix:") + ".side")
    token = side.recv(100).decode()
    request = pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name="tokens"),
        order=pb.OrderSpec(global_batch_size=batch_size),
        reader=pb.Reader(job=token, world_size=1),
        transport=pb.TRANSPORT_ARENA,
    )
    opened: pb.SessionOpened = pb_grpc.LoaderStub(channel).OpenSession(
        request, metadata=(("gyre-side-token", token),), timeout=10
    )
    _, (descriptor,), _, _ = socket.recv_fds(side, 100, 1)
    return opened, descriptor


def test_what_a_client_keeps_of_a_session_that_is_over_counts_as_abandoned(daemon: Daemon) -> None:
    with (
        identified_channel(daemon.address) as channel,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side,
    ):
        opened, descriptor = open_session(daemon, side, channel)
        assert status(daemon).memory_abandoned_bytes == 0
        pb_grpc.LoaderStub(channel).CloseSession(
            pb.CloseSessionRequest(session_id=opened.session_id), timeout=10
        )
        now = status(daemon)
        assert (now.memory_reserved_bytes, now.memory_abandoned_bytes) == (0, opened.arena_bytes)
        text = subprocess.run(
            [sys.executable, "-m", "gyre_client", "status", "--address", daemon.address],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "abandoned" in text
        (metrics,) = (event["metrics"] for event in daemon.events() if event["event"] == "ready")
        with urllib.request.urlopen(
            f"http://{metrics.removeprefix('tcp:')}/metrics", timeout=10
        ) as answer:
            value = next(
                line
                for line in answer.read().decode().splitlines()
                if line.startswith("gyre_memory_abandoned_bytes ")
            )
        assert float(value.split()[1]) == opened.arena_bytes
    os.close(descriptor)
    until(lambda: status(daemon).memory_abandoned_bytes == 0)


def test_a_client_that_goes_before_it_reads_keeps_nothing_for_a_lease(daemon: Daemon) -> None:
    with identified_channel(daemon.address) as channel:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side:
            _, descriptor = open_session(daemon, side, channel)
        os.close(descriptor)
        until(lambda: status(daemon).memory_reserved_bytes == 0)
    process = daemon.process
    assert process
    until(lambda: mapped_arena_bytes(process.pid) == 0)
    (closed,) = (event for event in daemon.events() if event["event"] == "session closed")
    assert closed["reason"] == "the client has gone before it read anything"


def test_what_clients_keep_counts_against_the_budget(daemon: Daemon) -> None:
    """A client that keeps everything is refused at the end of the budget, and told why."""
    sides = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(100)]
    descriptors = []
    with identified_channel(daemon.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            for side in sides:
                opened, descriptor = open_session(daemon, side, channel, batch_size=256)
                descriptors.append(descriptor)
                pb_grpc.LoaderStub(channel).CloseSession(
                    pb.CloseSessionRequest(session_id=opened.session_id), timeout=10
                )
                now = status(daemon)
                assert (
                    now.memory_reserved_bytes + now.memory_abandoned_bytes
                    <= now.memory_budget_bytes
                )
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "kept by clients whose sessions are over" in str(refused.value.details())
    for side in sides:
        side.close()
    for descriptor in descriptors:
        os.close(descriptor)
    until(lambda: status(daemon).memory_abandoned_bytes == 0)
    with Loader("tokens", batch_size=256, address=daemon.address) as loader:
        next(loader)
