"""A daemon that all rows of a surface are sent to, and what must be true of it afterwards."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import webdataset
from gyre_client import Loader
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2_grpc as pb_grpc

from tests.bad_inputs.row import SECRET, UNPRINTABLE, Row
from tests.channels import identified_channel
from tests.conftest import SERVE, Daemon, to_toml
from tests.preloaded.interpreter import Interpreter
from tests.users import reason_of

TOKENS = {"format": "tokens", "dtype": "int32", "sequence_length": 16}
NUM_SAMPLES = 240
BATCH_SIZE = 8
CALL_DEADLINE_S = 120.0
_DEADLINE_S = 120.0
# What an interpreter keeps after it has answered hundreds of requests.
_MORE_MEMORY_BYTES = 32 << 20
_MORE_DESCRIPTORS = 4
_DESCRIPTORS_PER_SHARD = 2  # a local shard of an open dataset stays open


class Node:
    """A running daemon and a stub of its service."""

    def __init__(self, daemon: Daemon, channel: grpc.Channel, folder: Path) -> None:
        self.daemon = daemon
        self.folder = folder
        self.stub = pb_grpc.LoaderStub(channel)
        self.channel = channel

    @property
    def address(self) -> str:
        return self.daemon.address

    @property
    def socket_path(self) -> Path:
        return Path(self.address.removeprefix("unix:"))

    @property
    def process(self) -> psutil.Process:
        assert self.daemon.process
        return psutil.Process(self.daemon.process.pid)

    def read(self, dataset: str = "tokens") -> list[int]:
        """Returns the samples of two batches, whose contents are compared."""
        seen = []
        with Loader(dataset, batch_size=BATCH_SIZE, seed=1, address=self.address) as loader:
            for _ in range(2):
                batch = next(loader)
                if dataset == "tokens":
                    first = [16 * sample for sample in batch["sample_id"].tolist()]
                    assert batch["tokens"][:, 0].tolist() == first
                seen += batch["sample_id"].tolist()
        return seen


@contextmanager
def running(
    folder: Path, interpreter: Interpreter, config: Mapping[str, Any] | None = None
) -> Iterator[Node]:
    """A daemon with good datasets, which must be as it was when the block ends.

    Args:
        folder: Of its files.
        interpreter: What it is forked from.
        config: More of its configuration; datasets are added to the good ones.
    """
    write_good(folder)
    more = dict(config or {})
    socket = folder / "run" / "gyre.sock"
    path = folder / "gyre.toml"
    datasets = {**good_datasets(folder), **more.pop("datasets", {})}
    path.write_text(
        to_toml(
            {
                "listen": [f"unix:{socket}"],
                "index_dir": str(folder / "index"),
                "drain_timeout_s": 2.0,
                "memory_budget": "64MiB",
                **more,
                "datasets": datasets,
            }
        )
    )
    daemon = Daemon(path, f"unix:{socket}", folder / "log", {}, SERVE, interpreter)
    daemon.start()
    try:
        with identified_channel(daemon.address) as channel:
            node = Node(daemon, channel, folder)
            wanted = node.read()
            node.read("tars")
            _until(lambda: _sessions(node) == 0, lambda: "the good sessions do not end")
            before = _Measures.of(node)
            before.descriptors += _DESCRIPTORS_PER_SHARD * len(datasets)
            yield node
            assert node.read() == wanted, "what is good is served as before"
            before.check(node)
            check_log(daemon.log_path.read_text(errors="surrogateescape"))
        assert daemon.stop() == 0
    finally:
        assert daemon.process
        if daemon.process.poll() is None:
            daemon.kill()


def write_good(folder: Path) -> None:
    """Writes the good datasets."""
    (folder / "tokens").mkdir(parents=True)
    np.arange(NUM_SAMPLES * 16, dtype=np.int32).tofile(folder / "tokens" / "a.bin")
    with webdataset.TarWriter(str(folder / "good.tar")) as writer:
        for sample in range(64):
            writer.write({"__key__": f"{sample:04}", "bin": bytes([sample]) * 50})


def good_datasets(folder: Path) -> dict[str, Any]:
    """Returns the good datasets, and one whose storage has a secret and does not answer."""
    return {
        "tokens": {"uri": str(folder / "tokens"), **TOKENS},
        "tars": {"uri": str(folder / "good.tar"), "format": "webdataset"},
        "remote": {
            "uri": "s3://bucket/x.bin",
            **TOKENS,
            "storage": {
                "endpoint": "http://127.0.0.1:9",
                "region": "us-east-1",
                "access_key_id": "test",
                "secret_access_key": SECRET,
            },
        },
    }


class _Measures:
    """Memory, descriptors and threads of a daemon without sessions."""

    def __init__(self, memory_bytes: int, descriptors: int) -> None:
        self.memory_bytes, self.descriptors = memory_bytes, descriptors

    @classmethod
    def of(cls, node: Node) -> "_Measures":
        return cls(_own_bytes(node.process.pid), node.process.num_fds())

    def check(self, node: Node) -> None:
        """Waits until everything is back; fails with the figures if it is not in time."""
        pid, process = node.process.pid, node.process
        most_bytes = self.memory_bytes + _MORE_MEMORY_BYTES
        most_descriptors = self.descriptors + _MORE_DESCRIPTORS
        _until(lambda: _sessions(node) == 0, lambda: "sessions are left")
        _until(
            lambda: "gyre-arena" not in Path(f"/proc/{pid}/maps").read_text(),
            lambda: "arenas are left",
        )
        _until(
            lambda: process.num_fds() <= most_descriptors,
            lambda: f"{process.num_fds()} descriptors, and {self.descriptors} before",
        )
        _until(
            lambda: _own_bytes(pid) <= most_bytes,
            lambda: f"{_own_bytes(pid)} bytes, and {self.memory_bytes} before",
        )


def check_log(text: str) -> None:
    """Nothing of a log is a secret, a traceback, or bytes that a terminal obeys."""
    controls = [each for each in UNPRINTABLE if not each.isprintable()]
    for bad in (SECRET, "Traceback", "internal error", *controls):
        lines = [line for line in text.split("\n") if bad in line]
        assert not lines, f"{len(lines)} lines of the log have {bad!r}: {lines[0]!r:.600}"


def check_refusal(error: grpc.RpcError, row: Row) -> None:
    """The error of a call has the row's code, reason and text."""
    told = f"{error.code().name}: {error.details()}"
    assert error.code().name == row.status, told
    assert re.search(row.text, str(error.details())), told
    assert SECRET not in told
    assert "\x1b" not in told
    if row.reason:
        assert reason_of(error) == row.reason, told


def _sessions(node: Node) -> int:
    with Connection(parse_address(node.address)) as connection:
        status = connection.status()
    return len(status.sessions) + status.memory_reserved_bytes


def _own_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return sum(int(sizes[key][0]) << 10 for key in ("RssAnon", "RssShmem"))


def _until(holds: Callable[[], bool], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)
