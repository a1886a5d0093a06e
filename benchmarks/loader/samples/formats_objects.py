"""Parquet in object storage, shuffled: Gyre next to common ways to read the same rows.

`python -m benchmarks.loader.samples.formats_objects`

The files are those of `formats`. A server in another process has them; its answers begin late:
lognormal, p50 20 ms, p99 200 ms. The rounds of all contenders are interleaved, and each begins
cold. mosaicml-streaming has the rows in its own format. The first number of a row is its id, so
that the mixing of arriving rows can be told.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow.parquet as pq
import torch
from gyre_client import Loader
from gyre_daemon.order.planner import batch_quality
from torch.utils.data import DataLoader, Dataset

from benchmarks.loader.mosaic import is_installed, streaming
from benchmarks.loader.processes import daemon, load_average
from benchmarks.loader.samples.formats import (
    BATCH_SIZE,
    BUFFER_SAMPLES,
    CACHE_BYTES,
    FILE_GROUPS,
    GROUP_ROWS,
    NUM_FILES,
    NUM_WORKERS,
    ROW_INTS,
    WINDOW_BLOCKS,
    Batches,
    cpu_of_family_s,
    write,
)
from benchmarks.loader.storage.objects import FIRST_BYTE
from tests.object_server.process import ObjectServerProcess, object_server

MAX_S = 15.0  # of a round
NUM_SAMPLES = NUM_FILES * FILE_GROUPS * GROUP_ROWS
WORKERS: dict[str, Any] = {"num_workers": NUM_WORKERS, "multiprocessing_context": "spawn"}


class Measured(NamedTuple):
    """One round: samples per second, CPU time of a sample in us, and how well batches are mixed."""

    rate: float
    cpu_us: float
    mixing: float


class Place(NamedTuple):
    """The address of the data, and a folder for a contender's files."""

    server: ObjectServerProcess
    scratch: Path


