"""A process that reads: `python -m benchmarks.loader.readers`.

It receives commands as lines of JSON and answers each with one line. It touches every cache line of
every batch, as a copy to a device would.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.loader import libraries
from benchmarks.loader.data import Workload
from benchmarks.loader.processes import cpu_s, family, page_faults

CACHE_LINE_BYTES = 64
WARMUP = "one second and one more for each job, five at most"
ROUND_BATCHES = 4  # between two looks at the clock


def warmup_s(num_jobs: int) -> float:
    """How long jobs that begin together read before they are measured.

    At first memory is new, and workers fetch ahead.
    """
    return 1.0 + min(num_jobs, 4)


def touch(batch: torch.Tensor) -> None:
    """Read eight bytes of every cache line, as fast as we know how.

    A strided sum of bytes takes longer than the lines do.
    """
    memory = batch.numpy().reshape(-1).view(np.uint8)
    np.add.reduce(
        memory[: len(memory) & -CACHE_LINE_BYTES].view(np.int64)[:: CACHE_LINE_BYTES // 8]
    )
    memory[-1]  # of an incomplete line


class Reader:
    """One job that reads, over and over."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._kind: str = task["kind"]
        self._token_dtype: str = task["token_dtype"]
        self._num_workers: int = task["num_workers"]
        self._warmup_s = warmup_s(task["num_jobs"])
        self._address: str = task["address"]
        self._batches: libraries.Batches = iter(())
        self._batch_size = 0
        self._import()

    def open(self, fields: dict[str, Any], seed: int) -> dict[str, float]:
        """Begin to read a workload in an order.

        Returns the time to the first batch, from nothing but imported modules.
        """
        workload = Workload(**fields)
        self._batch_size = workload.batch_size
        began = time.perf_counter()
        if self._kind == "gyre":
            self._batches = libraries.gyre(
                workload, self._address, seed, token_dtype=self._token_dtype
            )
        else:
            self._batches = libraries.OPPONENTS[self._kind](workload, self._num_workers, seed)
        touch(next(self._batches))
        return {"first_batch_s": time.perf_counter() - began}

    def run(self, duration_s: float) -> dict[str, float]:
        """Read for `duration_s`.

        Returns:
            samples_per_s, and of this process and its children cpu_s_per_1000 and faults_per_1000.
        """
        self._read(self._warmup_s)
        pids = family(os.getpid())
        cpu_before, faults_before = cpu_s(pids), page_faults(pids)
        num_batches, elapsed_s = self._read(duration_s)
        num_samples = num_batches * self._batch_size
        cpu, faults = cpu_s(pids) - cpu_before, page_faults(pids) - faults_before
        return {
            "samples_per_s": num_samples / elapsed_s,
            "cpu_s_per_1000": cpu / num_samples * 1000,
            "faults_per_1000": faults / num_samples * 1000,
        }

    def close(self) -> dict[str, float]:
        """Stop reading."""
        libraries.close(self._batches)
        return {}

    def _read(self, duration_s: float) -> tuple[int, float]:
        num_batches, began = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began) < duration_s:
            for _ in range(ROUND_BATCHES):
                touch(next(self._batches))
            num_batches += ROUND_BATCHES
        return num_batches, elapsed_s

    def _import(self) -> None:
        """Import the loader's modules, which is not part of its time to the first batch."""
        if self._kind == "gyre":
            import gyre_client.loader.loader  # noqa: F401, PLC0415
        elif self._kind == "mosaic":
            import benchmarks.loader.mosaic  # noqa: F401, PLC0415
        elif self._kind == "webdataset":
            import webdataset  # noqa: F401, PLC0415
        elif self._kind == "stateful":
            import torchdata.stateful_dataloader  # noqa: F401, PLC0415


def main() -> None:
    """Run commands until the standard input ends. The first line names the loader."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    reader = Reader(json.loads(sys.stdin.readline()))
    answer: dict[str, float] = {}
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        commands: dict[str, Callable[..., dict[str, float]]] = {
            "open": reader.open,
            "run": reader.run,
            "close": reader.close,
        }
        answer = commands[command](*arguments)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # workers need no farewell


if __name__ == "__main__":
    main()
