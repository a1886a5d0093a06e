"""Batches in shared memory: what a trainer may do with them, and what no client can do."""

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status

TOKENS = {"format": "tokens", "dtype": "int16", "sequence_length": 10, "allow": "anyone"}


@pytest.fixture
def daemon(gyred: StartDaemon, token_files: Path) -> Daemon:
    """A daemon on a Unix socket and on TCP, with a short lease."""
    config = {"lease_s": 2.0, "datasets": {"tokens": {"uri": str(token_files), **TOKENS}}}
    return gyred(
        config
        | {"listen": [f"unix:{token_files.parent}/daemon-0/run/gyre.sock", "tcp:127.0.0.1:0"]}
    )


def tcp_address(daemon: Daemon) -> str:
    return next(str(event["listen"][1]) for event in daemon.events() if event["event"] == "ready")


def read(address: str, num_batches: int) -> list[dict[str, torch.Tensor]]:
    with Loader("tokens", batch_size=20, seed=3, address=address) as loader:
        return [
            {name: tensor.clone() for name, tensor in next(iter(loader)).items()}
            for _ in range(num_batches)
        ]


def same(batch: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(batch) == list(other) and all(
        torch.equal(batch[name], other[name]) for name in batch
    )


def test_batches_are_the_same_over_either_transport(daemon: Daemon) -> None:
    transports = []
    batches = []
    for address in (daemon.address, tcp_address(daemon)):
        with Loader("tokens", batch_size=20, seed=3, address=address) as loader:
            batches.append(
                [
                    {name: tensor.clone() for name, tensor in next(iter(loader)).items()}
                    for _ in range(40)
                ]
            )
            transports += [session.transport for session in status(daemon).sessions]
    assert transports == [pb.TRANSPORT_ARENA, pb.TRANSPORT_INLINE]
    assert all(same(first, second) for first, second in zip(*batches, strict=True))


@pytest.mark.parametrize(
    ("prefetch_batches", "num_slots"), [(4, 20), (60, 160)], ids=["batches", "groups"]
)
def test_tensors_that_are_kept_do_not_change_however_many(
    daemon: Daemon, prefetch_batches: int, num_slots: int
) -> None:
    wanted = read(daemon.address, 600)
    with Loader(
        "tokens", batch_size=20, seed=3, prefetch_batches=prefetch_batches, address=daemon.address
    ) as loader:
        kept = [next(iter(loader)) for _ in range(600)]  # many times the number of slots
        held = status(daemon).sessions[0].num_held
    assert held <= num_slots
    assert all(same(batch, other) for batch, other in zip(kept, wanted, strict=True))
    daemon.kill()
    assert all(same(batch, other) for batch, other in zip(kept, wanted, strict=True))


@pytest.mark.parametrize("prefetch_batches", [4, 60], ids=["batches", "groups"])
def test_one_view_of_one_tensor_keeps_its_batch(daemon: Daemon, prefetch_batches: int) -> None:
    wanted = read(daemon.address, 300)
    with Loader(
        "tokens", batch_size=20, seed=3, prefetch_batches=prefetch_batches, address=daemon.address
    ) as loader:
        rows = [next(iter(loader))["tokens"][7, 2:5] for _ in range(300)]
    assert all(
        torch.equal(row, batch["tokens"][7, 2:5]) for row, batch in zip(rows, wanted, strict=True)
    )


@pytest.mark.parametrize("prefetch_batches", [2, 60], ids=["batches", "groups"])
def test_writing_into_a_batch_changes_no_later_one(daemon: Daemon, prefetch_batches: int) -> None:
    wanted = read(daemon.address, 400)
    writer, bystander = (
        Loader(
            "tokens",
            batch_size=20,
            seed=3,
            prefetch_batches=prefetch_batches,
            address=daemon.address,
        )
        for _ in range(2)
    )
    with writer, bystander:
        before = None
        for expected in wanted:
            batch, other = next(iter(writer)), next(iter(bystander))
            assert same(batch, expected)
            assert before is None or all((tensor == 99).all() for tensor in before.values()), (
                "nor an earlier one"
            )
            before = batch
            for tensor in batch.values():
                tensor.fill_(99)
            assert all((tensor == 99).all() for tensor in batch.values())
            assert same(other, expected)


def receive_arena(daemon: Daemon) -> tuple[int, int, pb_grpc.LoaderStub, grpc.Channel]:
    """Descriptor and size of a session's arena, by the protocol alone, without the client."""
    channel = grpc.insecure_channel(daemon.address)
    stub = pb_grpc.LoaderStub(channel)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side:
        side.settimeout(120)
        side.connect(daemon.address.removeprefix("unix:") + ".side")
        token = side.recv(100).decode()
        request = pb.OpenSessionRequest(
            dataset=pb.DatasetRef(name="tokens"),
            order=pb.OrderSpec(global_batch_size=20),
            reader=pb.Reader(job="hand", world_size=1),
            transport=pb.TRANSPORT_ARENA,
        )
        opened = stub.OpenSession(request, metadata=(("gyre-side-token", token),), timeout=120)
        message, (descriptor,), _, _ = socket.recv_fds(side, 100, 1)
    assert message.decode() == f"{opened.session_id} 0"
    assert os.fstat(descriptor).st_size == opened.arena_bytes
    return descriptor, opened.arena_bytes, stub, channel


def check_nothing_can_be_written(descriptor: int, size: int) -> None:
    for attempt in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.ftruncate(descriptor, size * 2),
        lambda: mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(
            OSError, match=r"not permitted|Permission denied|Bad file descriptor|Invalid argument"
        ):
            attempt()


OPENS_AS_ANOTHER_USER = """
import ctypes, os, sys
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # or it cannot look into its own /proc/self
os.stat(f"/proc/self/fd/{sys.argv[1]}")
for flags in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(f"/proc/self/fd/{sys.argv[1]}", flags)
    except PermissionError:
        continue
    sys.exit(f"it was opened with flags {flags}")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_cannot_open_an_arena_again(daemon: Daemon) -> None:
    descriptor, _, _, channel = receive_arena(daemon)
    with channel:
        command = [sys.executable, "-c", OPENS_AS_ANOTHER_USER, str(descriptor)]
        subprocess.run(command, pass_fds=[descriptor], check=True)
    os.close(descriptor)


def test_a_client_can_neither_write_to_an_arena_nor_resize_it(daemon: Daemon) -> None:
    descriptor, size, _, channel = receive_arena(daemon)
    with channel:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        check_nothing_can_be_written(descriptor, size)
        os.fchmod(descriptor, 0o600)  # its owner may; the seals hold all the same
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        check_nothing_can_be_written(again, size)
        os.close(again)
        mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)[0] = 1
    os.close(descriptor)
    assert len(read(daemon.address, 5)) == 5


def test_nonsense_on_the_side_channel_ends_that_connection_only(daemon: Daemon) -> None:
    before = read(daemon.address, 3)
    path = daemon.address.removeprefix("unix:") + ".side"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as side,
        Path(os.devnull).open() as null,
    ):
        side.settimeout(120)
        side.connect(path)
        assert len(side.recv(100)) == 32
        socket.send_fds(side, [b"what is this"], [null.fileno()] * 8)
        with contextlib.suppress(ConnectionResetError):
            assert side.recv(100) == b""
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(50)]
    for connection in silent:
        connection.connect(path)
    assert all(
        same(batch, other) for batch, other in zip(read(daemon.address, 3), before, strict=True)
    )
    for connection in silent:
        connection.close()


FROZEN = """
import sys
from gyre_client import Loader
options = {"batch_size": 20, "seed": 3, "prefetch_batches": 2, "reattach_timeout_s": 5}
loader = Loader("tokens", job="frozen", address=sys.argv[1], **options)
batch = next(iter(loader))
print(batch["sample_id"].tolist(), flush=True)
sys.stdin.readline()
print(batch["sample_id"].tolist(), batch["tokens"].sum(dim=1).tolist(), flush=True)
print([next(iter(loader))["sample_id"].tolist() for _ in range(10)][-1], flush=True)
"""


@pytest.fixture
def frozen(daemon: Daemon) -> Iterator["subprocess.Popen[str]"]:
    """A client that has one batch and waits for a line before it goes on."""
    command = [sys.executable, "-c", FROZEN, daemon.address]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        if process.poll() is None:
            process.kill()


def test_frozen_client_loses_its_lease_and_wakes_to_intact_bytes(
    daemon: Daemon, frozen: "subprocess.Popen[str]"
) -> None:
    assert frozen.stdin
    assert frozen.stdout
    first = frozen.stdout.readline()
    expected = read(daemon.address, 11)
    frozen.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 120
    while status(daemon).sessions:
        assert time.monotonic() < deadline, "the session of a frozen client must end with its lease"
        time.sleep(0.05)
    assert status(daemon).memory_reserved_bytes == 0
    read(daemon.address, 200)  # others use memory, but not the frozen client's
    frozen.send_signal(signal.SIGCONT)
    frozen.stdin.write("go on\n")
    frozen.stdin.flush()
    ids, sums = (
        expected[0]["sample_id"].tolist(),
        expected[0]["tokens"].to(torch.int64).sum(dim=1).tolist(),
    )
    assert first.strip() == str(ids)
    assert frozen.stdout.readline().strip() == f"{ids} {sums}"
    # it attached again at its cursor
    assert frozen.stdout.readline().strip() == str(expected[10]["sample_id"].tolist())
    assert frozen.wait(120) == 0


def num_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("gyre-arena")


def test_memory_of_a_session_is_its_share(daemon: Daemon) -> None:
    before = num_arenas()
    with Loader("tokens", batch_size=20, prefetch_batches=4, address=daemon.address) as loader:
        next(iter(loader))
        (session,) = status(daemon).sessions
        assert (
            session.memory_bytes
            <= session.memory_limit_bytes
            == status(daemon).memory_reserved_bytes
        )
        assert num_arenas() == before + 1
    del loader
    assert num_arenas() == before


def test_no_memory_outlives_its_session(gyred: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(32 << 20))
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "int16",
        "sequence_length": 1 << 15,
    }
    daemon = gyred({"datasets": {"tokens": tokens}})
    assert daemon.process
    maps = Path(f"/proc/{daemon.process.pid}/maps")
    for seed in range(12):  # each session ends while batches are being read
        with Loader("tokens", batch_size=64, seed=seed, address=daemon.address) as loader:
            for _ in range(5 + seed):
                next(iter(loader))
        deadline = time.monotonic() + 120
        while "gyre-arena" in maps.read_text():
            assert time.monotonic() < deadline, f"after {seed + 1} sessions"
            time.sleep(0.02)
