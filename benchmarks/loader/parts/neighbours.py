"""The loss of a fast job next to a slow or a stopped one.

`python -m benchmarks.loader.parts.neighbours [--out STEM]`.

The neighbour reads the same order, and so the same memory, or another one. Each turn opens the fast
job again, a little behind its neighbour, between two turns in which it is alone. The result is the
median of the ratios to these two. Turns are short and many, so that machine noise affects a turn
and its neighbours alike. At the beginning of a turn the fast job waits for a neighbour that shares
its memory until that neighbour is detached. The longest of these waits is reported by itself, and
the rate is of the time after that.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
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
BEGINNING_S = 0.5


@dataclass(frozen=True)
class Neighbour:
    """The job that reads next to the fast one.

    Attributes:
        about: its name in the table.
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


@dataclass(frozen=True)
class Turn:
    """The fast job's longest wait at the beginning, and its samples/s after that."""

    longest_wait_s: float
    rate: float


def live_beside(address: str, pipe: Connection) -> None:
    """Read as one neighbour after the other, each until a message arrives on the pipe.

    None ends the process.
    """
    torch.set_num_threads(1)
    for seed, pause_s in iter(pipe.recv, None):
        with Loader(
            "tokens", batch_size=BATCH_SIZE, seed=seed, address=address, job="neighbour"
        ) as loader:
            for _ in range(NUM_FIRST):
                next(loader)
            pipe.send("reading")
            while not pipe.poll(pause_s):
                if pause_s is not None:
                    next(loader)
            pipe.recv()
        pipe.send("gone")


def read_fast(address: str, duration_s: float) -> Turn:
    """A job that reads as fast as it can, and touches every cache line."""
    with Loader("tokens", batch_size=BATCH_SIZE, seed=SEED, address=address, job="fast") as loader:
        for _ in range(NUM_FIRST):
            next(loader)
        beginning, rest = (
            _arrivals(loader, BEGINNING_S),
            _arrivals(loader, duration_s - BEGINNING_S),
        )
    waits = (after - before for before, after in pairwise(beginning))
    return Turn(max(waits), (len(rest) - 1) * BATCH_SIZE / (rest[-1] - rest[0]))


def _arrivals(loader: Loader, duration_s: float) -> list[float]:
    """Return the time of the start and of each batch."""
    times = [time.perf_counter()]
    while times[-1] - times[0] < duration_s:
        next(loader)["tokens"].view(-1)[::16].sum()
        times.append(time.perf_counter())
    return times


@contextmanager
def neighbour_process(address: str) -> Iterator[Connection]:
    """The process of `live_beside`."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=live_beside, args=(address, theirs))
    process.start()
    yield mine
    mine.send(None)
    process.join()


def measure(
    server: Daemon, num_rounds: int, duration_s: float
) -> tuple[list[Turn], dict[Neighbour, list[Turn]]]:
    """Measure turns alone and with each neighbour; each is followed by one alone."""
    turns: dict[Neighbour, list[Turn]] = {neighbour: [] for neighbour in NEIGHBOURS}
    with neighbour_process(server.address) as pipe:
        alone = [read_fast(server.address, duration_s)]
        for round_ in range(num_rounds):
            for neighbour in NEIGHBOURS:
                pipe.send((neighbour.seed, neighbour.pause_s))
                pipe.recv()
                turns[neighbour].append(read_fast(server.address, duration_s))
                pipe.send("enough")
                pipe.recv()
                alone.append(read_fast(server.address, duration_s))
            print(f"round {round_ + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return alone, turns


def report(alone: Sequence[Turn], turns: dict[Neighbour, list[Turn]], server: Daemon) -> list[str]:
    """A table, as Markdown."""
    head = ("beside", "rate to alone", "half of the turns", "longest wait in the beginning, ms")
    rows = [_row("nobody", [after.rate / before.rate for before, after in pairwise(alone)], alone)]
    pairs = list(pairwise(alone))
    for index, neighbour in enumerate(NEIGHBOURS):
        around = pairs[index :: len(NEIGHBOURS)]
        ratios = [
            2 * turn.rate / (before.rate + after.rate)
            for turn, (before, after) in zip(turns[neighbour], around, strict=True)
        ]
        rows.append(_row(neighbour.about, ratios, turns[neighbour]))
    return [
        *table(head, rows),
        "",
        (
            f"Alone it read {statistics.median(turn.rate for turn in alone):,.0f} samples/s; "
            "`nobody` is a turn to the one before."
        ),
        (
            f"The daemon's memory was at most {server.peak_bytes >> 20} MiB, of a budget of "
            f"{server.budget_bytes >> 20} MiB."
        ),
        "",
    ]


def _row(about: str, ratios: Sequence[float], turns: Sequence[Turn]) -> tuple[str, ...]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    wait_ms = statistics.median(turn.longest_wait_s for turn in turns) * 1e3
    return about, f"{middle:.2f}", f"{low:.2f} to {high:.2f}", f"{wait_ms:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table or write it where `--out` says."""
    parser = argparse.ArgumentParser(
        description="The loss of a fast job next to a slow or a stopped one."
    )
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.md")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.3, help="of each turn")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as name:
        path = Path(name) / "tokens.bin"
        write_tokens(path, NUM_SAMPLES * SEQUENCE_LENGTH)
        config = {
            "uri": str(path),
            "format": "tokens",
            "dtype": "int32",
            "sequence_length": SEQUENCE_LENGTH,
        }
        with daemon(Path(name), {"tokens": config}) as server:
            found = measure(server, parsed.rounds, parsed.seconds)
        lines = report(*found, server)
    if parsed.out:
        command = f"python -m benchmarks.loader.parts.neighbours {' '.join(sys.argv[1:])}"
        Path(f"{parsed.out}.md").write_text(
            "\n".join(["# Slow neighbours", "", *circumstances(command), "", *lines])
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
