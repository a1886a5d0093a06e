"""litdata: `CombinedStreamingDataset` and `StreamingDataLoader`."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.loader.samples.mixed.documents import FIRST, NAMES, SEED, SIZES, G, Sample
from benchmarks.loader.samples.mixed.scenario import Rank


def write(folder: Path) -> None:
    """Its own chunks."""
    cache_of = importlib.import_module("litdata.streaming").Cache
    for source, name in enumerate(NAMES):
        cache = cache_of(str(folder / f"lit-{name}"), chunk_size=60)
        for at in range(SIZES[source]):
            cache[at] = {"id": FIRST[source] + at}
        cache.done()
        cache.merge()


def reader(rank: Rank) -> "LitReader":
    """A rank's part of the mixture."""
    litdata = importlib.import_module("litdata")
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    sources = [
        litdata.StreamingDataset(
            str(rank.folder / f"lit-{name}"), shuffle=True, drop_last=True, seed=SEED
        )
        for name in NAMES
    ]
    mixed = litdata.CombinedStreamingDataset(
        sources, seed=SEED, weights=list(rank.weights), iterate_over_all=False
    )
    loader = litdata.StreamingDataLoader(mixed, batch_size=G // rank.world_size, drop_last=True)
    if rank.own_state is not None:
        loader.load_state_dict(rank.own_state)
    return LitReader(loader)


class LitReader:
    """See `Reader`."""

    def __init__(self, loader: Any) -> None:
        """Read nothing yet."""
        self._loader = loader

    def steps(self) -> Iterator[list[Sample]]:
        """See `Reader.steps`."""
        while True:
            for batch in self._loader:
                yield [(each,) for each in batch["id"].tolist()]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._loader.state_dict()
