"""Loaders, timed in a process of their own for `gyre bench`: `python -m gyre_client.stopwatch`.

The first line of its standard input is the task, each further one a command; it answers each with a line of JSON. A reader
touches every cache line of every batch, as a copy to a device would.
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

from gyre_client.own_files import TarPlaces
from gyre_client.own_samples import Batch, Field, OwnTars, OwnTokens, data_loader

CACHE_LINE_BYTES = 64
WARMUP_S = 0.3
GYRE = "gyre"


def measure(task: dict[str, Any], loader: str, num_workers: int) -> dict[str, float]:
    """Reads for a time.

    Returns:
        samples_per_s and bytes_per_s; first_batch_s, from nothing but imported modules and a known index; and cpu_s_per_1000,
        which the reading thread itself spent on a thousand samples.
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
    """Returns a field in which one of Gyre's first batches differs from what is read here in either form; empty if in none."""
    own, theirs = _own_samples(task), _gyre(task)
    for _, batch in zip(range(num_batches), theirs, strict=False):
        ids = batch.pop("sample_id").numpy()
        for made in (own.batch(ids), own.join([own.sample(index) for index in ids.tolist()])):
            for name in made.keys() | batch.keys():
                if name not in made or name not in batch or not _same(made[name], batch[name]):
                    return name
    return ""


def main() -> None:
    """Obeys until the standard input ends."""
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
    from gyre_client.loader import Loader  # noqa: PLC0415  (the DataLoader's workers are forked: no thread of gRPC may be there)

    names = ("dataset", "batch_size", "seed", "address", "format", "options")
    with Loader(**{name: task[name] for name in names}, token_dtype="stored") as loader:  # as the DataLoader has them
        yield from loader.stream()


def _own_samples(task: dict[str, Any]) -> OwnTokens | OwnTars:
    files = [Path(file) for file in task["files"]]
    fields = [Field(name, dtype, tuple(shape), ragged) for name, dtype, shape, ragged in task["fields"]]
    if task["stride"]:
        return OwnTokens(files, fields[0], task["stride"], task["header_bytes"])
    with np.load(task["places"]) as places:
        return OwnTars(files, fields, TarPlaces(places["shard"], places["start"], places["size"]))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, byte by byte."""
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def _read(batches: Iterator[Batch], duration_s: float) -> tuple[int, int, float, float]:
    """Returns batches, bytes, seconds, and the seconds of processor time that this thread spent to get them."""
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
