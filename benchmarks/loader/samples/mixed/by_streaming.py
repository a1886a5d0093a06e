"""mosaicml-streaming: `Stream(proportion=...)` and `StreamingDataLoader`, elastic by its design.

An epoch has as many samples as the sources together. `num_canonical_nodes` is fixed, which makes
the order the same on any number of ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.loader.mosaic import streaming
from benchmarks.loader.samples.mixed import documents
from benchmarks.loader.samples.mixed.documents import FIRST, NAMES, SEED, SIZES, G
from benchmarks.loader.samples.mixed.scenario import Rank


def write(folder: Path) -> None:
    """MDS shards."""
    for source, name in enumerate(NAMES):
        with streaming.MDSWriter(
            out=str(folder / f"mds-{name}"), columns={"id": "int"}, size_limit=1 << 10
        ) as writer:
            for each in range(FIRST[source], FIRST[source] + SIZES[source]):
                writer.write({"id": each})


def reader(rank: Rank) -> "StreamingReader":
    """A rank's part of the mixture."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    streaming.base.util.clean_stale_shared_memory()  # a killed run leaves it; all ranks meet there
    streams = [
        streaming.Stream(local=str(rank.folder / f"mds-{name}"), proportion=weight)
        for name, weight in zip(NAMES, rank.weights, strict=True)
    ]
    dataset = streaming.StreamingDataset(
        streams=streams,
        epoch_size=sum(SIZES),
        batch_size=G // rank.world_size,
        num_canonical_nodes=1,
        shuffle=True,
        shuffle_seed=SEED,
    )
    loader = streaming.StreamingDataLoader(dataset, batch_size=G // rank.world_size)
    if rank.own_state is not None:
        loader.load_state_dict(rank.own_state)
    return StreamingReader(loader)


class StreamingReader:
    """See `Reader`."""

    def __init__(self, loader: Any) -> None:
        """Read nothing yet."""
        self._loader = loader

    def steps(self) -> Iterator[list[documents.Sample]]:
        """See `Reader.steps`."""
        while True:
            for batch in self._loader:
                yield [(each,) for each in batch["id"].tolist()]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._loader.state_dict()
