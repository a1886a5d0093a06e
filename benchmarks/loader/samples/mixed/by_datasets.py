"""datasets of Hugging Face: `interleave_datasets`, split over ranks by `split_dataset_by_node`.

`by_datasets` filters, packs and shuffles each source as a whole, before it is streamed as one
shard. Every rank then reads all samples and keeps its own, and its state does not depend on the
number of ranks. `by_datasets_streamed` has four shards of each source that are shuffled through a
buffer, filtered and packed on the way, as for datasets that are not on local disks.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node

from benchmarks.loader.samples.mixed.documents import (
    NAMES,
    NUM_SHARDS,
    SEED,
    G,
    Variant,
    pack,
)
from benchmarks.loader.samples.mixed.files import write_parquet
from benchmarks.loader.samples.mixed.scenario import Rank

write = write_parquet
BUFFER = 100


def reader(rank: Rank, *, is_streamed: bool = False) -> "DatasetsReader":
    """A rank's part of the mixture."""
    sources = [_source(rank.folder / name, rank.variant, is_streamed) for name in NAMES]
    mixed = datasets.interleave_datasets(sources, probabilities=list(rank.weights), seed=SEED)
    mine = split_dataset_by_node(mixed, rank.rank, rank.world_size)
    if rank.own_state is not None:
        mine.load_state_dict(rank.own_state)
    return DatasetsReader(mine, G // rank.world_size)


def _source(folder: Path, variant: Variant, is_streamed: bool) -> Any:
    found = datasets.Dataset.from_parquet(
        [str(path) for path in sorted(folder.glob("*.parquet"))],
        cache_dir=str(folder / "cache"),
    ).select_columns("id")
    if is_streamed:
        found = found.to_iterable_dataset(num_shards=NUM_SHARDS)
        found = found.shuffle(seed=SEED, buffer_size=BUFFER)
    if variant.is_filtered:
        found = found.filter(_passes)
    if variant.is_packed:
        found = found.map(_packed, batched=True, batch_size=60, remove_columns=["id"])
    if not is_streamed:
        found = found.shuffle(seed=SEED).to_iterable_dataset()
    return found.repeat(None)


def _passes(row: dict[str, int]) -> bool:
    return Variant(is_filtered=True).passes(row["id"])


def _packed(rows: dict[str, list[int]]) -> dict[str, list[list[int]]]:
    return {"ids": pack(rows["id"])}


class DatasetsReader:
    """See `Reader`."""

    def __init__(self, mine: Any, size: int) -> None:
        """Read nothing yet."""
        self._mine, self._size = mine, size

    def steps(self) -> Iterator[list[tuple[int, ...]]]:
        """See `Reader.steps`."""
        rows = iter(self._mine)
        while batch := list(islice(rows, self._size)):
            yield [tuple(row["ids"]) if "ids" in row else (row["id"],) for row in batch]

    def state(self) -> Any:
        """See `Reader.state`."""
        return self._mine.state_dict()
