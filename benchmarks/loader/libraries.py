"""Each loader as an endless stream of batches, a tensor each, of one workload."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre_client.bench import EndlessShuffle
from torch.utils.data import DataLoader

from benchmarks.loader.data import SEQUENCE_LENGTH, Workload
from benchmarks.loader.datasets import (
    Rinas,
    TarBatches,
    TarSamples,
    TokenBatches,
    TokenSamples,
    as_is,
    join,
)

PREFETCHED_BATCHES = 4  # of each worker; the default of 2 is slower
WDS_BUFFER = 2000  # samples: its shuffle is a buffer over a sequential stream
Batches = Iterator[torch.Tensor]


def torch_plain(workload: Workload, num_workers: int, seed: int) -> Batches:
    """The DataLoader as tutorials have it."""
    dataset = _samples(workload)
    collate = None if workload.is_tokens else join
    loader: DataLoader[Any] = DataLoader(
        dataset,
        workload.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(seed),
        **_of_workers(num_workers),
    )
    return _for_ever(loader)


def torch_tuned(
    workload: Workload, num_workers: int, seed: int, kind: type[DataLoader[Any]] = DataLoader
) -> Batches:
    """The DataLoader in the fastest form that we know.

    A batch is one gather into one tensor, indices are arrays, and nothing is collated.
    """
    path = str(workload.config["uri"])
    dataset: Any = TokenBatches(path, SEQUENCE_LENGTH) if workload.is_tokens else TarBatches(path)
    sampler: Any = EndlessShuffle(len(dataset), workload.batch_size, seed)
    collate: Callable[[Any], torch.Tensor] = as_is
    return iter(
        kind(dataset, batch_sampler=sampler, collate_fn=collate, **_of_workers(num_workers))
    )


def stateful(workload: Workload, num_workers: int, seed: int) -> Batches:
    """torchdata's DataLoader that can be resumed, in the tuned form."""
    # Only where it is measured.
    from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415

    return torch_tuned(workload, num_workers, seed, StatefulDataLoader)


def rinas(workload: Workload, num_workers: int, seed: int) -> Batches:
    """A thread pool per batch, unordered, inside the DataLoader's workers."""
    dataset: Any = Rinas(_samples(workload))
    sampler: Any = EndlessShuffle(len(dataset), workload.batch_size, seed)
    collate: Callable[[Any], torch.Tensor] = torch.stack if workload.is_tokens else join
    return iter(
        DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **_of_workers(num_workers))
    )


def webdataset(workload: Workload, num_workers: int, seed: int) -> Batches:
    """WebLoader over tar shards, shuffled by a buffer, batched in the pipeline."""
    # Only where it is measured.
    import webdataset as wds  # noqa: PLC0415

    def collate(samples: list[tuple[bytes]]) -> torch.Tensor:
        joined = join([sample for (sample,) in samples])
        return (
            joined.view(torch.int32).reshape(-1, SEQUENCE_LENGTH) if workload.is_tokens else joined
        )

    urls = sorted(str(path) for path in _tars(workload))
    pipeline = (
        wds.WebDataset(urls, shardshuffle=len(urls), seed=seed, empty_check=False)
        .repeat()
        .shuffle(WDS_BUFFER)
    )
    pipeline = pipeline.to_tuple("bin").batched(
        workload.batch_size, collation_fn=collate, partial=False
    )
    return iter(wds.WebLoader(pipeline, batch_size=None, **_of_workers(num_workers)))


def mosaic(workload: Workload, num_workers: int, seed: int) -> Batches:
    """mosaicml-streaming from its own local format, with its default shuffle."""
    # Imports torch and much else, in one process only.
    from benchmarks.loader.mosaic import streaming  # noqa: PLC0415

    streaming.base.util.clean_stale_shared_memory()
    dataset = streaming.StreamingDataset(
        local=workload.mds,
        shuffle=True,
        shuffle_seed=seed,
        batch_size=workload.batch_size,
        num_canonical_nodes=1,
    )
    collate = _stack_arrays if workload.is_tokens else _join_samples
    loader = streaming.StreamingDataLoader(
        dataset,
        batch_size=workload.batch_size,
        drop_last=True,
        collate_fn=collate,
        **_of_workers(num_workers),
    )
    return _for_ever(loader)


def gyre(
    workload: Workload, address: str, seed: int, job: str | None = None, token_dtype: str = "int64"
) -> Batches:
    """Gyre's loader, on a running daemon."""
    # The DataLoader's workers are forked: no thread of gRPC may be there.
    from gyre_client import Loader  # noqa: PLC0415

    field = "tokens" if workload.is_tokens else "bin"
    name, size = workload.name, workload.batch_size
    with Loader(
        name, batch_size=size, seed=seed, address=address, job=job, token_dtype=token_dtype
    ) as loader:
        for batch in loader.stream():
            yield batch[field]


OPPONENTS: dict[str, Callable[[Workload, int, int], Batches]] = {
    "plain": torch_plain,
    "tuned": torch_tuned,
    "stateful": stateful,
    "rinas": rinas,
    "webdataset": webdataset,
    "mosaic": mosaic,
}


def close(batches: Batches) -> None:
    """End the loader's workers or session."""
    if hasattr(batches, "close"):
        batches.close()
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()
    del batches
    gc.collect()


def _samples(workload: Workload) -> TokenSamples | TarSamples:
    path = str(workload.config["uri"])
    return TokenSamples(path, SEQUENCE_LENGTH) if workload.is_tokens else TarSamples(path)


def _tars(workload: Workload) -> Iterator[Path]:
    return Path(workload.tars).glob("*.tar")


def _of_workers(num_workers: int) -> dict[str, Any]:
    if not num_workers:
        return {"num_workers": 0}
    return {
        "num_workers": num_workers,
        "persistent_workers": True,
        "prefetch_factor": PREFETCHED_BATCHES,
    }


def _for_ever(loader: Any) -> Batches:
    while True:
        yield from loader


def _stack_arrays(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([sample["sample"] for sample in samples]))


def _join_samples(samples: list[dict[str, Any]]) -> torch.Tensor:
    return join([sample["sample"] for sample in samples])
