"""The cost of more sessions: `python -m benchmarks.loader.parts.sessions`.

At most eight processes, each with its sessions in turn. They read turn after turn until the
daemon's memory has stopped growing; the last turn counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.loader.data import SHORT, Workload, tokens
from benchmarks.loader.libraries import Batches, gyre
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, daemon
from benchmarks.loader.readers import touch

MAX_PROCESSES = 8
MAX_TURNS = 20
BUDGET_BYTES = 5 << 30  # the daemon's default is 1 GiB; 64 sessions of default size want more
BRIEF_COUNTS = (1, 8, 64)
FULL_COUNTS = (1, 2, 4, 8, 16, 32, 64)
ROUND_BATCHES = 8  # of one session before the next one's turn


@dataclass(frozen=True)
class Crowd:
    """The result of a number of sessions at once.

    Attributes:
        num_sessions: open and reading.
        same_order: all of them read one order, otherwise each its own.
        samples_per_s: in sum.
        slowest: samples/s of the slowest process, divided by the mean.
        daemon_bytes: the daemon's own memory.
    """

    num_sessions: int
    same_order: bool
    samples_per_s: float
    slowest: float
    daemon_bytes: int


def report(crowds: Sequence[Crowd]) -> list[str]:
    """A table, as Markdown."""
    head = ("sessions", "samples/s in sum", "of each", "slowest to mean", "daemon's memory, MiB")
    rows = [
        (
            f"{its.num_sessions}, {'one order' if its.same_order else 'an order each'}",
            f"{its.samples_per_s:,.0f}",
            f"{its.samples_per_s / its.num_sessions:,.0f}",
            f"{its.slowest:.2f}",
            f"{its.daemon_bytes / 2**20:,.0f}",
        )
        for its in crowds
    ]
    return [*table(head, rows), ""]


def crowd(
    folder: Path, workload: Workload, counts: Sequence[int], duration_s: float
) -> tuple[list[Crowd], Daemon]:
    """Measure these numbers of sessions, one after the other, each on a new daemon."""
    results = []
    with ExitStack() as stack:
        server = stack.enter_context(daemon(folder, {workload.name: workload.config}, BUDGET_BYTES))
        jobs = [
            stack.enter_context(_Job(workload, server.address))
            for _ in range(min(MAX_PROCESSES, max(counts)))
        ]
        for same_order in (True, False):
            for count in counts:
                results.append(
                    _together(
                        jobs[: min(MAX_PROCESSES, count)], count, same_order, duration_s, server
                    )
                )
                rate = results[-1].samples_per_s
                print(
                    f"  {count} sessions  {rate:,.0f} samples/s in sum", file=sys.stderr, flush=True
                )
    return results, server


def _together(
    jobs: Sequence["_Job"], count: int, same_order: bool, duration_s: float, server: Daemon
) -> Crowd:
    share = count // len(jobs)
    for number, job in enumerate(jobs):
        job.say("open", [0 if same_order else number * share + n for n in range(share)])
    for job in jobs:
        job.hear()
    num_bytes = 0
    for _ in range(MAX_TURNS):
        for job in jobs:
            job.say("run", duration_s)
        rates = [job.hear() for job in jobs]
        before, num_bytes = num_bytes, server.memory_bytes()
        # to touch new memory takes seconds, and happens once
        if num_bytes - before < num_bytes // 100:
            break
    for job in jobs:
        job.say("close", None)
    for job in jobs:
        job.hear()
    return Crowd(count, same_order, sum(rates), min(rates) * len(rates) / sum(rates), num_bytes)


class _Job:
    """A process of this module that reads."""

    def __init__(self, workload: Workload, address: str) -> None:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.loader.parts.sessions",
            "--read",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.say("begin", {"workload": asdict(workload), "address": address})

    def __enter__(self) -> "_Job":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate(timeout=30)

    def say(self, command: str, argument: Any) -> None:
        """Send a command."""
        assert self._process.stdin
        print(json.dumps([command, argument]), file=self._process.stdin, flush=True)

    def hear(self) -> float:
        """Return the answer."""
        assert self._process.stdout
        return float(self._process.stdout.readline())


def _read() -> None:
    """Run commands until the standard input ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = json.loads(sys.stdin.readline())[1]
    workload, streams = Workload(**task["workload"]), list[Batches]()
    for line in sys.stdin:
        command, argument = json.loads(line)
        answer = 0.0
        if command == "open":
            streams = [gyre(workload, task["address"], seed) for seed in argument]
            for stream in streams:
                touch(next(stream))
        elif command == "run":
            answer = _rate(streams, argument, workload.batch_size)
        else:
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]  # a generator
        print(answer, flush=True)
    os._exit(0)


def _rate(streams: Sequence[Batches], duration_s: float, batch_size: int) -> float:
    """Samples/s of all streams together."""
    num_batches, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < duration_s:
        for stream in streams:
            for _ in range(ROUND_BATCHES):
                touch(next(stream))
        num_batches += ROUND_BATCHES * len(streams)
    return num_batches * batch_size / elapsed_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="The cost of more sessions.")
    parser.add_argument("--full", action="store_true", help="every power of two")
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.read:
        _read()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        workload = tokens(Path(name), SHORT.tokens)
        print(
            "\n".join(
                report(
                    crowd(Path(name), workload, FULL_COUNTS if parsed.full else BRIEF_COUNTS, 1.0)[
                        0
                    ]
                )
            )
        )


if __name__ == "__main__":
    main()
