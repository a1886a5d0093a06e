"""Contenders in turns.

Each contender is a process that stays, so a disturbance affects all alike.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.loader.data import Workload
from benchmarks.loader.processes import Daemon, Memory, cpu_s, family

Result = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """One way of reading.

    Attributes:
        label: its name in tables.
        kind: `gyre`, or of the opponents.
        num_workers: of the DataLoader.
        num_jobs: at once.
        same_seed: all jobs read the same order.
        token_dtype: dtype of Gyre's unsigned token ids.
    """

    label: str
    kind: str
    num_workers: int = 0
    num_jobs: int = 1
    same_seed: bool = False
    token_dtype: str = "int64"


@dataclass
class Entry:
    """A contender with its processes and their results.

    Attributes:
        contender: its contender.
        results: one per round, by workload.
        python: interpreter of its jobs.
        root: of the checkout that its jobs are of; None for this one.
    """

    contender: Contender
    results: dict[str, list[Result]] = field(default_factory=lambda: defaultdict(list))
    python: str = sys.executable
    root: Path | None = None
    _jobs: list["subprocess.Popen[str]"] = field(default_factory=list)
    _words: IO[bytes] = field(default_factory=tempfile.TemporaryFile)  # on standard error
    # some leave locks behind
    _folder: "tempfile.TemporaryDirectory[str]" = field(default_factory=tempfile.TemporaryDirectory)

    def start(self, address: str) -> None:
        """Start the processes, which then wait."""
        task = asdict(self.contender) | {"address": address}
        for _ in range(self.contender.num_jobs):
            command = [self.python, "-W", "ignore", "-m", "benchmarks.loader.readers"]
            pipe = subprocess.PIPE
            environment = {**os.environ, "TMPDIR": self._folder.name}
            job = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=self._words,
                text=True,
                env=environment,
                cwd=self.root,
            )
            self._jobs.append(job)
            self._say(job, task)

    def await_start(self) -> None:
        """Wait until the processes are ready."""
        for job in self._jobs:
            self._hear(job)

    def run(self, workload: Workload, round_: int, duration_s: float, server: Daemon) -> Result:
        """One round: all jobs open, read at the same time, and close; the page cache is hot."""
        workload.read_files()
        seeds = [100 * round_ + (0 if self.contender.same_seed else 7 * n) for n in self._numbers]
        openings = self._tell_all([["open", asdict(workload), seed] for seed in seeds])
        daemon_before, began = cpu_s(server.pids), time.perf_counter()
        runs = self._tell_all([["run", duration_s] for _ in self._numbers])
        elapsed_s, daemon_cpu_s = time.perf_counter() - began, cpu_s(server.pids) - daemon_before
        rates = [run["samples_per_s"] for run in runs]
        pids = [pid for job in self._jobs for pid in family(job.pid)]
        memory = Memory.of([*pids, *server.pids] if self.contender.kind == "gyre" else pids)
        self._tell_all([["close"] for _ in self._numbers])
        mean = statistics.mean(rates)
        result: Result = {
            "samples_per_s": mean,
            "slowest": min(rates) / mean,
            "fastest": max(rates) / mean,
            "first_batch_s": statistics.mean(opening["first_batch_s"] for opening in openings),
            "cpu_s_per_1000": statistics.mean(run["cpu_s_per_1000"] for run in runs),
            "faults_per_1000": statistics.mean(run["faults_per_1000"] for run in runs),
            "daemon_cpu_s_per_1000": daemon_cpu_s / (sum(rates) * elapsed_s) * 1000,
            "own_bytes": memory.own_bytes,
            "file_bytes": memory.file_bytes,
        }
        self.results[workload.name].append(result)
        return result

    def stop(self) -> None:
        """End the processes."""
        for job in self._jobs:
            if job.stdin:
                job.stdin.close()
        for job in self._jobs:
            job.wait(30)
            if job.stdout:
                job.stdout.close()
        self._jobs.clear()
        self._words.close()
        self._folder.cleanup()

    def median(self, workload: Workload) -> Result:
        """The median of each figure over the rounds."""
        results = self.results[workload.name]
        return {key: statistics.median(result[key] for result in results) for key in results[0]}

    @property
    def _numbers(self) -> range:
        return range(len(self._jobs))

    def _tell_all(self, commands: Sequence[object]) -> list[Result]:
        for job, command in zip(self._jobs, commands, strict=True):
            self._say(job, command)
        return [self._hear(job) for job in self._jobs]

    def _say(self, job: "subprocess.Popen[str]", what: object) -> None:
        assert job.stdin
        job.stdin.write(json.dumps(what) + "\n")
        job.stdin.flush()

    def _hear(self, job: "subprocess.Popen[str]") -> Result:
        assert job.stdout
        line = job.stdout.readline()
        if not line:
            self._words.seek(0)
            raise RuntimeError(
                f"{self.contender.label} ended with status "
                f"{job.wait(10)}:\n{self._words.read().decode()[-2000:]}"
            )
        answer: Result = json.loads(line)
        return answer


def race(
    sets: Sequence[Workload],
    contenders: Sequence[Contender],
    server: Daemon,
    num_rounds: int,
    duration_s: float,
) -> dict[str, dict[Contender, Result]]:
    """The medians of all contenders by workload; round by round, one contender after the other."""
    entries = [Entry(contender) for contender in contenders]
    try:
        for entry in entries:
            entry.start(server.address)
        for entry in entries:
            entry.await_start()
        for workload in sets:
            for round_ in range(num_rounds):
                for entry in entries:
                    rate = entry.run(workload, round_, duration_s, server)["samples_per_s"]
                    turn = f"round {round_ + 1} of {num_rounds}"
                    about = f"{workload.name}  {turn}  {entry.contender.label:42}"
                    print(f"  {about} {rate:>12,.0f} samples/s", file=sys.stderr, flush=True)
    finally:
        for entry in entries:
            entry.stop()
    return {
        workload.name: {entry.contender: entry.median(workload) for entry in entries}
        for workload in sets
    }
