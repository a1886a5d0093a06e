"""The cost of planning batches of a plain dataset, next to another checkout of the daemon.

    python -m benchmarks.loader.parts.planning --before CHECKOUT

Each round plans the same steps in a new process of either checkout, one after the other, and takes
processor time. It prints the medians' ratio: below 1, this checkout is faster.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[3]
CASES = {
    "full, batch 64, 8 ranks, 64 steps at once": ("full", 10_000_000, 64, 8, 64),
    "full, batch 64, 1 rank, step by step": ("full", 10_000_000, 64, 1, 1),
    "full, batch 4096, 1 rank, 8 steps at once": ("full", 10_000_000, 4096, 1, 8),
    "full, many epochs in a group": ("full", 1_000, 64, 1, 64),
    "sequential, batch 64, 64 steps at once": ("sequential", 10_000_000, 64, 1, 64),
}
PROGRAM = """
import time
from gyre_daemon.order.planner import BatchPlanner, Order
mode, num_samples, size, num_ranks, together = {case!r}
planner = BatchPlanner(Order(mode, "wrap", 7, size), num_samples)
num_calls = max(20, {positions} * num_ranks // (size * together))
for step in range(10):
    planner.batches(step * together, together, 0, num_ranks)
began = time.process_time()
for step in range(num_calls):
    planner.batches(step * together, together, 0, num_ranks)
print((time.process_time() - began) / num_calls / together * 1e6)
"""


def step_us(checkout: Path, case: tuple[str, int, int, int, int], positions: int) -> float:
    """Processor time of one step, in microseconds."""
    program = PROGRAM.format(case=case, positions=positions)
    paths = f"{checkout / 'daemon'}:{checkout / 'common'}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description="Compare the planning of two checkouts.")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the daemon")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--positions", type=int, default=500_000, help="planned in each round")
    args = parser.parse_args()
    print("| order | before, us of CPU a step | now | ratio of medians |\n|---|---|---|---|")
    for name, case in CASES.items():
        before, now = [], []
        for _ in range(args.rounds):
            before.append(step_us(args.before.resolve(), case, args.positions))
            now.append(step_us(HERE, case, args.positions))
        medians = statistics.median(before), statistics.median(now)
        print(f"| {name} | {medians[0]:.1f} | {medians[1]:.1f} | {medians[1] / medians[0]:.2f} |")


if __name__ == "__main__":
    main()
