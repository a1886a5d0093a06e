"""webdataset: `RandomMix` of two folders of tar shards. It has no state."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import webdataset

from benchmarks.loader.samples.mixed.documents import NAMES, SEED, G, Variant
from benchmarks.loader.samples.mixed.files import write_tars
from benchmarks.loader.samples.mixed.scenario import Rank

write = write_tars


def reader(rank: Rank) -> "WebReader":
    """A rank's shards, mixed."""
    random.seed(SEED)  # `RandomMix` draws from it
    sources = [_source(rank.folder / f"tar-{name}", rank.variant) for name in NAMES]
    mixed = webdataset.RandomMix(sources, list(rank.weights))
    return WebReader(mixed, G // rank.world_size)


def _source(folder: Path, variant: Variant) -> Any:
    found = webdataset.WebDataset(
        [str(path) for path in sorted(folder.glob("*.tar"))],
        shardshuffle=100,
        nodesplitter=webdataset.split_by_node,
        detshuffle=True,
        seed=SEED,
    )
    found = found.shuffle(100, seed=SEED).decode().map(_id_of)
    if variant.is_filtered:
        found = found.select(variant.passes)
    return found.repeat()


def _id_of(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


class WebReader:
    """See `Reader`."""

    def __init__(self, mixed: Any, size: int) -> None:
        """Read nothing yet."""
        self._mixed, self._size = mixed, size

    def steps(self) -> Iterator[list[tuple[int, ...]]]:
        """See `Reader.steps`."""
        rows = iter(self._mixed)
        while batch := list(islice(rows, self._size)):
            yield [(each,) for each in batch]

    def state(self) -> None:
        """There is none."""
