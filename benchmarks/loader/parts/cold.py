"""Samples/s from cold and hot local files, with and without announcing reads to the kernel.

`python -m benchmarks.loader.parts.cold [FOLDER]`

FOLDER must be on a real disk; the benchmark mostly measures that disk.
"""

import asyncio
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import stat_shard
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.sources.local import LocalStorage, ReadAhead

FILE_BYTES = 1 << 30
JOB_BYTES = 4 << 20
NUM_THREADS = 4
NUM_ROUNDS = 3


class Silent(ReadAhead):
    """Announces nothing, so each missing page is read by itself."""

    def announce(self, *_: object) -> int:
        return 0


class ByThePage(ReadAhead):
    """Announces single pages, as for a dataset that does not fit into memory."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__(shards)
        self.grain_bytes = mmap.PAGESIZE


WAYS = {"silent": Silent, "by the page": ByThePage, "by the grain": ReadAhead}


def main() -> None:
    """Print samples/s in random order: a twentieth of a cold epoch, all of it, a hot one."""
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.NamedTemporaryFile(prefix="gyre-cold-", dir=folder) as file:
        for seed in range(FILE_BYTES >> 24):
            file.write(np.random.default_rng(seed).bytes(1 << 24))
        os.fsync(file.fileno())
        print(
            "bytes per sample   announced      cold, first 5 %    ratio   cold, all    ratio     "
            "   hot    ratio"
        )
        for size in (2048, 10 << 10, 100 << 10):
            rates = compare(Path(file.name), size)
            for way, its in rates.items():
                pairs = zip(its, rates["silent"], strict=True)
                print(
                    f"{size:16}   {way:12}",
                    *(f"{rate:13,.0f} {rate / base:6.2f}" for rate, base in pairs),
                    flush=True,
                )


def compare(path: Path, size: int) -> dict[str, list[float]]:
    """Return the medians of interleaved rounds for each way.

    Each has three: the first part of a cold epoch, all of it, a hot epoch.
    """
    rates: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for _ in range(NUM_ROUNDS):
        for way, kind in WAYS.items():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            first, whole = asyncio.run(epoch(path, size, kind))
            _, hot = asyncio.run(epoch(path, size, kind))
            rates[way].append((first, whole, hot))
    return {
        way: [statistics.median(column) for column in zip(*its, strict=True)]
        for way, its in rates.items()
    }


async def epoch(path: Path, size: int, kind: type[ReadAhead]) -> tuple[float, float]:
    """Return samples/s over the first twentieth and over all, with four jobs in flight."""
    num_samples = FILE_BYTES // size
    starts = np.random.default_rng(0).permutation(num_samples) * size
    per_job = JOB_BYTES // size
    jobs = iter(enumerate(range(0, num_samples, per_job)))
    began, ends = time.perf_counter(), []
    with ThreadPoolExecutor(NUM_THREADS) as executor:
        file = LocalFile.of(path)
        shard = stat_shard(file, "0")
        storage = LocalStorage([file], [shard], FairExecutor(executor, NUM_THREADS), Metrics())
        storage._ahead = kind([shard])

        async def work() -> None:
            memory = np.zeros(per_job * size, np.uint8)
            for _, begin in jobs:
                start = starts[begin : begin + per_job]
                target = (memory.ctypes.data + np.arange(len(start)) * size).astype(np.uint64)
                zeros = np.zeros(len(start), np.int64)
                await storage.read(
                    Reads(
                        zeros,
                        start,
                        np.full(len(start), size),
                        target,
                        np.arange(len(start)),
                        (memory,),
                    )
                )
                ends.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_THREADS):
                group.create_task(work())
    twentieth = len(ends) // 20 + 1
    return twentieth * per_job / ends[twentieth - 1], num_samples / ends[-1]


if __name__ == "__main__":
    main()
