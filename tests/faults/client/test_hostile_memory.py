"""The client against daemons that hand it memory which could end it."""

import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
)

from tests.stub_daemon import (
    StubDaemon,
    batches,
    frame,
    memory_file,
    payload,
)
from tests.stubbed_loader import inline, read_all, without_arena


@pytest.fixture
def stub(tmp_path: Path) -> StubDaemon:
    return StubDaemon(tmp_path)


def of_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        return os.dup(file.fileno())


def of_socket() -> int:
    one, other = socket.socketpair()
    other.close()
    return one.detach()


@pytest.mark.parametrize(
    ("make_memory", "complaint"),
    [
        (lambda: memory_file(sealed=False), "without a seal against shrinking"),
        (lambda: memory_file(1 << 12), "of 4096 bytes and announced 65536"),
        (lambda: memory_file(1 << 20), "of 1048576 bytes and announced 65536"),
        (lambda: memory_file(0), "of 0 bytes"),
        (lambda: memory_file(5000), "of 5000 bytes"),
        (lambda: os.open("/dev/zero", os.O_RDONLY), "another kind of file"),
        (of_file, "shared memory"),
        (of_socket, "another kind of file"),
    ],
    ids=["unsealed", "short", "long", "empty", "no pages", "device", "file", "socket"],
)
def test_memory_that_could_end_this_process(
    tmp_path: Path, make_memory: Callable[[], int], complaint: str
) -> None:
    def num_descriptors_after(num_tries: int) -> int:
        for _ in range(num_tries):
            stub = StubDaemon(tmp_path)
            stub.make_memory = make_memory
            with pytest.raises(DaemonFault, match=complaint):
                read_all(stub, 1)
            stub.side_path.unlink()
        return len(list(Path("/proc/self/fd").iterdir()))

    # gRPC opens some descriptors at first use, and keeps them.
    before = num_descriptors_after(num_tries=1)
    assert num_descriptors_after(num_tries=5) < before + 5


def test_an_arena_of_another_session(stub: StubDaemon) -> None:
    stub.side_message = b"other 0"
    with pytest.raises(DaemonUnavailable, match="did not arrive on the side channel"):
        read_all(stub, 1)


@pytest.mark.parametrize("token", [b"", b"short", b"\n" * 32, b"\x1b" * 32, b"\xff" * 32])
def test_a_token_that_is_none_is_never_sent_on(stub: StubDaemon, token: bytes) -> None:
    stub.token = token
    stub.responses = lambda stub, session: iter([batches(inline(0))])
    stub.frames = [frame(payload())]
    stub.answers["OpenSession"] = without_arena(stub)
    assert len(read_all(stub, 1)) == 1
