"""How much longer a run takes when its daemon is upgraded meanwhile.

    python -m benchmarks.loader.upgrade [--seconds 30] [--step-ms 50] [--rounds 3]

A run is a paced trainer: a batch, then a pause as long as a step. In every second run the daemon is
drained with SIGTERM in the middle and started again, as `systemctl restart` does it; the other run
is undisturbed. The batches of both are compared.
"""

import argparse
import statistics
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gyre_client import Loader

from benchmarks.loader.data import SHORT, tokens
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import load_average
from benchmarks.loader.restarts import BATCH_SIZE, daemon, start


@dataclass
class Run:
    """One run of a paced trainer.

    Attributes:
        total_s: from its first step's end to its last.
        waits_s: for the batch of each step.
        ids: of each batch.
    """

    total_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)


def train(address: str, num_steps: int, step_s: float) -> Run:
    """Read and pause, step by step."""
    run = Run()
    with Loader("T", address=address, batch_size=BATCH_SIZE, seed=1) as loader:
        stream = loader.stream()
        next(stream)
        began_s = time.monotonic()
        for _ in range(num_steps):
            asked_s = time.monotonic()
            batch = next(stream)
            run.waits_s.append(time.monotonic() - asked_s)
            run.ids.append(batch["sample_id"].numpy().copy())
            time.sleep(step_s)
        run.total_s = time.monotonic() - began_s
    return run


def upgrade(
    folder: Path, processes: "list[subprocess.Popen[bytes]]", after_s: float, away_s: list[float]
) -> None:
    """Drain and replace the daemon after a while; note how long none was there."""
    time.sleep(after_s)
    processes[0].terminate()
    processes[0].wait(60)
    began_s = time.monotonic()
    log = folder / "log"
    begin = log.stat().st_size
    processes[0] = start(folder)
    while b'"ready"' not in log.read_bytes()[begin:]:
        time.sleep(0.01)
    away_s.append(time.monotonic() - began_s)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"load average at the start: {load_average():.1f}\n")
    step_s = args.step_ms / 1000
    num_steps = round(args.seconds / step_s)
    undisturbed: list[Run] = []
    upgraded: list[Run] = []
    away_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gyre-") as name:
        folder = Path(name)
        with daemon(folder, tokens(folder, SHORT.tokens)) as (address, processes):
            for _ in range(args.rounds):
                undisturbed.append(train(address, num_steps, step_s))
                replacing = threading.Thread(
                    target=upgrade, args=(folder, processes, args.seconds / 2, away_s)
                )
                replacing.start()
                upgraded.append(train(address, num_steps, step_s))
                replacing.join()
    rows = [
        (
            what,
            f"{statistics.median(run.total_s for run in runs):.2f}",
            f"{max(run.total_s for run in runs):.2f}",
            f"{statistics.median(max(run.waits_s) for run in runs) * 1000:.0f}",
        )
        for what, runs in (("undisturbed", undisturbed), ("daemon upgraded", upgraded))
    ]
    print(
        "\n".join(table((f"{num_steps} steps", "median, s", "worst, s", "longest wait, ms"), rows))
    )
    num_wrong = sum(
        not np.array_equal(one, other)
        for run in (*undisturbed, *upgraded)
        for one, other in zip(run.ids, undisturbed[0].ids, strict=True)
    )
    print(f"\nno daemon for {statistics.median(away_s):.2f} s in the median")
    print(f"{num_wrong} of {2 * args.rounds * num_steps:,} batches differ between the runs")


if __name__ == "__main__":
    main()
