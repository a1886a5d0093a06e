"""Filters that compare stored columns or lengths that transforms make: see `filtering.late`."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.filtering.late import Asked, apply_late, asked_of
from gyre_daemon.errors import ConfigError
from gyre_daemon.fetching.measuring.columns import ColumnReader
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.measured import Lengths

# Takes a dataset as it is stored; returns it with the transforms of its definition, measured.
Measure = Callable[[DatasetConfig, Dataset], Awaitable[TransformedDataset]]


@dataclass(frozen=True, slots=True)
class _Filtered:
    """A dataset that was filtered: of which one, how, and what is left.

    Attributes:
        recipe: of the transforms whose lengths were compared; empty for none.
        lengths: what these make of the samples that are left.
    """

    stored: Dataset
    config: DatasetConfig
    left: Dataset
    recipe: bytes = b""
    lengths: Lengths | None = None


class LateFilters:
    """Filters each dataset once, and again when it or its definition is another."""

    def __init__(self, columns: ColumnReader, measure: Measure) -> None:
        """Filter nothing yet.

        Args:
            columns: reads stored columns.
            measure: see `Measure`.
        """
        self._columns, self._measure = columns, measure
        self._kept: dict[str, _Filtered] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, name: str, config: DatasetConfig, dataset: Dataset) -> Dataset:
        """The dataset with the samples that its filter leaves.

        Args:
            name: of the dataset in the catalog.
            config: of the dataset.
            dataset: as it is stored; filtered already, where the index knows all that is compared.

        Raises:
            ConfigError: the filter does not fit, or leaves none.
            GyreError: what it compares cannot be read.
        """
        asked = asked_of(config.filter, dataset.fields) if config.filter else None
        if not asked:
            return dataset
        if config.append:
            raise ConfigError(
                f"the filter {config.filter!r:.200} compares what only the samples have, and a "
                "dataset with `append` is filtered by its index alone; leave one of them out"
            )
        async with self._locks.setdefault(name, asyncio.Lock()):
            kept = self._kept.get(name)
            if kept is None or kept.stored is not dataset or not _alike(kept.config, config):
                kept = await self._filter(asked, config, dataset)
                self._kept[name] = kept
            return kept.left

    def lengths_of(self, dataset: TransformedDataset) -> Lengths | None:
        """What is known of the lengths of a filtered dataset's samples under its transforms."""
        for kept in self._kept.values():
            if kept.left is dataset.stored and kept.recipe == dataset.recipe:
                return kept.lengths
        return None

    async def _filter(self, asked: Asked, config: DatasetConfig, dataset: Dataset) -> _Filtered:
        columns = [await self._columns.read(dataset, name) for name in asked.columns]
        made = {}
        measured: TransformedDataset | None = None
        if asked.lengths and config.transforms:
            measured = await self._measure(config, dataset)
            dataset_lengths = measured.measured.lengths if measured.measured else np.empty((0, 0))
            for place, spec in enumerate(measured.made_ragged):
                if spec.name in asked.lengths:
                    made[spec.name] = dataset_lengths[:, place].astype(np.int64)
        left, ids = await asyncio.to_thread(apply_late, dataset, config.filter, columns, made)
        if measured and measured.measured and config.on_corrupt != "replace":
            lengths = measured.measured.lengths[ids]
            return _Filtered(dataset, config, left, measured.recipe, lengths)
        return _Filtered(dataset, config, left)


def _alike(first: DatasetConfig, second: DatasetConfig) -> bool:
    keys = ("filter", "transforms", "on_corrupt", "max_corrupt")
    return all(getattr(first, key) == getattr(second, key) for key in keys)
