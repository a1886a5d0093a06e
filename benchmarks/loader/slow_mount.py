"""Gyre and DataLoader on a slow mount: reads in flight, rate, first batch, gaps between batches.

`python -m benchmarks.loader.slow_mount [--by fuse|shim] [--delay-ms 10] [--seconds 4]`.

A folder of files and a file of tokens are on a file system of FUSE whose server delays each read.
Where none can be mounted, a preloaded library delays the calls. The server takes processor time
that a real one would not, on this machine. Each contender is a process. With a tail, one read in a
hundred takes a second. Then a job on a page-cached file reads alone and next to one on the slow
mount, and the epochs of a job are read whose data fits into the node cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from gyre_client import Loader
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader.compare import circumstances
from benchmarks.loader.markdown import table
from benchmarks.loader.processes import Daemon, daemon
from tests.fuse_folder import FuseFolder, why_not
from tests.slow_shim import SlowShim

BATCH, NUM_WORKERS = 64, 16
NUM_FILES, FILE_BYTES = 12_000, 2_000
NUM_SEQUENCES, SEQUENCE = 20_000, 1_024  # uint16
TAIL_S, TAIL_SHARE = 1.0, 0.01
TOKENS = {"format": "tokens", "dtype": "uint16", "sequence_length": SEQUENCE}
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
        kind: `files` or `tokens`.
        where: the address of a daemon, whose dataset has the name of the kind; or a folder.
        seconds: from the first batch on.
    """
    began = time.monotonic()
    batches: Iterator[object]
    with ExitStack() as stack:
        if contender == "gyre":
            loader = Loader(kind, batch_size=BATCH, seed=1, address=where, epochs=None)
            batches = iter(stack.enter_context(loader))
        else:
            dataset = Files(where) if kind == "files" else Tokens(where)
            options = {"batch_size": BATCH, "shuffle": True, "num_workers": NUM_WORKERS}
            batches = iter(DataLoader(dataset, collate_fn=list, **options))  # type: ignore[arg-type]
        arrivals = []
        for _ in batches:
            arrivals.append(time.monotonic())
            if arrivals[-1] - arrivals[0] > seconds:
                break
    gaps = [after - before for before, after in pairwise(arrivals)]
    rate = BATCH * len(gaps) / (arrivals[-1] - arrivals[0])
    return {"first_s": arrivals[0] - began, "rate": rate, "gap_s": max(gaps)}


def start(contender: str, kind: str, where: str, seconds: float) -> "subprocess.Popen[str]":
    """Start a process that reads, and then prints its result."""
    task = json.dumps([contender, kind, where, seconds])
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loader.slow_mount", "--task", task]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: "subprocess.Popen[str]") -> Result:
    """Wait for such a process."""
    told, _ = process.communicate()
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
    (folder / "files").mkdir(parents=True)
    (folder / "tokens").mkdir()
    for number in range(NUM_FILES):
        (folder / "files" / f"{number:05}.bin").write_bytes(os.urandom(FILE_BYTES))
    tokens = np.random.default_rng(0).integers(0, 30_000, NUM_SEQUENCES * SEQUENCE, np.uint16)
    tokens.tofile(folder / "tokens" / "a.bin")


def rates(slow: FuseFolder | SlowShim, server: Daemon, delay_s: float, seconds: float) -> None:
    """Print what each contender reaches, with and without a tail."""
    rows = []
    for kind in ("files", "tokens"):
        for tail_share in (0.0, TAIL_SHARE):
            for contender, where in (
                ("dataloader", str(slow.path / kind)),
                ("gyre", server.address),
            ):
                slow.behave(delay_s=delay_s, tail_s=TAIL_S, tail_share=tail_share)
                found = result(start(contender, f"{kind}", where, seconds))
                most = slow.behave(delay_s=0)["most_reads"]
                rows.append(
                    (
                        kind,
                        f"{tail_share:.0%}",
                        contender,
                        f"{most}",
                        f"{found['rate']:,.0f}",
                        f"{found['first_s']:.2f}",
                        f"{found['gap_s'] * 1e3:,.0f}",
                    )
                )
    header = ("data", "tail", "loader", "in flight", "samples/s", "first batch, s", "worst gap, ms")
    print(*table(header, rows), "", sep="\n", flush=True)


def beside(slow: FuseFolder | SlowShim, server: Daemon, delay_s: float, seconds: float) -> None:
    """Print what a page-cached job has alone and next to one on the slow mount."""
    alone = result(start("gyre", "cached", server.address, seconds))
    slow.behave(delay_s=delay_s, tail_share=0.0)
    neighbour = start("gyre", "files", server.address, seconds + 2)
    time.sleep(1)
    together = result(start("gyre", "cached", server.address, seconds))
    other = result(neighbour)
    slow.behave(delay_s=0)
    rows = [
        ("alone", f"{alone['rate']:,.0f}", f"{alone['gap_s'] * 1e3:.0f}", "-"),
        (
            "next to the slow mount",
            f"{together['rate']:,.0f}",
            f"{together['gap_s'] * 1e3:.0f}",
            f"{other['rate']:,.0f}",
        ),
    ]
    header = ("page-cached job", "samples/s", "worst gap, ms", "the other's samples/s")
    print(*table(header, rows), "", sep="\n", flush=True)


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
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.task:
        print(json.dumps(read(*json.loads(arguments.task))))
        return
    delay_s, seconds = arguments.delay_ms / 1e3, arguments.seconds
    with (
        tempfile.TemporaryDirectory(prefix="gyre-slow-") as name,
        tempfile.TemporaryDirectory(prefix="gyre-fast-", dir="/dev/shm") as memory,
    ):
        scratch = Path(name)
        source, cached = scratch / "source", Path(memory)
        write(source)
        np.zeros(NUM_SEQUENCES * SEQUENCE, np.uint16).tofile(cached / "a.bin")
        command = f"python -m benchmarks.loader.slow_mount --by {arguments.by}"
        print(*circumstances(command), f"{arguments.delay_ms:g} ms a read.\n", sep="\n")
        with slow_folder(source, scratch, arguments.by) as slow:
            files: dict[str, object] = {
                "uri": str(slow.path / "files"),
                "format": "files",
                "extensions": ["bin"],
            }
            tokens = {"uri": str(slow.path / "tokens"), **TOKENS}
            datasets: dict[str, dict[str, object]] = {
                "files": {**files, "cache": False},
                "tokens": {**tokens, "cache": False},
                '"kept files"': files,
                '"kept tokens"': tokens,
                "cached": {"uri": str(cached), **TOKENS},
            }
            with daemon(scratch, datasets) as server:
                rates(slow, server, delay_s, seconds)
                beside(slow, server, delay_s, seconds)
                epochs(slow, server, delay_s)


if __name__ == "__main__":
    main()
