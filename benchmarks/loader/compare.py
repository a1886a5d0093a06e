"""Gyre beside the DataLoader: same data, same machine, one run, rounds interleaved; ratios of medians.

python -m benchmarks.loader.compare [--full] [--save docs/benchmarks/NAME.md]
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.loader.data import Workload, shards, tokens


@dataclass(frozen=True)
class Contender:
    """One way to read.

    Attributes:
        label: for the table.
        kind: of reader.
        num_workers: of the DataLoader.
        num_jobs: at once.
        same_seed: the jobs read the same order.
    """

    label: str
    kind: str
    num_workers: int = 0
    num_jobs: int = 1
    same_seed: bool = True


CONTENDERS = (
    Contender("DataLoader, in process", "torch"),
    Contender("DataLoader, 2 workers", "torch", num_workers=2),
    Contender("Gyre, 1 job", "gyre"),
    Contender("DataLoader, in process, each of 4 jobs", "torch", num_jobs=4, same_seed=False),
    Contender("DataLoader, 2 workers, each of 4 jobs", "torch", num_workers=2, num_jobs=4, same_seed=False),
    Contender("Gyre, each of 4 jobs", "gyre", num_jobs=4, same_seed=False),
)


@contextmanager
def daemon(folder: Path, workloads: list[Workload]) -> Iterator[tuple[str, int]]:
    """A daemon that serves all workloads: its address and process."""
    lines = [f'listen = ["unix:{folder}/gyre.sock"]', f'index_dir = "{folder}/index"']
    for workload in workloads:
        lines += [f"[datasets.{workload.name}]", *(f"{key} = {json.dumps(value)}" for key, value in workload.config.items())]
    (folder / "gyre.toml").write_text("\n".join(lines))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gyre_daemon", "serve", "--config", str(folder / "gyre.toml")], stderr=log
        )
    try:
        while "ready" not in (folder / "log").read_text():
            time.sleep(0.05)
        yield f"unix:{folder}/gyre.sock", process.pid
    finally:
        process.terminate()
        process.wait(30)


def run(contender: Contender, workload: Workload, address: str, duration_s: float, round_: int) -> dict[str, float]:
    """The mean of a contender's jobs, all reading at once."""
    task: dict[str, Any] = {
        "kind": contender.kind,
        "name": workload.name,
        "config": workload.config,
        "batch_size": workload.batch_size,
        "num_workers": contender.num_workers,
        "address": address,
        "warmup_s": 0.5,
        "duration_s": duration_s,
    }
    jobs = []
    for job in range(contender.num_jobs):
        seed = round_ * 100 + (0 if contender.same_seed else job)
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loader.readers", json.dumps(task | {"seed": seed})]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
    results = [json.loads(job.communicate(timeout=120)[0]) for job in jobs]
    return {key: statistics.mean(result[key] for result in results) for key in results[0]}


def compare(workload: Workload, address: str, daemon_pid: int, num_rounds: int, duration_s: float) -> list[str]:
    """The table of one workload, as Markdown."""
    rounds: dict[str, list[dict[str, float]]] = {contender.label: [] for contender in CONTENDERS}
    for round_ in range(num_rounds):
        for contender in CONTENDERS:
            before = psutil.Process(daemon_pid).cpu_times()
            result = run(contender, workload, address, duration_s, round_)
            after = psutil.Process(daemon_pid).cpu_times()
            daemon_cpu_s = after.user + after.system - before.user - before.system
            total = result["samples_per_s"] * (duration_s + 0.5) * contender.num_jobs
            result["daemon_cpu_s_per_1000"] = daemon_cpu_s / total * 1000
            rounds[contender.label].append(result)
            print(f"  round {round_ + 1}  {contender.label:40} {result['samples_per_s']:>12,.0f} samples/s", file=sys.stderr)
    return table(workload, rounds)


def table(workload: Workload, rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """Medians, and the ratio to the best DataLoader setting with as many jobs."""
    medians: dict[str, dict[str, float]] = {
        label: {key: statistics.median(result[key] for result in results) for key in results[0]}
        for label, results in rounds.items()
    }
    columns = (
        "loader",
        "samples/s per job",
        "to the best DataLoader",
        "first batch, s",
        "CPU s per 1000, job",
        "CPU s per 1000, daemon",
        "resident, MiB per job",
    )
    lines = [
        f"\n### {workload.name}: {workload.about}, batch {workload.batch_size}\n",
        f"| {' | '.join(columns)} |",
        f"|---|{'---:|' * (len(columns) - 1)}",
    ]
    for contender in CONTENDERS:
        rivals = [other for other in CONTENDERS if other.kind == "torch" and other.num_jobs == contender.num_jobs]
        best = max(medians[rival.label]["samples_per_s"] for rival in rivals)
        its = medians[contender.label]
        cells = (
            contender.label,
            f"{its['samples_per_s']:,.0f}",
            f"{its['samples_per_s'] / best:.2f}",
            f"{its['first_batch_s']:.2f}",
            f"{its['cpu_s_per_1000']:.4f}",
            f"{max(its['daemon_cpu_s_per_1000'], 0):.4f}",
            f"{its['rss_bytes'] / 2**20:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Compare on all workloads and print, or save, the tables."""
    parser = argparse.ArgumentParser(description="Gyre's loader beside the DataLoader.")
    parser.add_argument("--full", action="store_true", help="three longer rounds instead of one short one")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tables there")
    parsed = parser.parse_args()
    num_rounds, duration_s = (3, 3.0) if parsed.full else (1, 2.0)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        folder = Path(name)
        workloads = [
            tokens(folder, 200_000),
            shards(folder, "S10k", 32_000, 10 << 10),
            shards(folder, "S100k", 4_800, 100 << 10),
        ]
        lines = [
            "# The loader beside the DataLoader",
            f"\n{datetime.date.today()}, `python -m benchmarks.loader.compare {' '.join(sys.argv[1:])}`,",
            f"{os.cpu_count()} cores, Python {platform.python_version()}, page cache hot, medians of",
            f"{num_rounds} interleaved rounds of {duration_s:g} s. Every reader touches every cache line.",
            f"Load average at the start: {os.getloadavg()[0]:.1f}.",
        ]
        with daemon(folder, workloads) as (address, pid):
            for workload in workloads:
                lines += compare(workload, address, pid, num_rounds, duration_s)
    text = "\n".join(lines) + "\n"
    print(text)
    if parsed.save:
        parsed.save.write_text(text)


if __name__ == "__main__":
    main()
