"""The process that times loaders for `gyre bench`: `python -m gyre_client.bench.stopwatch`.

The first line of its standard input is the task, and each further line is a command; it answers
each with a line of JSON. A reader touches every cache line of every batch, as a copy to a device
would.
"""

import json
import sys
import time
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre_client.bench.data_loaders import (
    Batch,
    Field,
    Samples,
    TarSamples,
    TokenWindows,
    data_loader,
)
from gyre_client.bench.dataset_files import TarPlaces

CACHE_LINE_BYTES = 64
WARMUP_S = 0.3  # fills the prefetch windows of all loaders
GYRE = "gyre"


def measure(task: dict[str, Any], loader: str, num_workers: int) -> dict[str, float]:
    """Reads for `task["seconds"]` after a warm-up.

    Returns:
        samples_per_s; bytes_per_s; first_batch_s, the time to the first batch when the modules are
        imported and the index is known; and cpu_s_per_1000, the processor time that the reading
        thread itself spends on 1000 samples.
    """
    began = time.perf_counter()
    batches = _gyre(task) if loader == GYRE else _own(task, loader, num_workers)
    _touch(next(batches))
    first_batch_s = time.perf_counter() - began
    _read(batches, min(WARMUP_S, task["seconds"]))
    num_batches, num_bytes, elapsed_s, cpu_s = _read(batches, task["seconds"])
    batches.close()
    num_samples = num_batches * task["batch_size"]
    return {
        "samples_per_s": num_samples / elapsed_s,
        "bytes_per_s": num_bytes / elapsed_s,
        "first_batch_s": first_batch_s,
        "cpu_s_per_1000": cpu_s / num_samples * 1000,
    }


def differing(task: dict[str, Any], num_batches: int) -> str:
    """Compares Gyre's first batches with those of either form of the DataLoader, byte by byte.

    Returns:
        A field that differs; empty if none does.
    """
    own, theirs = _own_samples(task), _gyre(task)
    for _, batch in zip(range(num_batches), theirs, strict=False):
        ids = batch.pop("sample_id").numpy()
        for made in (own.batch(ids), own.collate([own.sample(index) for index in ids.tolist()])):
            for name in made.keys() | batch.keys():
                if name not in made or name not in batch or not _same(made[name], batch[name]):
                    return name
    return ""


def main() -> None:
    """Runs commands until the standard input ends."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer = measure(task, *arguments) if command == "measure" else differing(task, *arguments)
        print(json.dumps(answer), flush=True)


def _own(task: dict[str, Any], form: str, num_workers: int) -> Generator[Batch, None, None]:
    yield from data_loader(_own_samples(task), form, task["batch_size"], num_workers, task["seed"])


def _gyre(task: dict[str, Any]) -> Generator[Batch, None, None]:
    # Imported late: the DataLoader's workers are forked, and no thread of gRPC may run then.
    from gyre_client.loader.loader import Loader  # noqa: PLC0415

    names = ("dataset", "batch_size", "seed", "address", "daemon_user", "format", "options")
    # `stored`: ids of the same dtype as the DataLoader's
    with Loader(**{name: task[name] for name in names}, token_dtype="stored") as loader:
        yield from loader.stream()


def _own_samples(task: dict[str, Any]) -> Samples:
    files = [Path(file) for file in task["files"]]
    fields = [
        Field(name, dtype, tuple(shape), ragged) for name, dtype, shape, ragged in task["fields"]
    ]
    if task["stride"]:
        return TokenWindows(files, fields[0], task["stride"], task["header_bytes"])
    with np.load(task["places"]) as places:
        return TarSamples(
            files, fields, TarPlaces(places["shard"], places["start"], places["size"])
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.numpy().tobytes() == other.numpy().tobytes()
    )


def _read(batches: Iterator[Batch], duration_s: float) -> tuple[int, int, float, float]:
    """Returns batches, bytes, seconds, and the processor time of this thread inside the loader."""
    num_batches, num_bytes, cpu_s, began = 0, 0, 0.0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < duration_s:
        before_s = time.thread_time()
        batch = next(batches)
        cpu_s += time.thread_time() - before_s
        num_bytes += _touch(batch)
        num_batches += 1
    return num_batches, num_bytes, elapsed_s, cpu_s


def _touch(batch: Batch) -> int:
    """Reads one element of every cache line; returns the bytes of the batch's fields."""
    num_bytes = 0
    for name, tensor in batch.items():
        if name == "sample_id" or name.endswith(".offsets"):
            continue
        tensor.reshape(-1).view(torch.uint8)[::CACHE_LINE_BYTES].sum()
        num_bytes += tensor.nbytes
    return num_bytes


if __name__ == "__main__":
    main()
