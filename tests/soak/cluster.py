"""The processes of a run: two daemons, an object server, and the ranks of all jobs."""

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from gyre_protos.v1 import loader_pb2 as pb

from tests.conftest import Daemon, to_toml
from tests.object_server.process import ObjectServerProcess, object_server
from tests.preloaded.interpreter import Forked, Interpreter
from tests.soak import contents
from tests.soak.history import of_rank, read
from tests.soak.plan import Job
from tests.soak.reader import STOP

# Long enough for a machine on which everybody waits for a processor.
LEASE_S = 5.0
BUDGET_BYTES = 256 << 20
CACHE_BYTES = 4 << 20
_NUM_DAEMONS = 2
_MARK = "GYRE_SOAK"  # in the environment of every process of a run
_DEADLINE_S = 300.0  # until all ranks run, or have ended
_IDLE_DEADLINE_S = 60.0
_LOOK_S = 0.05
_SETTLED_S = 2.0  # in which the daemon notices connections that have ended
# Steps that every rank reads after the run was told to end: more than any takes until it knows.
_STEPS_TO_STOP = 150
_FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


@dataclass
class RankProcess:
    """One rank of a job: a process that is started again after every kill."""

    job: Job
    rank: int
    address: str
    folder: Path
    interpreter: Interpreter
    environment: dict[str, str]
    process: Forked | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        return f"{self.job.name}.{self.rank}"

    @property
    def history(self) -> Path:
        return self.folder / of_rank(self.job.name, self.rank)

    def start(self) -> None:
        request = json.dumps(
            {
                "job": self.job.to_json(),
                "rank": self.rank,
                "address": self.address,
                "folder": str(self.folder),
            }
        )
        with (self.folder / f"{self.name}.log").open("ab") as log:
            command = ("-m", "tests.soak.reader", request)
            self.process = self.interpreter.start(command, log, self.environment)

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait(_DEADLINE_S)

    def signal(self, signum: int) -> None:
        assert self.process
        self.process.send_signal(signum)

    def num_lines(self) -> int:
        """Returns how many lines its history has."""
        return self.history.read_bytes().count(b"\n") if self.history.exists() else 0

    def has_batch_since(self, num_lines: int) -> bool:
        """Whether it has read a batch after so many lines."""
        if not self.history.exists():
            return False
        lines = self.history.read_bytes().split(b"\n")[num_lines:]
        return any(b'"batch"' in line for line in lines)


