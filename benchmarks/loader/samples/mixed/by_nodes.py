"""torchdata.nodes: `MultiNodeWeightedSampler` over each rank's own ids, as its pages show it.

`by_nodes_whole` has every rank draw the global batches and keep its part, which the script then
cuts out by itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchdata.nodes

from benchmarks.loader.samples.mixed.documents import NAMES, SEED, G, shuffled
from benchmarks.loader.samples.mixed.scenario import Rank


def write(folder: Path) -> None:
    """Ids are enough."""


def reader(rank: Rank, *, is_whole: bool = False) -> "NodesReader":
    """A rank's part of the mixture."""
    place, count = (0, 1) if is_whole else (rank.rank, rank.world_size)
    nodes = {
        name: torchdata.nodes.SamplerWrapper(shuffled(rank.variant.ids(source))[place::count])
        for source, name in enumerate(NAMES)
    }
    mixed = torchdata.nodes.MultiNodeWeightedSampler(
        nodes,
        dict(zip(NAMES, rank.weights, strict=True)),
        stop_criteria="CYCLE_FOREVER",
        rank=place,
        world_size=count,
        seed=SEED,
    )
    batches = torchdata.nodes.Loader(torchdata.nodes.Batcher(mixed, G // count))
    if rank.own_state is not None:
        batches.load_state_dict(rank.own_state)
    own = slice(rank.rank, None, rank.world_size) if is_whole else slice(None)
    return NodesReader(batches, own)


class NodesReader:
    """See `Reader`."""

    def __init__(self, batches: Any, own: slice) -> None:
        """Read nothing yet."""
        self._batches, self._own = batches, own

    def steps(self) -> Iterator[list[tuple[int, ...]]]:
        """See `Reader.steps`."""
        for batch in self._batches:
            yield [(each,) for each in batch[self._own]]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._batches.state_dict()
