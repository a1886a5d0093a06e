"""How long a job waits when its daemon is killed, and when it resumes on other ranks.

    python -m benchmarks.loader.restarts [--kills 20] [--jobs 2]

Each job reads the token workload as fast as it can while `gyred` is killed with SIGKILL and
started again, as a service manager does it. A pause is the time between the last batch before a
kill and the first one after it, the daemon's own start included. The sample ids are compared with
those of an undisturbed reader. After that, two ranks stop in the middle of an epoch and four go on
from their state, next to a StatefulDataLoader that goes on with as many workers as before.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_client import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

from benchmarks.loader.data import SEQUENCE_LENGTH, SHORT, Workload, tokens
from benchmarks.loader.datasets import TokenSamples
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import load_average

BATCH_SIZE = 64
MIN_UPTIME_S = 0.5  # between the first batch of a daemon and its kill
ROUNDS = 5


class Job(threading.Thread):
    """A reader that notes when each batch came, and its sample ids."""

    def __init__(self, address: str, seed: int, stop: threading.Event):
        """Read with `seed` until `stop` is set."""
        super().__init__()
        self.seed = seed
        self.arrivals_s: list[float] = []
        self.ids: list[npt.NDArray[np.int64]] = []
        self._loader = Loader("T", address=address, batch_size=BATCH_SIZE, seed=seed)
        self._stop_reading = stop

    def run(self) -> None:
        """Read until told to stop."""
        with self._loader as loader:
            for batch in loader.stream():
                self.arrivals_s.append(time.monotonic())
                self.ids.append(batch["sample_id"].numpy().copy())
                if self._stop_reading.is_set():
                    return

    def num_wrong(self, address: str) -> int:
        """Compare the batches with those of an undisturbed reader."""
        with Loader("T", address=address, batch_size=BATCH_SIZE, seed=self.seed) as loader:
            return sum(
                not np.array_equal(ids, batch["sample_id"].numpy())
                for ids, batch in zip(self.ids, loader.stream(), strict=False)
            )

    def pauses_s(self, kills_s: list[float]) -> list[float]:
        """Return the longest gap from each kill to the next one."""
        arrivals = np.array(self.arrivals_s)
        gaps = np.diff(arrivals)
        first = np.searchsorted(arrivals, kills_s) - 1
        last = np.append(first[1:], len(gaps))
        return [float(gaps[a:b].max()) for a, b in zip(first, last, strict=True)]


@contextmanager
def daemon(folder: Path, workload: Workload) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Serve the workload; the list's only element is the process and may be replaced."""
    address = f"unix:{folder}/gyre.sock"
    uri, count = workload.config["uri"], workload.config["sequence_length"]
    (folder / "gyre.toml").write_text(
        f'listen = ["{address}"]\nindex_dir = "{folder}/index"\n[datasets.T]\nuri = "{uri}"\n'
        f'format = "tokens"\ndtype = "int32"\nsequence_length = {count}\n'
    )
    processes = [start(folder)]
    try:
        yield address, processes
    finally:
        processes[0].terminate()
        processes[0].wait(30)


def start(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a daemon with the folder's configuration; it may not listen yet."""
    command = [sys.executable, "-m", "gyre_daemon", "serve", "--config", f"{folder}/gyre.toml"]
    return subprocess.Popen(command, stderr=(folder / "log").open("ab"))


def kill_again_and_again(
    folder: Path, workload: Workload, num_kills: int, num_jobs: int
) -> tuple[list[float], int, int]:
    """Return the pauses, the number of batches and how many of them were not the planned ones."""
    stop = threading.Event()
    kills_s: list[float] = []
    with daemon(folder, workload) as (address, processes):
        jobs = [Job(address, seed, stop) for seed in range(num_jobs)]
        for job in jobs:
            job.start()
        for _ in range(num_kills):
            wait_for_batches(jobs)
            kills_s.append(time.monotonic())
            processes[0].kill()
            processes[0].wait()
            processes[0] = start(folder)
        wait_for_batches(jobs)
        stop.set()
        for job in jobs:
            job.join()
        num_wrong = sum(job.num_wrong(address) for job in jobs)
    pauses = [pause for job in jobs for pause in job.pauses_s(kills_s)]
    return pauses, sum(len(job.ids) for job in jobs), num_wrong


def wait_for_batches(jobs: list[Job]) -> None:
    """Wait until each job has new batches, and a little longer."""
    before = [len(job.arrivals_s) for job in jobs]
    while any(len(job.arrivals_s) == num for job, num in zip(jobs, before, strict=True)):
        time.sleep(0.01)
    time.sleep(MIN_UPTIME_S)


def resume_s(folder: Path, workload: Workload) -> tuple[list[float], list[float]]:
    """Return the time to the first batch after a resume, of Gyre and of StatefulDataLoader."""
    gyre: list[float] = []
    stateful: list[float] = []
    half = workload.num_samples // BATCH_SIZE // 2
    with daemon(folder, workload) as (address, _):
        for _ in range(ROUNDS):
            options: dict[str, Any] = {
                "address": address,
                "batch_size": BATCH_SIZE,
                "job": "resume",
            }
            with Loader("T", rank=0, world_size=2, **options) as loader:
                for _ in zip(range(half), loader, strict=False):
                    pass
                state = loader.state_dict()
            began_s = time.monotonic()
            with Loader("T", rank=3, world_size=4, **options) as loader:
                loader.load_state_dict(state)
                next(iter(loader))
                gyre.append(time.monotonic() - began_s)
    for _ in range(ROUNDS):
        loader = stateful_loader(workload)
        for _ in zip(range(half), loader, strict=False):
            pass
        state = loader.state_dict()
        began_s = time.monotonic()
        loader = stateful_loader(workload)
        loader.load_state_dict(state)
        next(iter(loader))
        stateful.append(time.monotonic() - began_s)
    return gyre, stateful


def stateful_loader(workload: Workload) -> Any:
    """Return torchdata's loader with two workers."""
    dataset = TokenSamples(str(workload.config["uri"]), SEQUENCE_LENGTH)
    return StatefulDataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=2)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    print(f"load average at the start: {load_average():.1f}\n")
    with tempfile.TemporaryDirectory(prefix="gyre-") as name:
        folder = Path(name)
        workload = tokens(folder, SHORT.tokens)
        pauses, num_batches, num_wrong = kill_again_and_again(
            folder, workload, args.kills, args.jobs
        )
        gyre, stateful = resume_s(folder, workload)
    rows = [
        (f"pause when the daemon is killed, {args.jobs} jobs", *_spread(pauses)),
        ("first batch after a resume, 2 ranks to 4, Gyre", *_spread(gyre)),
        ("the same, 1 rank to 1, StatefulDataLoader, 2 workers", *_spread(stateful)),
    ]
    print("\n".join(table(("", "median, s", "worst, s", "times"), rows)))
    print(f"\n{num_batches:,} batches read, {num_wrong} of them not those of an undisturbed reader")


def _spread(values: list[float]) -> tuple[str, str, str]:
    return f"{statistics.median(values):.3f}", f"{max(values):.3f}", str(len(values))


if __name__ == "__main__":
    main()
