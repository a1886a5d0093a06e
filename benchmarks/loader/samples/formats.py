"""Parquet, shuffled: Gyre's order `block` next to common ways to read the same files.

`python -m benchmarks.loader.samples.formats`

Row groups have 1,000 rows of 2 KiB. The rounds of all contenders are interleaved, and each round
begins cold: a new daemon with an index, new workers, page cache hot. Its node cache holds less than
half of the data, so that no epoch is served from memory. `datasets` comes with `make setup`.
"""

import argparse
import importlib.util
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gyre_client import Loader
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader.processes import daemon

ROW_INTS, GROUP_ROWS, FILE_GROUPS, NUM_FILES = 512, 1000, 16, 12
ROW_BYTES = 4 * ROW_INTS
CACHE_BYTES, WINDOW_BLOCKS = 160 << 20, 33
BUFFER_SAMPLES = 10_000  # the shuffle buffer of `datasets`; ours mixes 33,000
BATCH_SIZE, NUM_WORKERS = 256, 2
MAX_S = 12.0  # of a round; Gyre reads a whole epoch, however long that takes

Batches = Iterator[Any]


def write(folder: Path, *, with_ids: bool = False) -> None:
    """The data: random token ids, compressed as pyarrow does without options.

    With ids, the first number of a row says which row it is.
    """
    generator = np.random.default_rng(0)
    for number in range(NUM_FILES):
        count = FILE_GROUPS * GROUP_ROWS
        ids = generator.integers(0, 50_000, count * ROW_INTS, np.int32)
        if with_ids:
            ids[::ROW_INTS] = np.arange(number * count, (number + 1) * count)
        rows = pa.FixedSizeListArray.from_arrays(pa.array(ids), ROW_INTS)
        pq.write_table(
            pa.table({"tokens": rows}), folder / f"{number:02}.parquet", row_group_size=GROUP_ROWS
        )


class RowGroups(Dataset[torch.Tensor]):
    """Rows by their number: each decodes its row group."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.parquet"))

    def __len__(self) -> int:
        return len(self._paths) * FILE_GROUPS * GROUP_ROWS

    def __getitem__(self, number: int) -> torch.Tensor:
        group, row = divmod(number, GROUP_ROWS)
        file, group = divmod(group, FILE_GROUPS)
        table = _opened(self._paths[file]).read_row_group(group, use_threads=False)
        rows = table.column("tokens").chunk(0).flatten().to_numpy().reshape(-1, ROW_INTS)
        return torch.from_numpy(rows[row].copy())


@cache
def _opened(path: Path) -> Any:
    return pq.ParquetFile(path, pre_buffer=False)


@contextmanager
def gyre(folder: Path, scratch: Path, seed: int) -> Iterator[Batches]:
    config = {"data": {"uri": str(folder)}}
    with daemon(scratch, config, more=[f"cache_memory = {CACHE_BYTES}"]) as server:
        block: dict[str, Any] = {"order": "block", "window_blocks": WINDOW_BLOCKS, "seed": seed}
        with Loader("data", batch_size=BATCH_SIZE, address=server.address, **block) as loader:
            yield (batch["tokens"] for batch in loader)


@contextmanager
def row_group_per_sample(folder: Path, scratch: Path, seed: int) -> Iterator[Batches]:
    generator = torch.Generator().manual_seed(seed)
    workers: dict[str, Any] = {"num_workers": NUM_WORKERS, "multiprocessing_context": "spawn"}
    yield iter(
        DataLoader(RowGroups(folder), BATCH_SIZE, shuffle=True, generator=generator, **workers)
    )


@contextmanager
def streaming(folder: Path, scratch: Path, seed: int) -> Iterator[Batches]:
    batches = _stream(folder, seed).iter(BATCH_SIZE)
    yield (torch.from_numpy(np.asarray(batch["tokens"])) for batch in batches)


@contextmanager
def streaming_workers(folder: Path, scratch: Path, seed: int) -> Iterator[Batches]:
    workers: dict[str, Any] = {"num_workers": NUM_WORKERS, "multiprocessing_context": "spawn"}
    loader: Any = DataLoader(_stream(folder, seed), BATCH_SIZE, **workers)
    yield (batch["tokens"] for batch in loader)


def _stream(folder: Path, seed: int) -> Any:
    import datasets  # noqa: PLC0415  # it may not be there

    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return stream.shuffle(seed, buffer_size=BUFFER_SAMPLES).with_format("numpy")


Contender = Callable[[Path, Path, int], Any]
CONTENDERS: dict[str, Contender] = {
    "Gyre, block": gyre,
    "DataLoader, a row group per sample": row_group_per_sample,
}
STREAMS: dict[str, Contender] = {
    "datasets, streaming": streaming,
    "datasets, streaming, 2 workers": streaming_workers,
}


def measure(contender: Contender, folder: Path, scratch: Path, seed: int) -> tuple[float, float]:
    """Samples per second from the first batch on, and CPU time of a sample in microseconds."""
    with contender(folder, scratch, seed) as batches:
        shape = next(batches).shape
        assert tuple(shape) == (BATCH_SIZE, ROW_INTS)
        began, began_cpu_s, count = time.monotonic(), cpu_of_family_s(), 0
        for batch in batches:
            count += len(batch)
            batch.sum()
            if time.monotonic() - began > MAX_S:
                break
        return count / (time.monotonic() - began), 1e6 * (cpu_of_family_s() - began_cpu_s) / count


def cpu_of_family_s() -> float:
    """CPU time of this process and of all that it started and that still run."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    contenders = dict(CONTENDERS)
    if importlib.util.find_spec("datasets"):
        contenders |= STREAMS
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory(prefix="gyre-formats-") as place:
        folder, scratch = Path(place) / "data", Path(place) / "scratch"
        folder.mkdir()
        scratch.mkdir()
        write(folder)
        for seed, (name, contender) in itertools.product(range(rounds), contenders.items()):
            rate, cpu_us = measure(contender, folder, scratch, seed)
            print(f"round {seed + 1}, {name}: {rate:,.0f} samples/s, {cpu_us:,.0f} us", flush=True)
            rates[name].append(rate)
            cpu[name].append(cpu_us)
    ours = statistics.median(rates["Gyre, block"]), statistics.median(cpu["Gyre, block"])
    print(
        "\n| | samples/s | from | to | CPU of a sample, us | Gyre, times the rate | times the CPU |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in contenders:
        rate, its = statistics.median(rates[name]), statistics.median(cpu[name])
        print(
            f"| {name} | {rate:,.0f} | {min(rates[name]):,.0f} | {max(rates[name]):,.0f} "
            f"| {its:,.0f} | {ours[0] / rate:.1f} | {its / ours[1]:.1f} |"
        )


if __name__ == "__main__":
    main()