class RemoteRowGroups(Dataset[torch.Tensor]):
    """Rows by their number: each reads and decodes its row group."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        group, row = divmod(number, GROUP_ROWS)
        file, group = divmod(group, FILE_GROUPS)
        table = _opened(_file(self._url, file)).read_row_group(group, use_threads=False)
        rows = table.column("tokens").chunk(0).flatten().to_numpy().reshape(-1, ROW_INTS)
        return torch.from_numpy(rows[row].copy())


@cache
def _opened(url: str) -> Any:
    return pq.ParquetFile(fsspec.open(url, "rb").open(), pre_buffer=True)


def _file(url: str, number: int) -> str:
    return f"{url}/parquet/{number:02}.parquet"


@contextmanager
def gyre(place: Place, seed: int) -> Iterator[Batches]:
    settings = {f"storage.{key}": value for key, value in place.server.storage_settings.items()}
    config = {"data": {"uri": "s3://parquet", **settings}}
    with daemon(place.scratch, config, more=[f"cache_memory = {CACHE_BYTES}"]) as server:
        block: dict[str, Any] = {"order": "block", "window_blocks": WINDOW_BLOCKS, "seed": seed}
        with Loader("data", batch_size=BATCH_SIZE, address=server.address, **block) as loader:
            yield (batch["tokens"] for batch in loader.stream())


@contextmanager
def row_group_per_sample(place: Place, seed: int) -> Iterator[Batches]:
    generator = torch.Generator().manual_seed(seed)
    samples = RemoteRowGroups(place.server.url)
    yield iter(DataLoader(samples, BATCH_SIZE, shuffle=True, generator=generator, **WORKERS))


@contextmanager
def datasets_stream(place: Place, seed: int) -> Iterator[Batches]:
    batches = _stream(place, seed).iter(BATCH_SIZE)
    yield (torch.from_numpy(np.asarray(batch["tokens"])) for batch in batches)


@contextmanager
def datasets_workers(place: Place, seed: int) -> Iterator[Batches]:
    loader: Any = DataLoader(_stream(place, seed), BATCH_SIZE, **WORKERS)
    yield (batch["tokens"] for batch in loader)


def _stream(place: Place, seed: int) -> Any:
    import datasets  # noqa: PLC0415  # it may not be there

    files = [_file(place.server.url, number) for number in range(NUM_FILES)]
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    return stream.shuffle(seed, buffer_size=BUFFER_SAMPLES).with_format("numpy")


@contextmanager
def mosaic(place: Place, seed: int) -> Iterator[Batches]:
    os.environ |= {
        "S3_ENDPOINT_URL": place.server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    streaming.base.util.clean_stale_shared_memory()
    local = tempfile.mkdtemp(dir=place.scratch)
    data = streaming.StreamingDataset(
        remote="s3://mds",
        local=local,
        shuffle=True,
        shuffle_seed=seed,
        batch_size=BATCH_SIZE,
        num_canonical_nodes=1,
    )
    loader: Any = streaming.StreamingDataLoader(
        data, batch_size=BATCH_SIZE, num_workers=NUM_WORKERS
    )
    yield (batch["tokens"] for batch in loader)


def write_mds(folder: Path) -> None:
    """The same rows, as mosaicml-streaming writes them without options."""
    columns = {"tokens": f"ndarray:int32:{ROW_INTS}"}
    with streaming.MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for path in sorted((folder / "parquet").glob("*.parquet")):
            rows = pq.read_table(path).column("tokens").combine_chunks().flatten().to_numpy()
            for row in rows.reshape(-1, ROW_INTS):
                writer.write({"tokens": row})


def measure(contender: Any, place: Place, seed: int) -> Measured:
    """Read for some seconds, from the first batch on."""
    with contender(place, seed) as batches:
        first = next(batches)
        assert tuple(first.shape) == (BATCH_SIZE, ROW_INTS)
        began, began_cpu_s, ids = time.monotonic(), cpu_of_family_s(), []
        for batch in batches:
            ids.append(batch[:, 0].numpy().astype(np.int64))
            if time.monotonic() - began > MAX_S:
                break
        seconds, cpu_s = time.monotonic() - began, cpu_of_family_s() - began_cpu_s
    places = np.arange(BATCH_SIZE)
    full = [each for each in ids if len(each) == BATCH_SIZE]
    mixing = [batch_quality(each, places, NUM_SAMPLES).mixing for each in full]
    count = sum(map(len, ids))
    return Measured(count / seconds, 1e6 * cpu_s / count, min(1.0, statistics.mean(mixing)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    contenders: dict[str, Any] = {
        "Gyre, block": gyre,
        "DataLoader, a row group per sample": row_group_per_sample,
        "datasets, streaming": datasets_stream,
        "datasets, streaming, 2 workers": datasets_workers,
    }
    if is_installed():
        contenders["mosaicml-streaming, 2 workers"] = mosaic
    found: dict[str, list[Measured]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-remote-")))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gyre-scratch-")))
        (folder / "parquet").mkdir()
        write(folder / "parquet", with_ids=True)
        if is_installed():
            write_mds(folder)
        server = stack.enter_context(object_server(folder))
        server.follow(FIRST_BYTE)
        for seed, (name, contender) in itertools.product(range(rounds), contenders.items()):
            measured = measure(contender, Place(server, scratch), seed)
            print(f"round {seed + 1}, {name}: {measured}, load {load_average()}", flush=True)
            found[name].append(measured)
    rate = statistics.median(each.rate for each in found["Gyre, block"])
    print("\n| | samples/s | from | to | CPU of a sample, us | mixing | Gyre, times the rate |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, rows in found.items():
        rates = [each.rate for each in rows]
        median = statistics.median(rates)
        print(
            f"| {name} | {median:,.0f} | {min(rates):,.0f} | {max(rates):,.0f} "
            f"| {statistics.median(each.cpu_us for each in rows):,.0f} "
            f"| {statistics.median(each.mixing for each in rows):.2f} | {rate / median:.1f} |"
        )


if __name__ == "__main__":
    main()
