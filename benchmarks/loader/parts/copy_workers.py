"""The gain of copy workers: `python -m benchmarks.loader.parts.copy_workers [--rounds 5]`.

Two daemons serve the same files. One has copy workers; in the other, threads let the kernel copy.
Jobs of both read in turns, with a hot page cache. CPU time is that of the job, and that of the
daemon with its copy workers.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.loader.data import FULL, Workload, workloads
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, daemon
from benchmarks.loader.race import Contender, Entry

JOBS = (1, 4)
WAYS = {"copy workers": 4, "the kernel": 0}


def compare(
    folder: Path, loads: Sequence[Workload], num_rounds: int, duration_s: float
) -> list[str]:
    """A table, as Markdown: medians over the rounds."""
    configs = {load.name: load.config for load in loads}
    rows = []
    with ExitStack() as stack:
        servers = {
            way: stack.enter_context(daemon(folder, configs, more=[f"num_copy_workers = {num}"]))
            for way, num in WAYS.items()
        }
        for num_jobs in JOBS:
            entries = _measure(servers, loads, num_jobs, num_rounds, duration_s)
            for load in loads:
                rows += [
                    (f"{load.name}, {num_jobs} job{'s, an order each' * (num_jobs > 1)}", *row)
                    for row in _rows(entries, load)
                ]
    return table(
        (
            "workload",
            "copied by",
            "samples/s per job",
            "quartiles",
            "CPU s per 1000, job",
            "CPU s per 1000, daemon",
        ),
        rows,
    )


def _measure(
    servers: dict[str, Daemon],
    loads: Sequence[Workload],
    num_jobs: int,
    num_rounds: int,
    duration_s: float,
) -> dict[str, Entry]:
    entries = {way: Entry(Contender(way, "gyre", num_jobs=num_jobs)) for way in servers}
    for way, entry in entries.items():
        entry.start(servers[way].address)
    for entry in entries.values():
        entry.await_start()
    for round_ in range(num_rounds):
        for load in loads:
            for way, entry in entries.items():
                result = entry.run(load, round_, duration_s, servers[way])
                print(
                    f"  {load.name}, {num_jobs} jobs, {way}: {result['samples_per_s']:,.0f}",
                    file=sys.stderr,
                    flush=True,
                )
    for entry in entries.values():
        entry.stop()
    return entries


def _rows(entries: dict[str, Entry], load: Workload) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for way, entry in entries.items():
        results = entry.results[load.name]
        low, middle, high = statistics.quantiles(
            [result["samples_per_s"] for result in results], n=4
        )
        job, server = (
            statistics.median(result[key] for result in results)
            for key in ("cpu_s_per_1000", "daemon_cpu_s_per_1000")
        )
        rows.append(
            (way, f"{middle:,.0f}", f"{low:,.0f}-{high:,.0f}", f"{job:.4f}", f"{server:.4f}")
        )
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each workload")
    parser.add_argument(
        "--duration", type=float, default=1.0, metavar="SECONDS", help="of each round"
    )
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        print(
            "\n".join(
                compare(Path(name), workloads(Path(name), FULL), parsed.rounds, parsed.duration)
            )
        )


if __name__ == "__main__":
    main()
