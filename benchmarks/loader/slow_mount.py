"""Gyre and DataLoader on a slow mount: reads in flight, rate, first batch, gaps between batches.

`python -m benchmarks.loader.slow_mount [--by fuse|shim] [--delay-ms 10] [--seconds 4] [--rounds 3]
[--only rates images beside epochs]`.

A folder of files, one of images and a file of tokens are on a file system of FUSE whose server
delays each read. Where none can be mounted, or with `--by shim`, a preloaded library delays the
calls. The server takes processor time that a real one would not, on this machine; the library takes
none. Each contender is a process, they take turns, and the tables have medians. With a tail, one
read in a hundred takes a second. Images are decoded and cropped. A job on a page-cached file reads
alone and next to one on the slow mount. At last a job reads two epochs that fit into the node
cache. A round of `beside` starts seven processes one after the other: five minutes at a load of 20.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
from gyre_client import Loader
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader.compare import circumstances
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, cpu_s, daemon
from benchmarks.loader.samples.images import jpeg
from tests.fuse_folder import FuseFolder, why_not
from tests.slow_shim import SlowShim

BATCH, NUM_WORKERS = 64, 16
NUM_FILES, FILE_BYTES = 12_000, 2_000
NUM_SEQUENCES, SEQUENCE = 20_000, 1_024  # uint16
NUM_IMAGES, NUM_DIFFERENT = 6_000, 100
TAIL_S, TAIL_SHARE = 1.0, 0.01
VERY_SLOW_S = 0.2
MOST_S = 300.0  # a job that takes longer never ends
WARM_S = 1.0  # a session's memory is touched for the first time
TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": SEQUENCE}
CROPS: list[Mapping[str, object]] = [
    {"name": "decode_image", "field": "file"},
    {"name": "random_resized_crop", "size": 224},
]
PARTS = ("rates", "images", "beside", "epochs")
Result = dict[str, float]


class Files(Dataset[bytes]):
    """Each sample opens, reads and closes a file."""

    def __init__(self, folder: str) -> None:
        self._names = sorted(os.path.join(folder, name) for name in os.listdir(folder))  # noqa: PTH118, PTH208

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> bytes:
        with open(self._names[number], "rb", buffering=0) as file:  # noqa: PTH123
            return file.read(FILE_BYTES)


class Tokens(Dataset[bytes]):
    """Each sample is a read of one open file."""

    def __init__(self, folder: str) -> None:
        self._path, self._file = f"{folder}/a.bin", -1

    def __len__(self) -> int:
        return NUM_SEQUENCES

    def __getitem__(self, number: int) -> bytes:
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDONLY)
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        return os.pread(self._file, 2 * SEQUENCE, number * 2 * SEQUENCE)


def read(contender: str, kind: str, where: str, seconds: float) -> Result:
    """Read for some seconds.

    Args:
        contender: `gyre` or `dataloader`.
        kind: `files` or `tokens`, or any other dataset of a daemon.
        where: the address of a daemon, whose dataset has the name of the kind; or a folder.
        seconds: from the first batch on; of a cached dataset, from the second second on.
    """
    began = time.monotonic()
    batches: Iterator[object]
    with ExitStack() as stack:
        if contender == "gyre":
            made = CROPS if kind == "images" else None
            loader = Loader(
                kind, batch_size=BATCH, seed=1, address=where, epochs=None, transform=made
            )
            batches = iter(stack.enter_context(loader))
        else:
            dataset = Files(where) if kind == "files" else Tokens(where)
            options = {"batch_size": BATCH, "shuffle": True, "num_workers": NUM_WORKERS}
            batches = iter(DataLoader(dataset, collate_fn=list, **options))  # type: ignore[arg-type]
        next(batches)
        first_s = time.monotonic() - began
        warm_until = time.monotonic() + WARM_S * (kind == "cached")
        while time.monotonic() < warm_until:
            next(batches)
        arrivals, before_s = [time.monotonic()], time.process_time()
        while arrivals[-1] - arrivals[0] < seconds:
            next(batches)
            arrivals.append(time.monotonic())
        used_s = time.process_time() - before_s
    gaps = [after - before for before, after in pairwise(arrivals)]
    rate = BATCH * len(gaps) / (arrivals[-1] - arrivals[0])
    return {"first_s": first_s, "rate": rate, "gap_s": max(gaps), "cpu_s": used_s}


def start(contender: str, kind: str, where: str, seconds: float) -> "subprocess.Popen[str]":
    """Start a process that reads, and then prints its result."""
    task = json.dumps([contender, kind, where, seconds])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loader.slow_mount", "--task", task]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> Result:
    """Wait for such a process, but not for ever."""
    try:
        told, _ = process.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    found: Result = json.loads(told)
    return found


@contextmanager
def slow_folder(source: Path, scratch: Path, by: str) -> Iterator[FuseFolder | SlowShim]:
    """The folder, which can be slow for the processes that are started inside the context."""
    (scratch / by).mkdir()
    if by == "fuse":
        with FuseFolder(source, scratch / by, is_direct=1) as folder:
            yield folder
        return
    shim = SlowShim(source, scratch / by)
    os.environ.update(shim.environment)
    try:
        yield shim
    finally:
        for name in shim.environment:
            del os.environ[name]


def write(folder: Path) -> None:
    """Write the datasets."""
    for name in ("files", "images", "tokens"):
        (folder / name).mkdir(parents=True)
    for number in range(NUM_FILES):
        (folder / "files" / f"{number:05}.bin").write_bytes(os.urandom(FILE_BYTES))
    generator = np.random.default_rng(0)
    images = [jpeg(generator) for _ in range(NUM_DIFFERENT)]
    for number in range(NUM_IMAGES):
        (folder / "images" / f"{number:05}.jpg").write_bytes(images[number % NUM_DIFFERENT])
    tokens = generator.integers(0, 30_000, NUM_SEQUENCES * SEQUENCE, np.uint16)
    tokens.tofile(folder / "tokens" / "a.bin")


def medians(found: Sequence[Result]) -> Result:
    """The median of each number over the rounds."""
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def rates(
    slow: FuseFolder | SlowShim, server: Daemon, run: argparse.Namespace, kinds: Sequence[str]
) -> None:
    """Print the rates of each contender, with and without a tail."""
    tasks = [
        (kind, contender, tail_share)
        for kind in kinds
        for contender in (("gyre",) if kind == "images" else ("dataloader", "gyre"))
        for tail_share in (0.0, TAIL_SHARE)
    ]
    found: dict[tuple[str, str, float], list[Result]] = {task: [] for task in tasks}
    for _ in range(run.rounds):
        for task in tasks:
            kind, contender, tail_share = task
            where = server.address if contender == "gyre" else str(slow.path / kind)
            slow.behave(delay_s=run.delay_ms / 1e3, tail_s=TAIL_S, tail_share=tail_share)
            found[task].append(result(start(contender, kind, where, run.seconds)))
            found[task][-1]["most"] = slow.behave(delay_s=0)["most_reads"]
    rows = []
    for kind, contender, tail_share in tasks:
        its = medians(found[kind, contender, tail_share])
        pairs = zip(found[kind, contender, 0.0], found[kind, contender, tail_share], strict=True)
        ratio = statistics.median(tailed["rate"] / plain["rate"] for plain, tailed in pairs)
        rows.append(
            (
                kind,
                f"{tail_share:.0%}",
                contender,
                f"{its['most']:.0f}",
                f"{its['rate']:,.0f}",
                f"{ratio:.2f}",
                f"{its['first_s']:.2f}",
                f"{its['gap_s'] * 1e3:,.0f}",
            )
        )
    header = ("data", "tail", "loader", "in flight", "samples/s", "to no tail", "first batch, s")
    print(*table((*header, "worst gap, ms"), rows), "", sep="\n", flush=True)


def beside(slow: FuseFolder | SlowShim, server: Daemon, run: argparse.Namespace) -> None:
    """Print the rate of a page-cached job alone and next to one on the slow mount.

    The processor time of the other job is its time for a sample, measured alone, times its rate.
    """
    delays_s = {
        f"{run.delay_ms:g} ms": run.delay_ms / 1e3,
        "200 ms": VERY_SLOW_S,
        "hung": run.delay_ms / 1e3,
    }
    ratios: dict[str, list[Result]] = {where: [] for where in ("alone", *delays_s)}
    slow.behave(tail_share=0.0, delay_s=run.delay_ms / 1e3)
    before_s = cpu_s(others())
    other = result(start("gyre", "files", server.address, run.seconds))
    sample_s = (cpu_s(others()) - before_s + other["cpu_s"]) / (other["rate"] * run.seconds)
    for _ in range(run.rounds):
        alone = result(start("gyre", "cached", server.address, run.seconds))
        ratios["alone"].append({**alone, "other": 0, "to": 1, "gaps": 1, "left": 1})
        for where, delay_s in delays_s.items():
            before = slow.behave(delay_s=delay_s)["read"]
            neighbour = start("gyre", "files", server.address, run.seconds + 3)
            deadline = time.monotonic() + MOST_S
            while slow.behave()["read"] < before + 4 * BATCH:  # it has started by then
                if neighbour.poll() is not None or time.monotonic() > deadline:
                    neighbour.kill()
                    raise RuntimeError(f"the job on the slow mount does not read at {where}")
                time.sleep(0.05)
            if where == "hung":
                hang(slow)
            found = result(start("gyre", "cached", server.address, run.seconds))
            if where == "hung":
                neighbour.kill()
                release(slow)
            rate = 0.0 if where == "hung" else result(neighbour)["rate"]
            neighbour.wait()
            left = 1 - rate * sample_s / len(os.sched_getaffinity(0))
            to, gaps = found["rate"] / alone["rate"], found["gap_s"] / alone["gap_s"]
            ratios[where].append(
                {**found, "other": rate, "to": to, "gaps": gaps, "left": to / left}
            )
    slow.behave(delay_s=0)
    rows = [
        (
            where,
            f"{its['rate']:,.0f}",
            f"{its['to']:.2f}",
            f"{its['left']:.2f}",
            f"{its['gap_s'] * 1e3:.0f}",
            f"{its['gaps']:.1f}",
            f"{its['other']:,.0f}",
        )
        for where, its in ((where, medians(each)) for where, each in ratios.items())
    ]
    header = ("page-cached job, next to", "samples/s", "to alone", "to its share of the processors")
    more = ("worst gap, ms", "to alone", "the other's samples/s")
    print(*table((*header, *more), rows), "", sep="\n", flush=True)


def others() -> list[int]:
    """The daemon and its processes, and the server of the file system."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def hang(slow: FuseFolder | SlowShim) -> None:
    """Let no read of the folder end."""
    if isinstance(slow, FuseFolder):
        slow.stop()
    else:
        slow.behave(delay_s=3600)


