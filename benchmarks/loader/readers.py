"""The loaders that are compared. Each runs in a process of its own: `python -m benchmarks.loader.readers KIND JSON`.

A reader touches every cache line of every batch, as a copy to a device would, and prints one line of JSON at the end.
"""

import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from gyre_client import Loader
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

CACHE_LINE_BYTES = 64


class TokenFile(Dataset[torch.Tensor]):
    """The usual memory-mapped token dataset, with batched reads."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._tokens = np.memmap(config["uri"], config["dtype"], "r").reshape(-1, config["sequence_length"])

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[index].copy())

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        """A whole batch at once: what the DataLoader calls where it is defined."""
        return torch.from_numpy(self._tokens[indices])


class TarFiles(Dataset[bytes]):
    """Samples of indexed tar shards by random access, one `pread` each."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._places: list[tuple[int, int, int]] = []
        self._paths = sorted(Path(config["uri"]).glob("*.tar"))
        self._files: list[int] = []
        for shard, path in enumerate(self._paths):
            with tarfile.open(path) as archive:
                self._places += [(shard, member.offset_data, member.size) for member in archive]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> bytes:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[bytes]:
        """A whole batch at once."""
        if not self._files:
            self._files = [os.open(path, os.O_RDONLY) for path in self._paths]
        places = (self._places[index] for index in indices)
        return [os.pread(self._files[shard], size, offset) for shard, offset, size in places]


def as_is(batch: torch.Tensor) -> torch.Tensor:
    """Collation of a batch that is a tensor already."""
    return batch


def ragged(samples: list[bytes]) -> torch.Tensor:
    """Collation of samples of different lengths: all bytes back to back."""
    return torch.frombuffer(bytearray(b"".join(samples)), dtype=torch.uint8)


def torch_loader(task: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The DataLoader with a global shuffle, for ever."""
    tokens = task["config"]["format"] == "tokens"
    dataset: Dataset[Any] = TokenFile(task["config"]) if tokens else TarFiles(task["config"])
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(task["seed"]))  # type: ignore[arg-type]
    collate: Callable[[Any], torch.Tensor] = as_is if tokens else ragged
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=BatchSampler(sampler, task["batch_size"], drop_last=True),
        collate_fn=collate,
        num_workers=task["num_workers"],
        persistent_workers=task["num_workers"] > 0,
        prefetch_factor=4 if task["num_workers"] else None,
    )
    while True:
        yield from loader


def gyre(task: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Gyre's loader, on a daemon that is there."""
    field = "tokens" if task["config"]["format"] == "tokens" else "bin"
    with Loader(task["name"], batch_size=task["batch_size"], seed=task["seed"], address=task["address"]) as loader:
        for batch in loader:
            yield batch[field]


def touch(batch: torch.Tensor) -> None:
    """Read one element of every cache line."""
    flat = batch.reshape(-1)
    flat[:: CACHE_LINE_BYTES // flat.element_size()].sum()


def measure(task: dict[str, Any]) -> dict[str, float]:
    """Read for a time; what it took.

    Returns:
        samples_per_s, first_batch_s, cpu_s_per_1000 (of this process and its children) and rss_bytes.
    """
    torch.set_num_threads(1)
    began = time.perf_counter()
    batches = {"gyre": gyre, "torch": torch_loader}[task["kind"]](task)
    touch(next(batches))
    first_batch_s = time.perf_counter() - began
    until = time.perf_counter() + task["warmup_s"]
    while time.perf_counter() < until:
        touch(next(batches))
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cpu_before = sum(sum(process.cpu_times()[:2]) for process in family)
    num_batches, began = 0, time.perf_counter()
    while time.perf_counter() < began + task["duration_s"]:
        for _ in range(8):
            touch(next(batches))
        num_batches += 8
    elapsed_s = time.perf_counter() - began
    num_samples = num_batches * task["batch_size"]
    cpu_s = sum(sum(process.cpu_times()[:2]) for process in family) - cpu_before
    return {
        "samples_per_s": num_samples / elapsed_s,
        "first_batch_s": first_batch_s,
        "cpu_s_per_1000": cpu_s / num_samples * 1000,
        "rss_bytes": float(sum(process.memory_info().rss for process in family)),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # the DataLoader's workers need no farewell