class Cluster:
    """All processes of a run, in a folder of their own."""

    def __init__(self, folder: Path, jobs: Sequence[Job]) -> None:
        """Writes the datasets; `start` starts what reads them."""
        self.folder = folder
        self.histories = folder / "histories"
        self.histories.mkdir()
        self.jobs = jobs
        self.tokens, self.tars = folder / "tokens", folder / "tars"
        contents.write_tokens(self.tokens)
        contents.write_tars(self.tars)
        contents.write_tokens(folder / "objects" / contents.BUCKET)
        self._mark = secrets.token_hex(8)
        self._environment = {**os.environ, _MARK: self._mark}
        self._stack = ExitStack()
        self.clock = folder / "clock"
        self.server: ObjectServerProcess
        self.daemons: list[Daemon] = []
        self.ranks: list[RankProcess] = []

    def __enter__(self) -> "Cluster":
        self.server = self._stack.enter_context(object_server(self.folder / "objects"))
        self.clock.write_text("+0")
        for number in range(_NUM_DAEMONS):
            self.daemons.append(self._daemon(number).start())
        interpreter = Interpreter(["gyre_client", "tests.soak.reader"])
        self._stack.callback(interpreter.close)
        for job in self.jobs:
            for rank in range(job.world_size):
                address = self._address(job, rank)
                self.ranks.append(
                    RankProcess(job, rank, address, self.histories, interpreter, self._environment)
                )
        return self

    def __exit__(self, *exception: object) -> None:
        for rank in self.ranks:
            if rank.process and rank.process.poll() is None:
                rank.signal(signal.SIGCONT)
                rank.kill()
        for daemon in self.daemons:
            if daemon.process and daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                kill(daemon)
        self._stack.close()

    @property
    def has_faked_clock(self) -> bool:
        """Whether the clock of the daemons can be set."""
        return _FAKETIME is not None

    def _daemon(self, number: int) -> Daemon:
        folder = self.folder / f"daemon-{number}"
        folder.mkdir()
        address = f"unix:{folder}/run/gyre.sock"
        config = {
            "listen": [address, f"tcp:127.0.0.1:{_free_port()}"],
            "index_dir": str(folder / "index"),
            "cache_dir": str(folder / "cache"),
            "cache_memory": CACHE_BYTES,
            "lease_s": LEASE_S,
            "drain_timeout_s": 3.0,
            "memory_budget": BUDGET_BYTES,
            "datasets": {
                "tokens": {"uri": str(self.tokens), **_TOKENS, **_ALLOWED},
                "tars": {"uri": str(self.tars), "format": "webdataset", **_ALLOWED},
                "objects": {
                    "uri": f"s3://{contents.BUCKET}/*.bin",
                    **_TOKENS,
                    **_ALLOWED,
                    "storage": dict(self.server.storage_settings),
                },
            },
        }
        path = folder / "gyre.toml"
        path.write_text(to_toml(config))
        environment = {_MARK: self._mark}
        if self.has_faked_clock:
            environment |= {
                "LD_PRELOAD": str(_FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "NO_FAKE_STAT": "1",
            }
        return Daemon(path, address, folder / "log", environment, _SERVE)

    def _address(self, job: Job, rank: int) -> str:
        daemon = self.daemons[job.daemons[rank]]
        if not job.over_tcp:
            return daemon.address
        (ready,) = (event for event in daemon.events() if event["event"] == "ready")
        (address,) = (each for each in ready["listen"] if each.startswith("tcp:"))
        return str(address)

    def wait_for_batches(self, since: Sequence[int] | None = None) -> None:
        """Waits until every rank has read a batch.

        Args:
            since: The number of lines of each rank's history from which on it counts; None for now.
        """
        since = since or [rank.num_lines() for rank in self.ranks]
        deadline = time.monotonic() + _DEADLINE_S
        for rank, num_lines in zip(self.ranks, since, strict=True):
            while not rank.has_batch_since(num_lines):
                assert rank.process
                status = rank.process.poll()
                assert status is None, f"{rank.name} ended with {status}: {self._log_of(rank)}"
                assert time.monotonic() < deadline, f"{rank.name} reads nothing"
                time.sleep(_LOOK_S)

    def finish(self) -> None:
        """Lets every job end at one step of its own, and waits for its ranks."""
        stops: dict[str, int] = {}
        for rank in self.ranks:
            *_, last = read(rank.history)
            stops[rank.job.name] = max(stops.get(rank.job.name, 0), last["step"] + _STEPS_TO_STOP)
        new = self.histories / f"{STOP}.new"
        new.write_text(json.dumps(stops))
        new.replace(self.histories / STOP)
        for rank in self.ranks:
            assert rank.process
            status = rank.process.wait(_DEADLINE_S)
            assert status == 0, f"{rank.name} ended with {status}: {self._log_of(rank)}"

    def state_of(self, number: int) -> dict[str, Any]:
        """Returns what a daemon has without clients, once it changes no more or after a while."""
        deadline = time.monotonic() + _IDLE_DEADLINE_S
        state = self._look_at(number)
        while time.monotonic() < deadline:
            time.sleep(_SETTLED_S)
            before, state = state, self._look_at(number)
            is_idle = not any(state[key] for key in ("sessions", "arenas", "reserved_bytes"))
            if is_idle and state["descriptors"] >= before["descriptors"]:
                break
        return state

    def _look_at(self, number: int) -> dict[str, Any]:
        with Connection(parse_address(self.daemons[number].address)) as connection:
            status = connection.status()
        process = psutil.Process(status.pid)
        maps = Path(f"/proc/{status.pid}/maps").read_text()
        return {
            "daemon": number,
            "memory_bytes": self.memory_bytes(number),
            # kept connections to the storage are not counted: they are closed with time
            "descriptors": process.num_fds() - len(process.net_connections("tcp")),
            "arenas": maps.count("gyre-arena"),
            "reserved_bytes": status.memory_reserved_bytes,
            "abandoned_bytes": status.memory_abandoned_bytes,
            "sessions": len(status.sessions),
        }

    def take_checksums(self, number: int, dataset: str) -> None:
        """Does what `gyre index --checksums` does at a daemon."""
        with Connection(parse_address(self.daemons[number].address)) as connection:
            reference = pb.DatasetRef(name=dataset)
            for _ in connection.index(reference, with_checksums=True):
                pass

    def memory_bytes(self, number: int) -> int:
        """Returns a daemon's memory without mapped files."""
        process = self.daemons[number].process
        assert process
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        sizes = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        return sum(int(sizes[key][0]) << 10 for key in ("RssAnon", "RssShmem"))

    def copy_workers(self, number: int) -> list[psutil.Process]:
        """Returns the processes that copy for a daemon."""
        process = self.daemons[number].process
        assert process
        family = psutil.Process(process.pid).children(recursive=True)
        parents = {each.ppid() for each in family}
        return [each for each in family if each.pid not in parents]

    def left(self) -> dict[str, list[str]]:
        """Returns the processes and socket files of the run that are still there."""
        deadline = time.monotonic() + _IDLE_DEADLINE_S
        while (found := self._left()) != {"processes": [], "files": []}:
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        return found

    def _left(self) -> dict[str, list[str]]:
        mine = psutil.Process()
        others = {mine.pid, self.server.pid, *(each.pid for each in mine.children())}
        processes = [
            " ".join(process.cmdline())
            for process in _marked(self._mark)
            if process.pid not in others
        ]
        files = [str(path) for path in self.folder.glob("daemon-*/run/*")]
        return {"processes": processes, "files": files}

    @staticmethod
    def _log_of(rank: RankProcess) -> str:
        return (rank.folder / f"{rank.name}.log").read_text()[-2000:]


def kill(daemon: Daemon) -> None:
    """Kills a daemon, and removes what libfaketime would have removed at its end."""
    assert daemon.process
    daemon.kill()
    for path in Path("/dev/shm").glob(f"*faketime_*_{daemon.process.pid}"):
        path.unlink()


# libfaketime 0.9.10 fails where Python sleeps until a monotonic time, so that one call is another.
_PROGRAM = """
import select, sys, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
from gyre_daemon.cli import main
main(["serve", "--config", sys.argv[1]])
"""
_SERVE = ("-c", _PROGRAM)
_TOKENS = {
    "format": "tokens",
    "dtype": "int32",
    "sequence_length": contents.TOKENS_PER_SAMPLE,
}
_ALLOWED = {"allow": ["anyone"]}  # jobs over TCP show no credentials


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark:
                yield process


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
