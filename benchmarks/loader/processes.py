"""Measured processes: a daemon, and the CPU time and memory of processes."""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

BUDGET_BYTES = 1 << 30
MEMORY_SLACK_BYTES = 64 << 20  # allowed beyond a daemon's budget
START_TIMEOUT_S = 60.0
WATCH_S = 0.1
FORKED_WATCH_S = 1.0


@dataclass
class Daemon:
    """A `gyred` process with datasets of its own.

    Attributes:
        address: of its Unix socket.
        pid: of the process.
        budget_bytes: its `memory_budget`.
        peak_bytes: the most memory of their own (not mapped files) that it and its copy workers had
            while somebody looked, which is often.
    """

    address: str
    pid: int
    budget_bytes: int
    peak_bytes: int = 0
    _forked_bytes: int = 0
    _forked_seen_s: float = -math.inf

    @property
    def pids(self) -> list[int]:
        """The process ids of the daemon and its copy workers."""
        return family(self.pid)

    def memory_bytes(self) -> int:
        """Memory of their own now.

        What copy workers have beside the daemon's is looked up once a second, since it takes some
        ms.
        """
        if time.monotonic() - self._forked_seen_s > FORKED_WATCH_S:
            self._forked_bytes = sum(map(private_bytes, self.pids[1:]))
            self._forked_seen_s = time.monotonic()
        num_bytes = own_memory_bytes(self.pid) + self._forked_bytes
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        return num_bytes

    def watch(self, until: threading.Event) -> None:
        """Sample the memory until the end."""
        while not until.wait(WATCH_S):
            self.memory_bytes()

    @property
    def within_budget(self) -> bool:
        """Whether the peak is within the budget and its slack."""
        return self.peak_bytes <= self.budget_bytes + MEMORY_SLACK_BYTES


@contextmanager
def daemon(
    folder: Path,
    datasets: Mapping[str, Mapping[str, object]],
    budget_bytes: int = BUDGET_BYTES,
    more: Sequence[str] = (),
    python: str = sys.executable,
) -> Iterator[Daemon]:
    """A daemon that serves these datasets, with `more` lines of configuration.

    Its files are in a folder of its own. It is the `gyred` that is installed beside `python`.
    Its socket is in the system's folder for temporary files: the path of a socket has 102 bytes at
    most.
    """
    home = folder / f"daemon-{time.monotonic_ns()}"
    home.mkdir()
    with tempfile.TemporaryDirectory(prefix="gyre-") as sockets, (home / "log").open("wb") as log:
        address = f"unix:{sockets}/gyre.sock"
        lines = [
            f'listen = ["{address}"]',
            f'index_dir = "{folder}/index"',
            f"memory_budget = {budget_bytes}",
            *more,
        ]
        for name, config in datasets.items():
            lines += [
                f"[datasets.{name}]",
                *(f"{key} = {_toml(value)}" for key, value in config.items()),
            ]
        (home / "gyre.toml").write_text("\n".join(lines))
        command = [python, "-m", "gyre_daemon", "serve", "--config", str(home / "gyre.toml")]
        process = subprocess.Popen(command, stderr=log)
        try:
            await_ready(process, home / "log")
            with _watched(Daemon(address, process.pid, budget_bytes)) as server:
                yield server
        finally:
            process.terminate()
            process.wait(30)


def _toml(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def await_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the daemon's log says that it is ready."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while '"ready"' not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the daemon did not start:\n{log.read_text()}")
        time.sleep(0.02)


@contextmanager
def _watched(server: Daemon) -> Iterator[Daemon]:
    done = threading.Event()
    watcher = threading.Thread(target=server.watch, args=(done,))
    watcher.start()
    try:
        yield server
    finally:
        done.set()
        watcher.join()


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_s(pids: Sequence[int]) -> float:
    """CPU time of all these processes so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def page_faults(pids: Sequence[int]) -> int:
    """The minor page faults of all these processes so far."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
    # see proc_pid_stat(5): minflt
    return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)


@dataclass(frozen=True)
class Memory:
    """Memory of processes; a page that several share counts once (PSS).

    Attributes:
        own_bytes: memory that only they need: private pages, and pages that they share.
        file_bytes: pages of mapped files, which the page cache would hold anyway.
    """

    own_bytes: int
    file_bytes: int

    @classmethod
    def of(cls, pids: Sequence[int]) -> "Memory":
        """The sum over processes."""
        rollups = [_kib_fields(Path(f"/proc/{pid}/smaps_rollup")) for pid in pids]
        own = sum(fields["Pss_Anon"] + fields["Pss_Shmem"] for fields in rollups)
        return cls(own, sum(fields["Pss_File"] for fields in rollups))


def arena_bytes(pid: int) -> int:
    """Resident shared memory of one process."""
    return _kib_fields(Path(f"/proc/{pid}/status"))["RssShmem"]


def own_memory_bytes(pid: int) -> int:
    """Resident memory of one process without the files that it maps."""
    fields = _kib_fields(Path(f"/proc/{pid}/status"))
    return fields["RssAnon"] + fields["RssShmem"]


def private_bytes(pid: int) -> int:
    """Memory that no other process has; none if the process is gone."""
    try:
        return _kib_fields(Path(f"/proc/{pid}/smaps_rollup"))["Private_Dirty"]
    except (ProcessLookupError, FileNotFoundError):
        return 0


def _kib_fields(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file in /proc, in bytes."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) << 10
        for words in lines
        if len(words) == 3 and words[2] == "kB"
    }


def load_average() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]
