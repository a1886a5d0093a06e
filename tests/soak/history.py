"""JSON lines: one file for each rank and one for the driver.

Every line has `n`, its number in its file, over all processes that wrote there; `t`, seconds of the
monotonic clock, which all processes of a machine share; and `event`, with the keys:

driver.jsonl
    plan        jobs; budget_bytes of each daemon; seed
    base        daemon, and what it has after its first sessions have ended: `memory_bytes` of its
                own, `descriptors`, mapped `arenas`, `reserved_bytes`, `abandoned_bytes`, `sessions`
    fault       name
    stopped     daemon, status: the exit status after SIGTERM
    mended      name, what: the fault is over, and what it was done to
    running     every rank has taken a batch since the fault was mended
    memory      daemon, memory_bytes
    idle        like base, after all ranks have ended
    left        processes, files: what remains when everything was stopped

JOB.RANK.jsonl
    begin       step: a process, or after an error a new Loader, begins there
    batch       step, digest
    checkpoint  step: where this checkpoint resumes; it replaces the one before it
    error       step, error: the class of the error, where a batch of that step was asked for
    end         step: the rank has read all steps before this one
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DRIVER = "driver.jsonl"

Line = dict[str, Any]


class Writer:
    """Appends lines to a file, and goes on with the numbers of those that are there."""

    def __init__(self, path: Path) -> None:
        """Opens the file for appending."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._next = path.read_bytes().count(b"\n")

    def write(self, event: str, **facts: object) -> None:
        """Writes a line with one system call, so that a kill leaves it whole or out."""
        line = {"n": self._next, "t": round(time.monotonic(), 4), "event": event, **facts}
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._next += 1

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def read(path: Path) -> Iterator[Line]:
    """Yields the lines of a file."""
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def of_rank(job: str, rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"{job}.{rank}.jsonl"
