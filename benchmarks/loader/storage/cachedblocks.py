"""Processor time of reading through the node cache, beside another checkout of the daemon.

    python -m benchmarks.loader.storage.cachedblocks --before CHECKOUT

Every sample is a block of its own, which a source copies from memory: what is left is the cache. In
each round both checkouts read three shuffled epochs, one after the other, in a new process. In the
first epoch blocks are admitted, and where the cache is smaller than the samples, evicted. It prints
medians, and the median of the rounds' ratios: above 1, this checkout is faster.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[3]
# samples, bytes of each, the part of them that the cache holds
CASES = {
    "4 KiB, all held": (4000, 4096, 1.1),
    "4 KiB, half held": (4000, 4096, 0.5),
    "66 KiB, all held": (1500, 67536, 1.1),
    "256 KiB, half held": (500, 262144, 0.5),
}
PROGRAM = """
import asyncio, ctypes, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.cache.node import NodeCache

n, size, share = {case!r}
batch = 256

class Source:
    is_node_local = False

    async def read(self, plan):
        for target, num_bytes in zip(plan.target.tolist(), plan.size.tolist()):
            ctypes.memmove(target, data.ctypes.data, num_bytes)

data = np.zeros(size, np.uint8)

class Job:
    order = np.random.default_rng(0).permutation(n)
    places = np.argsort(order)
    position = 0

    def next_use(self, _, ids):
        return (self.places[ids] - self.position) % n

async def main():
    start = np.arange(n) * size
    blocks = BlockMap(np.zeros(n, np.int64), start, start + size)
    out, job = np.empty(batch * size, np.uint8), Job()
    with ThreadPoolExecutor(2) as threads:
        held = int(-(-size // 4096) * 4096 * n * share) + 4096
        node = NodeCache(held, None, FairExecutor(threads, 2), CacheCounts())
        view = await node.open_volume("x", Source(), blocks, size)
        for epoch in range(3):
            began = time.process_time()
            for job.position in range(0, n, batch):
                ids = job.order[job.position:job.position + batch]
                k = len(ids)
                targets = (out.ctypes.data + np.arange(k) * size).astype(np.uint64)
                reads = Reads(np.zeros(k, np.int64), start[ids], np.full(k, size), targets,
                              np.arange(k), (out,), next_use=job.next_use)
                await node.read(view, reads)
            print(n / (time.process_time() - began))

asyncio.run(main())
"""


def rates(checkout: Path, case: tuple[int, int, float]) -> list[float]:
    """Samples per second of processor time, of each epoch."""
    paths = ":".join(str(checkout / each) for each in ("daemon", "common", "protos"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(case=case)],
        env={"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [float(line) for line in done.stdout.split()]


def main() -> None:
    """Print a row for each case and epoch."""
    parser = argparse.ArgumentParser(description="Compare the node cache of two checkouts.")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the daemon")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print("| blocks | epoch | samples per CPU s, before | now | now / before |")
    print("|---|---:|---:|---:|---:|", flush=True)
    for name, case in CASES.items():
        sides = (args.before.resolve(), HERE)
        rounds = [[rates(side, case) for side in sides] for _ in range(args.rounds)]
        for epoch in (0, 1, 2):
            before, now = ([each[side][epoch] for each in rounds] for side in (0, 1))
            ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
            medians = f"{statistics.median(before):,.0f} | {statistics.median(now):,.0f}"
            print(f"| {name} | {epoch + 1} | {medians} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
