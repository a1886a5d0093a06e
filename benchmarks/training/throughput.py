"""Trains models from object storage with several loaders.

    python -m benchmarks.training.throughput --out PREFIX [--work FOLDER --seconds S]

The server is a process of its own whose answers begin late: lognormal, p50 20 ms and p99 200 ms.
Every sample is one request, except in the order `block`. In each round all loaders take turns with
each model, each in a new process and with a new daemon. Turns that do not fit into the given
seconds are left to the next call with the same folder; the last call writes PREFIX.md and
PREFIX.png.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.loader.datasets import RINAS_THREADS
from benchmarks.loader.processes import daemon, load_average
from benchmarks.loader.storage.objects import FIRST_BYTE
from benchmarks.training import pace_report, samples
from benchmarks.training.ledger import Key, Ledger, Result
from benchmarks.training.loaders import BATCH_SIZE, BATCHES_AHEAD, Kind, Source, Window
from benchmarks.training.models import Architecture
from benchmarks.training.turn import Turn, take
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

WINDOWS = {"text": Window(256, 256, samples.STRIDE), "glyphs": Window(256, 9, 14 << 10)}
NUM_LOSSES = 8  # kept of each turn
INTRODUCTION = f"""\
Every sample is one request to an object server in another process, whose answers begin late:
lognormal, p50 20 ms, p99 200 ms. All loaders bring the same samples in the same batches of
{BATCH_SIZE} to the same model with the same weights in the same loop. Data wait is the share of
that loop's time spent in `next()`. The clock starts with the first batch, and rounds are
interleaved.

* *Ordered*: torch's DataLoader. A worker reads the samples of its batch one after the other.
  Batches come in their order, and each worker has up to {BATCHES_AHEAD} of them ahead.
* *RINAS*, as its paper (arXiv 2312.02368) fetches: the same, but in each worker {RINAS_THREADS}
  threads read the samples of a batch, which are taken as they arrive.
* *Gyre*: the daemon and `gyre_client.Loader` with their defaults, and a new daemon for each turn.
  `full` has no cache: no sample is read twice, and all come from the server. `block` reads
  neighbours with one request and mixes a window of blocks.

Server, loader and model (one thread) share the machine's cores. So a step takes longer beside a
loader that computes much: see *step without it*. With a GPU it would not, and the model would ask
for more samples than here. The first row of each table reads the same samples from files in the
page cache, one by one in the training process; that takes time too, and counts as waiting. The
larger models are there because a gain depends on the step. A loader that waits for nothing gains 1
/ (1 - w) - 1 over one that waits for the share w. So the paper's +59 % and +89 % mean that its
ordered loader waited for at least 37 % and 47 % of the time. CPU is that of the trainer, its
workers and the daemon, not of the server."""
SMALL: tuple[Kind, ...] = ("memory", "ordered", "rinas", "full", "block")
LARGE: tuple[Kind, ...] = ("memory", "ordered", "rinas", "full")


@dataclass(frozen=True)
class Job:
    """A model and how it is trained.

    Attributes:
        architecture: the model.
        kinds: the loaders, in the order of their turns.
        num_rounds: the number of rounds of all loaders.
    """

    architecture: Architecture
    kinds: tuple[Kind, ...]
    num_rounds: int


@dataclass(frozen=True)
class Plan:
    """The turns of the benchmark.

    Attributes:
        jobs: in the order of their turns.
        duration_s: seconds of a turn, from its first batch on.
        scale: the amount of data.
        first_byte: the server's latency until the first byte.
    """

    jobs: tuple[Job, ...]
    duration_s: float
    scale: samples.Scale
    first_byte: Script

    @property
    def turns(self) -> list[tuple[int, str, Kind]]:
        """Round, model and loader of all turns, in their order."""
        rounds = range(max(job.num_rounds for job in self.jobs))
        return [
            (r, job.architecture.label, kind)
            for r in rounds
            for job in self.jobs
            if r < job.num_rounds
            for kind in job.kinds
        ]


FULL = Plan(
    (
        Job(Architecture("transformer", "text", 32), SMALL, 3),
        Job(Architecture("CNN", "glyphs", 8), SMALL, 3),
        Job(Architecture("larger transformer", "text", 96), LARGE, 2),
        Job(Architecture("larger CNN", "glyphs", 32), LARGE, 2),
    ),
    duration_s=6.0,
    scale=samples.Scale(),
    first_byte=FIRST_BYTE,
)
TOY = Plan(
    (Job(Architecture("CNN", "glyphs", 4), ("ordered", "rinas", "full"), 1),),
    duration_s=0.2,
    scale=samples.Scale(50_000, 20_000, 4, 62, 1),
    first_byte=Script(),
)


class Stage:
    """The server with the data, and a daemon for each turn."""

    def __init__(self, plan: Plan, work: Path, server: ObjectServerProcess) -> None:
        self._plan, self._work, self._server = plan, work, server
        self._architectures = {job.architecture.label: job.architecture for job in plan.jobs}

    def measure(self, key: tuple[int, str, Kind]) -> Result:
        """Measure one turn."""
        round_, label, kind = key
        print(f"round {round_ + 1}: {label}, {kind}", file=sys.stderr, flush=True)
        architecture = self._architectures[label]
        stored = samples.Stored(architecture.data, self._work / "data" / architecture.data)
        url = f"{self._server.url}/{architecture.data}"
        load = load_average()
        with ExitStack() as stack:
            source = Source(stored, url, "", round_, WINDOWS[architecture.data])
            also_pids: tuple[int, ...] = ()
            if kind in ("full", "block"):
                serving = stack.enter_context(
                    daemon(self._work, {"data": {**stored.config(url), "cache": kind == "block"}})
                )
                source, also_pids = replace(source, address=serving.address), tuple(serving.pids)
            result = take(Turn(kind, source, architecture, self._plan.duration_s, also_pids))
        return {**result, "load": load, "losses": result["losses"][:NUM_LOSSES]}


def measure(plan: Plan, work: Path, max_s: float) -> Ledger | None:
    """Fill the folder's ledger; return it if it is complete."""
    samples.write(work / "data", plan.scale)
    ledger = Ledger(work / "throughput.jsonl")
    with object_server(work / "data") as server:
        server.follow(plan.first_byte)
        keys: list[Key] = list(plan.turns)
        done = ledger.fill(keys, Stage(plan, work, server).measure, max_s)
    return ledger if done else None


def _chapter(ledger: Ledger, job: Job) -> pace_report.Chapter:
    architecture = job.architecture
    about = f"{architecture.about()}; medians of {job.num_rounds} rounds."
    return pace_report.Chapter.read(ledger, architecture.label, about, job.kinds, job.num_rounds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="where the report and the picture go, without their suffixes",
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="keeps data and results between calls; without it, nothing is kept",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="no turn begins later")
    parser.add_argument(
        "--toy", action="store_true", help="one tiny model: shows that it runs, and nothing else"
    )
    args = parser.parse_args(arguments)
    plan = TOY if args.toy else FULL
    with tempfile.TemporaryDirectory(prefix="gyre-training-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        ledger = measure(plan, work, args.seconds)
    if ledger is None:
        print("not all is measured yet: call again with the same --work", file=sys.stderr)
        return
    chapters = [_chapter(ledger, job) for job in plan.jobs]
    pace_report.write(chapters, INTRODUCTION, args.out)


if __name__ == "__main__":
    main()
