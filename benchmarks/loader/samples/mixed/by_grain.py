"""Grain: `MapDataset.mix` in an `ElasticIterator`, or an iterator for each rank.

An `ElasticIterator` takes no filter, and packing is one of iterators. Only `IterDataset.mix`, of
iterators by name, takes other weights with a state.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loader.samples.mixed.documents import (
    FIRST,
    LENGTH,
    NAMES,
    SEED,
    SIZES,
    G,
    Sample,
    documents_in,
    tokens_of,
)
from benchmarks.loader.samples.mixed.scenario import Rank


def write(folder: Path) -> None:
    """Ids are enough."""


def reader(rank: Rank) -> "GrainReader":
    """A rank's part of the mixture."""
    grain = importlib.import_module("grain")
    variant, size = rank.variant, G // rank.world_size
    sources = [
        grain.MapDataset.source(range(FIRST[at], FIRST[at] + SIZES[at])).seed(SEED + at).shuffle()
        for at in range(len(NAMES))
    ]
    if variant.is_filtered:
        sources = [each.filter(variant.passes) for each in sources]
    sources = [each.repeat() for each in sources]
    mixed = grain.MapDataset.mix(sources, list(rank.weights))
    own = mixed[rank.rank :: rank.world_size].to_iter_dataset()
    if variant.is_changed:
        parts = [each[rank.rank :: rank.world_size].to_iter_dataset() for each in sources]
        weights = dict(zip(NAMES, rank.weights, strict=True))
        own = grain.IterDataset.mix(dict(zip(NAMES, parts, strict=True)), weights)
    if variant.is_packed:
        batches = grain.experimental.FirstFitPackIterDataset(
            own.map(_tokens), length_struct={"tokens": LENGTH}, num_packing_bins=8
        ).batch(size)
    elif variant.is_filtered or variant.is_changed:
        batches = own.batch(size)
    else:
        shard = grain.sharding.ShardOptions(rank.rank, rank.world_size)
        batches = grain.experimental.ElasticIterator(mixed, G, shard)
    iterator = iter(batches)
    if rank.own_state is not None:
        iterator.set_state(rank.own_state)
    return GrainReader(iterator)


def _tokens(document: int) -> dict[str, Any]:
    return {"tokens": np.array(tokens_of(int(document)), np.int32)}


class GrainReader:
    """See `Reader`."""

    def __init__(self, iterator: Any) -> None:
        """Read nothing yet."""
        self._iterator = iterator

    def steps(self) -> Iterator[list[Sample]]:
        """See `Reader.steps`."""
        for batch in self._iterator:
            if isinstance(batch, dict):
                yield [documents_in(row) for row in batch["tokens"].tolist()]
            else:
                yield [(int(each),) for each in batch]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._iterator.get_state()
