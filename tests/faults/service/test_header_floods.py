"""Headers that take far more memory than bytes (HPACK), from connections that prove nothing."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gyre_client as gyre
import numpy as np
import pytest
from gyre_daemon.runtime.limits import MAX_STRANGERS

from tests.conftest import Daemon, StartDaemon
from tests.secure_daemons import free_port

MIB = 1 << 20
LIMIT_BYTES = 2200 * MIB
SENT_BYTES = 24 * MIB  # by all connections together
DEADLINE_S = 120.0
NUM_JOBS = 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# RFC 9113, section 6, and RFC 7541, appendix A
HEADERS, SETTINGS, ACK, END_HEADERS = 1, 4, 1, 4
ACCEPT_CHARSET = 0x8F
# As many as gRPC's limit of metadata allows: beyond it, the call is refused and its memory freed.
NUM_NAMED = 160
CGROUPS = Path("/sys/fs/cgroup")


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def block() -> bytes:
    """The headers of a call whose message never comes; one entry is named again and again."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": b"/gyre_protos.v1.Loader/GetStatus",
        b":authority": b"x",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    literals = [
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    ]
    return b"".join(literals) + bytes([ACCEPT_CHARSET]) * NUM_NAMED


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this test with a limit of memory."""
    memory = CGROUPS / "memory"
    root, limit = (memory, "memory.limit_in_bytes") if memory.is_dir() else (CGROUPS, "memory.max")
    group = root / f"gyre-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with contextlib.suppress(OSError):  # its last process is still ending
            return group.rmdir()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def peak_bytes(daemon: Daemon) -> int:
    assert daemon.process
    for line in Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel tells no peak")


class Flood:
    """Connections that send headers, and stay open when they have sent them all."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._num_busy = MAX_STRANGERS
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._attack) for _ in range(MAX_STRANGERS)]

    def __enter__(self) -> "Flood":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()

    @property
    def is_sending(self) -> bool:
        with self._lock:
            return self._num_busy > 0

    def _attack(self) -> None:
        """Send this connection's part; where the daemon ends it, go on over the next one."""
        calls = [frame(HEADERS, block(), each, END_HEADERS) for each in range(1, 1 << 17, 2)]
        num_left = SENT_BYTES // MAX_STRANGERS // len(calls[0])
        while num_left > 0 and not self._is_over.is_set():
            with socket.socket() as connection, contextlib.suppress(OSError):
                connection.settimeout(DEADLINE_S)
                connection.connect(("127.0.0.1", self._port))
                threading.Thread(target=read_all, args=(connection,), daemon=True).start()
                connection.sendall(PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACK))
                for call in calls[:num_left]:
                    connection.sendall(call)
                    num_left -= 1
                with self._lock:
                    self._num_busy -= 1
                self._is_over.wait(DEADLINE_S)


def read_all(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 16):
            pass


def test_headers_that_name_one_entry_again_and_again_take_little_memory(
    group: Path, gyred: StartDaemon, tmp_path: Path
) -> None:
    data = tmp_path / "numbers.bin"
    np.arange(1 << 16, dtype=np.int16).tofile(data)
    numbers = {"uri": str(data), "format": "tokens", "dtype": "int16", "sequence_length": 8}
    port = free_port()
    daemon = gyred(
        {
            "listen": [f"unix:{tmp_path}/gyre.sock", f"tcp:127.0.0.1:{port}"],
            "datasets": {"numbers": numbers},
        }
    )
    assert daemon.process
    (group / "cgroup.procs").write_text(str(daemon.process.pid))
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                gyre.Loader(
                    "numbers",
                    address=f"unix:{tmp_path}/gyre.sock",
                    batch_size=16,
                    epochs=None,
                    job=f"job-{number}",
                    rank=0,
                    world_size=1,
                )
            )
            for number in range(NUM_JOBS)
        ]
        streams = [iter(job) for job in jobs]
        assert all(next(stream, None) is not None for stream in streams)
        before = peak_bytes(daemon)
        with Flood(port) as flood:
            while flood.is_sending:
                assert all(next(stream, None) is not None for stream in streams)
            grown = peak_bytes(daemon) - before
    assert daemon.process.poll() is None
    assert grown < 160 * MIB, f"{grown / MIB:.0f} MiB"