def release(slow: FuseFolder | SlowShim) -> None:
    """Answer again."""
    if isinstance(slow, FuseFolder):
        slow.go_on()
    slow.behave(delay_s=0)


def epochs(slow: FuseFolder | SlowShim, server: Daemon, delay_s: float) -> None:
    """Print the reads of two epochs through the node cache."""
    rows = []
    for kind in ("kept files", "kept tokens"):
        for number in range(2):
            before, began = slow.behave(delay_s=delay_s)["read"], time.monotonic()
            with Loader(kind, batch_size=BATCH, seed=number, address=server.address) as loader:
                num = sum(len(batch["sample_id"]) for batch in loader)
            reads = slow.behave()["read"] - before
            rate = num / (time.monotonic() - began)
            rows.append((kind, f"{number}", f"{reads:,}", f"{rate:,.0f}"))
    header = ("data", "epoch", "reads of the mount", "samples/s")
    print(*table(header, rows), sep="\n", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=("fuse", "shim"), default="shim" if why_not() else "fuse")
    parser.add_argument("--delay-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    run = parser.parse_args()
    torch.set_num_threads(1)
    if run.task:
        print(json.dumps(read(*json.loads(run.task))))
        return
    with (
        tempfile.TemporaryDirectory(prefix="gyre-slow-") as name,
        tempfile.TemporaryDirectory(prefix="gyre-fast-", dir="/dev/shm") as memory,
    ):
        scratch = Path(name)
        source, cached = scratch / "source", Path(memory)
        write(source)
        np.zeros(NUM_SEQUENCES * SEQUENCE, np.uint16).tofile(cached / "a.bin")
        command = " ".join(["python -m benchmarks.loader.slow_mount", *sys.argv[1:]])
        print(*circumstances(command), f"{run.delay_ms:g} ms a read.\n", sep="\n")
        with slow_folder(source, scratch, run.by) as slow:
            images = {"uri": str(slow.path / "images"), "format": "files"}
            files: dict[str, object] = {
                "uri": str(slow.path / "files"),
                "format": "files",
                "extensions": ["bin"],
            }
            tokens = {"uri": str(slow.path / "tokens"), **TOKENS}
            datasets: dict[str, dict[str, object]] = {
                "files": {**files, "cache": False},
                "tokens": {**tokens, "cache": False},
                "images": {**images, "extensions": ["jpg"], "cache": False},
                '"kept files"': files,
                '"kept tokens"': tokens,
                "cached": {"uri": str(cached), **TOKENS},
            }
            with daemon(scratch, datasets) as server:
                if "rates" in run.only:
                    rates(slow, server, run, ("files", "tokens"))
                if "images" in run.only:
                    rates(slow, server, run, ("images",))
                if "beside" in run.only:
                    beside(slow, server, run)
                if "epochs" in run.only:
                    epochs(slow, server, run.delay_ms / 1e3)


if __name__ == "__main__":
    main()
