"""Arrow, JSONL, MDS and folders of files, globally shuffled: Gyre beside each format's own loader.

`python -m benchmarks.loader.samples.formats_addressable`

All contenders read the same files by random access, with the page cache hot. A job is a process of
its own, and four jobs run at once with one order. The rounds of all contenders are interleaved.
`datasets` is installed for this alone, see `formats`.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from gyre_client import Loader, objects
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader.mosaic import streaming
from benchmarks.loader.processes import daemon, load_average

NUM_ROWS, ROW_INTS, FILE_ROWS = 60_000, 512, 10_000
NUM_FILES, FILE_BYTES = 20_000, 20_000  # about, of single files
BATCH_SIZE = 256
# forked workers may wait for ever for locks of pyarrow's threads
WORKERS: dict[str, Any] = {
    "num_workers": 2,
    "persistent_workers": True,
    "multiprocessing_context": "spawn",
}
RUN_S = 5.0
FORMATS = ("arrow", "jsonl", "jsonl, converted", "mds", "files")

Counts = Iterator[int]  # the samples of each batch, once they are there


def write(folder: Path) -> None:
    """The data of all formats: random token ids, text of as many bytes, and files of any bytes."""
    import datasets  # noqa: PLC0415  # see the module

    generator = np.random.default_rng(0)
    rows = generator.integers(0, 50_000, (NUM_ROWS, ROW_INTS), np.int32)
    datasets.disable_progress_bars()
    kind = datasets.Features({"tokens": datasets.Sequence(datasets.Value("int32"), ROW_INTS)})
    lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), ROW_INTS)
    table = datasets.Dataset(datasets.table.InMemoryTable(pa.table({"tokens": lists})))
    table.cast(kind).save_to_disk(str(folder / "arrow"), num_shards=NUM_ROWS // FILE_ROWS)
    (folder / "jsonl").mkdir()
    letters = generator.integers(97, 123, (NUM_ROWS, 4 * ROW_INTS), np.uint8)
    for number in range(NUM_ROWS // FILE_ROWS):
        with (folder / f"jsonl/{number}.jsonl").open("w") as file:
            for row in letters[number * FILE_ROWS : (number + 1) * FILE_ROWS]:
                file.write(json.dumps({"text": row.tobytes().decode()}) + "\n")
    columns = {"tokens": f"ndarray:int32:{ROW_INTS}"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for row in rows:
            writer.write({"tokens": row})
    for number in range(NUM_FILES):
        path = folder / f"files/{number % 100:03}/{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.bytes(int(generator.integers(FILE_BYTES * 2))))


def gyre(name: str, address: str) -> Counts:
    """Batches as a training loop uses them; JSON is parsed, as the other loaders do."""
    name = name.partition(",")[0]
    with Loader(name, batch_size=BATCH_SIZE, address=address) as loader:
        for batch in loader.stream():
            if name == "jsonl":
                objects(batch, "json")
            yield len(batch["sample_id"])


def _endless(loader: Any, count: Callable[[Any], int]) -> Counts:
    while True:
        for batch in loader:
            yield count(batch)


def own_arrow(folder: Path) -> Counts:
    import datasets  # noqa: PLC0415  # see the module

    rows: Any = datasets.load_from_disk(str(folder / "arrow")).with_format("torch")
    return _endless(_loader(rows), lambda batch: len(batch["tokens"]))


def own_jsonl(folder: Path) -> Counts:
    import datasets  # noqa: PLC0415  # see the module

    files = [str(path) for path in sorted((folder / "jsonl").glob("*.jsonl"))]
    cache = str(folder / "json-as-arrow")
    rows: Any = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
    return _endless(_loader(rows), lambda batch: len(batch["text"]))


def own_mds(folder: Path) -> Counts:
    rows = streaming.StreamingDataset(
        local=str(folder / "mds"), shuffle=True, batch_size=BATCH_SIZE, shuffle_algo="naive"
    )
    loader: Any = DataLoader(rows, BATCH_SIZE, **WORKERS)
    return _endless(loader, lambda batch: len(batch["tokens"]))


class Files(Dataset[bytes]):
    """The bytes of each file."""

    def __init__(self, folder: Path) -> None:
        self._paths = [str(path) for path in sorted(folder.glob("*/*.jpg"))]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> bytes:
        with open(self._paths[number], "rb") as file:  # noqa: PTH123  # the fastest way
            return file.read()


def joined(files: list[bytes]) -> tuple[torch.Tensor, list[int]]:
    """One tensor for all bytes, which travels in shared memory."""
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), list(map(len, files))


def own_files(folder: Path) -> Counts:
    return _endless(_loader(Files(folder / "files"), joined), lambda batch: len(batch[1]))


def _loader(rows: Any, collate: Callable[[Any], Any] | None = None) -> Any:
    return DataLoader(
        rows,
        BATCH_SIZE,
        shuffle=True,
        collate_fn=collate,
        drop_last=True,
        **WORKERS,
    )


class Lines(Dataset[dict[str, str]]):
    """The lines of files by their offsets, parsed one by one."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.jsonl"))
        self._places: list[tuple[int, int, int]] = []
        for number, path in enumerate(self._paths):
            end = 0
            for line in path.read_bytes().splitlines(keepends=True):
                self._places.append((number, end, len(line)))
                end += len(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> dict[str, str]:
        file, start, size = self._places[number]
        row: dict[str, str] = json.loads(os.pread(_opened(self._paths[file]), size, start))
        return row


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY)


