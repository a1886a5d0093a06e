"""Readers of a dataset on an object server, in the measured process."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gyre_client import Loader
from gyre_client.bench import EndlessShuffle
from torch.utils.data import DataLoader

from benchmarks.loader.datasets import Rinas
from benchmarks.loader.storage.webtokens import WebTokens

RINAS_WORKERS = 8
RINAS_AHEAD = 4

Batches = Iterator[torch.Tensor]


def prepare(task: dict[str, Any]) -> Callable[[], Batches]:
    """Import all and describe the dataset; return a function that begins to read."""
    torch.set_num_threads(1)
    if task["kind"] == "rinas":
        return lambda: _rinas(task)
    loader = Loader(
        "set", batch_size=task["batch_size"], seed=task["seed"], address=task["address"]
    )
    return lambda: (batch["tokens"] for batch in loader.stream())


def _rinas(task: dict[str, Any]) -> Batches:
    samples: Any = WebTokens(
        task["url"], task["num_samples"], task["sample_bytes"], task["object_samples"]
    )
    dataset: Any = Rinas(samples)
    sampler: Any = EndlessShuffle(task["num_samples"], task["batch_size"], task["seed"])
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=torch.stack,
        num_workers=RINAS_WORKERS,
        prefetch_factor=RINAS_AHEAD,
        persistent_workers=True,
    )
    return iter(loader)
