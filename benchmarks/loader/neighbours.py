"""What a fast job loses beside a slow or a stopped one: `python -m benchmarks.loader.neighbours [--out STEM]`.

The neighbour reads the same order, and so the same memory, or another one. Turns alternate: alone, then beside each neighbour.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from gyre_client import Loader

from benchmarks.loader.compare import circumstances
from benchmarks.loader.data import SEQUENCE_LENGTH, write_tokens
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, daemon

BATCH_SIZE, NUM_SAMPLES = 64, 100_000
SEED = 5
NUM_FIRST = 5  # batches that a neighbour that stops has read


@dataclass(frozen=True)
class Neighbour:
    """Who else reads.

    Attributes:
        about: for the table.
        seed: SEED for the fast job's order.
        pause_s: after each batch; None to stop after a few.
    """

    about: str
    seed: int
    pause_s: float | None


NEIGHBOURS = (
    Neighbour("same order, stopped", SEED, None),
    Neighbour("same order, 100 batches/s", SEED, 0.01),
    Neighbour("another order, stopped", SEED + 1, None),
    Neighbour("another order, 100 batches/s", SEED + 1, 0.01),
)


def live_beside(neighbour: Neighbour, address: str, pipe: Connection) -> None:
    """Read as the neighbour does until the other end of the pipe says something."""
    torch.set_num_threads(1)
    with Loader("tokens", batch_size=BATCH_SIZE, seed=neighbour.seed, address=address, job="neighbour") as loader:
        for _ in range(NUM_FIRST):
            next(iter(loader))
        pipe.send("reading")
        while not pipe.poll(neighbour.pause_s):
            if neighbour.pause_s is not None:
                next(iter(loader))


def read_fast(address: str, duration_s: float) -> float:
    """Samples/s of a job that reads as fast as it can, and touches every cache line."""
    with Loader("tokens", batch_size=BATCH_SIZE, seed=SEED, address=address, job="fast") as loader:
        for _ in range(NUM_FIRST):
            next(iter(loader))
        num_batches, began = 0, time.perf_counter()
        while time.perf_counter() - began < duration_s:
            for _ in range(16):
                next(iter(loader))["tokens"].view(-1)[::16].sum()
            num_batches += 16
        return num_batches * BATCH_SIZE / (time.perf_counter() - began)


def measure(server: Daemon, num_rounds: int, duration_s: float) -> dict[str, list[float]]:
    """Rates of the fast job, by what is beside it."""
    context = multiprocessing.get_context("spawn")
    rates: dict[str, list[float]] = {"nobody": [], **{neighbour.about: [] for neighbour in NEIGHBOURS}}
    for round_ in range(num_rounds):
        rates["nobody"].append(read_fast(server.address, duration_s))
        for neighbour in NEIGHBOURS:
            mine, theirs = context.Pipe()
            process = context.Process(target=live_beside, args=(neighbour, server.address, theirs))
            process.start()
            mine.recv()
            rates[neighbour.about].append(read_fast(server.address, duration_s))
            mine.send("enough")
            process.join()
        print(f"round {round_ + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return rates


def report(rates: dict[str, list[float]], server: Daemon) -> list[str]:
    """A table, as Markdown."""
    rows = []
    for about, found in rates.items():
        ratios = [rate / alone for rate, alone in zip(found, rates["nobody"], strict=True)]
        rows.append((about, f"{statistics.median(found):,.0f}", f"{statistics.median(ratios):.2f}"))
    memory = f"The daemon's memory was at most {server.peak_bytes >> 20} MiB, of a budget of {server.budget_bytes >> 20} MiB."
    return [*table(("beside", "fast job, samples/s", "to alone"), rows), "", memory, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table or write it where `--out` says."""
    parser = argparse.ArgumentParser(description="What a fast job loses beside a slow or a stopped one.")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.md")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        path = Path(name) / "tokens.bin"
        write_tokens(path, NUM_SAMPLES * SEQUENCE_LENGTH)
        config = {"uri": str(path), "format": "tokens", "dtype": "int32", "sequence_length": SEQUENCE_LENGTH}
        with daemon(Path(name), {"tokens": config}) as server:
            rates = measure(server, parsed.rounds, parsed.seconds)
        lines = report(rates, server)
    if parsed.out:
        command = f"python -m benchmarks.loader.neighbours {' '.join(sys.argv[1:])}"
        Path(f"{parsed.out}.md").write_text("\n".join(["# Slow neighbours", "", *circumstances(command), "", *lines]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