def own_lines(folder: Path) -> Counts:
    return _endless(_loader(Lines(folder / "jsonl")), lambda batch: len(batch["text"]))


OWN: dict[str, tuple[str, Callable[[Path], Counts]]] = {
    "arrow": ("datasets, map-style, 2 workers", own_arrow),
    "jsonl": ("DataLoader over the lines, 2 workers", own_lines),
    "jsonl, converted": ("datasets, map-style (Arrow), 2 workers", own_jsonl),
    "mds": ("mosaicml-streaming, 2 workers", own_mds),
    "files": ("DataLoader that reads files, 2 workers", own_files),
}


def run_job(name: str, folder: Path, address: str) -> None:
    """Take batches for a while, once told to; print the rate."""
    with contextlib.redirect_stdout(io.StringIO()):  # some print
        batches = gyre(name, address) if address else OWN[name][1](folder)
        next(batches)
    print("ready", flush=True)
    sys.stdin.readline()
    began, count = time.monotonic(), 0
    for num_samples in batches:
        count += num_samples
        if time.monotonic() - began > RUN_S:
            break
    print(count / (time.monotonic() - began), flush=True)
    sys.stdin.readline()


def measure(name: str, folder: Path, address: str, num_jobs: int) -> float:
    """The mean rate of one of several jobs that run at once, in samples per second."""
    command = [sys.executable, "-m", __spec__.name, "--job", name, str(folder), address]
    jobs = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, bufsize=1, start_new_session=True,
        )
        for _ in range(num_jobs)
    ]  # fmt: skip
    try:
        for step in ("", "go"):
            for job in jobs:
                assert job.stdin
                job.stdin.write(f"{step}\n" if step else "")
            lines = [job.stdout.readline() for job in jobs if job.stdout]
        return statistics.mean(float(line) for line in lines)
    finally:
        for job in jobs:
            os.killpg(job.pid, signal.SIGKILL)  # with its workers
            job.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--job", nargs=3)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.job:
        run_job(arguments.job[0], Path(arguments.job[1]), arguments.job[2])
        return
    rates: dict[tuple[str, bool, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="gyre-formats-") as place:
        folder, scratch = Path(place) / "data", Path(place) / "scratch"
        folder.mkdir()
        scratch.mkdir()
        write(folder)
        tables = {name: {"uri": str(folder / name)} for name in ("arrow", "jsonl", "mds", "files")}
        cases = itertools.product(range(arguments.rounds), arguments.formats, (1, 4), (True, False))
        for round_, name, num_jobs, is_ours in cases:
            with daemon(scratch, tables) if is_ours else contextlib.nullcontext() as server:
                rate = measure(name, folder, server.address if server else "", num_jobs)
            rates.setdefault((name, is_ours, num_jobs), []).append(rate)
            who = "Gyre" if is_ours else OWN[name][0]
            print(f"round {round_ + 1}, {name}, {num_jobs} jobs, {who}: {rate:,.0f}", flush=True)
    print(f"\nload average {load_average():.1f}\n")
    print("| format | jobs | its own loader | samples/s | Gyre | from | to | times |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for name, num_jobs in itertools.product(arguments.formats, (1, 4)):
        ours, its = rates[name, True, num_jobs], rates[name, False, num_jobs]
        rate, other = statistics.median(ours), statistics.median(its)
        print(
            f"| {name} | {num_jobs} | {OWN[name][0]} | {other:,.0f} | {rate:,.0f} "
            f"| {min(ours):,.0f} | {max(ours):,.0f} | {rate / other:.1f} |"
        )


if __name__ == "__main__":
    main()
