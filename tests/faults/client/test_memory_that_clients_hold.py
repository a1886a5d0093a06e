"""Arenas that clients keep after their sessions count until the kernel says that they are gone."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from gyre_client import Loader
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.other_user import NEEDS_ROOT, OtherUser, other_user
from tests.waiting import until

LENGTH = 1024  # a sample is 2 KiB
BUDGET_BYTES = 64 << 20
# It keeps what it is sent, until it is killed.
_HOLD = """
import socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
kept = []
while True:
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    kept += descriptors
    connection.send(b"x")
"""

pytestmark = NEEDS_ROOT


@pytest.fixture
def daemon(gyred: StartDaemon, tmp_path: Path) -> Daemon:
    samples = np.arange(8000, dtype="<u2")[:, None] + np.zeros(LENGTH, "<u2")
    samples.tofile(tmp_path / "tokens.bin")
    tokens = {
        "uri": str(tmp_path / "tokens.bin"),
        "format": "tokens",
        "dtype": "uint16",
        "sequence_length": LENGTH,
    }
    return gyred({"memory_budget": BUDGET_BYTES, "datasets": {"tokens": tokens}})


class Holder:
    """A process that keeps the descriptors that it is given."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-c", _HOLD, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def give(self, descriptor: int) -> None:
        """Hand a descriptor over; this process does not keep it."""
        socket.send_fds(self._socket, [b"x"], [descriptor])
        os.close(descriptor)
        assert self._socket.recv(1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.kill()


def arena_bytes(*pids: int) -> int:
    """The memory of all arenas that any of these processes has open."""
    sizes = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "gyre-arena" in str(path.readlink()):
                    about = path.stat()
                    sizes[about.st_ino] = about.st_blocks * 512
    return sum(sizes.values())


class Watch:
    """Looks all the time how much memory the arenas have, and notes the most."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._over = threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most_bytes = max(self.most_bytes, arena_bytes(*self._pids))

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def open_and_close(
    stub: pb_grpc.LoaderStub, user: OtherUser, number: int, batch_size: int
) -> tuple[int, int]:
    """The descriptor of the first arena of a session that is closed again, and its size."""
    opened = stub.OpenSession(
        pb.OpenSessionRequest(
            dataset=pb.DatasetRef(name="tokens"),
            order=pb.OrderSpec(global_batch_size=batch_size, seed=number),
            reader=pb.Reader(job="keeper", world_size=1),
            transport=pb.TRANSPORT_ARENA,
        ),
        metadata=user.metadata,
        timeout=120,
    )
    assert opened.arena_bytes
    _, (descriptor,), _, _ = socket.recv_fds(user.side, 1000, 1)
    stub.CloseSession(
        pb.CloseSessionRequest(session_id=opened.session_id), metadata=user.metadata, timeout=120
    )
    return descriptor, opened.arena_bytes


def keep_until_refused(daemon: Daemon, holder: Holder) -> tuple[int, str]:
    """Have the holder keep arenas of closed sessions: their bytes, and why there are no more."""
    kept_bytes = 0
    with other_user(daemon.address) as user, grpc.insecure_channel(daemon.address) as channel:
        stub = pb_grpc.LoaderStub(channel)
        for number in range(200):
            try:
                descriptor, num_bytes = open_and_close(stub, user, number, 1000)
            except grpc.RpcError as refused:
                return kept_bytes, str(refused.details())
            holder.give(descriptor)
            kept_bytes += num_bytes
    raise AssertionError("nothing bounds what a user keeps")


def test_what_a_user_keeps_is_bounded_and_others_go_on(daemon: Daemon, holder: Holder) -> None:
    assert daemon.process
    watch = Watch(daemon.process.pid, holder.process.pid)
    try:
        kept_bytes, reason = keep_until_refused(daemon, holder)
        assert kept_bytes > BUDGET_BYTES // 2
        assert "uid:65534" in reason
        now = status(daemon)
        assert now.memory_abandoned_bytes == kept_bytes, "although all its connections are gone"
        assert now.memory_reserved_bytes == 0
        assert kept_bytes <= 0.875 * BUDGET_BYTES
        with Loader("tokens", batch_size=64, address=daemon.address) as loader:
            for _ in range(50):
                batch = next(loader)
                assert (batch["tokens"] == batch["sample_id"][:, None]).all()
    finally:
        watch.close()
    assert BUDGET_BYTES // 2 < watch.most_bytes <= BUDGET_BYTES
    holder.kill()
    until(lambda: status(daemon).memory_abandoned_bytes == 0)
    with other_user(daemon.address) as user, grpc.insecure_channel(daemon.address) as channel:
        descriptor, _ = open_and_close(pb_grpc.LoaderStub(channel), user, 0, 1000)
        os.close(descriptor)


def test_a_client_that_says_it_has_unmapped_an_arena_and_has_not_is_not_believed(
    daemon: Daemon,
) -> None:
    with other_user(daemon.address) as user, grpc.insecure_channel(daemon.address) as channel:
        descriptor, num_bytes = open_and_close(pb_grpc.LoaderStub(channel), user, 0, 64)
        duplicate = os.dup(descriptor)
        os.close(descriptor)
    with Loader("tokens", batch_size=64, address=daemon.address) as loader:
        next(loader)  # by now the daemon knows that the user hung up
        assert status(daemon).memory_abandoned_bytes == num_bytes
    os.close(duplicate)
    until(lambda: status(daemon).memory_abandoned_bytes == 0)


def test_a_refusal_tells_of_other_users_only_to_operators(daemon: Daemon, holder: Holder) -> None:
    kept_bytes, _ = keep_until_refused(daemon, holder)

    def refusal(uid: int) -> str:
        with other_user(daemon.address, uid) as user, grpc.insecure_channel(daemon.address) as it:
            with pytest.raises(grpc.RpcError) as refused:
                open_and_close(pb_grpc.LoaderStub(it), user, 0, 8000)
            return str(refused.value.details())

    text = f"{kept_bytes} are kept by clients whose sessions are over"
    assert f"{text} (other users: {kept_bytes})." in refusal(65533)
    assert f"{text} (uid:65534: {kept_bytes})." in refusal(65534)
    assert f"{text} (uid:65534: {kept_bytes})." in refusal(0), "an operator"
