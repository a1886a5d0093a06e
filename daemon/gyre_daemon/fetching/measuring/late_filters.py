"""Filters that compare stored columns or lengths that transforms make: see `filtering.late`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.filtering.late import Asked, apply_late, asked_of
from gyre_daemon.errors import ConfigError
from gyre_daemon.fetching.measuring.columns import ColumnReader, ColumnReading
from gyre_daemon.runtime.threads import compute
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.measured import Lengths

# Takes a dataset as it is stored; returns it with the transforms of its definition, measured, and
# nothing cached: a filtered dataset has other records than the whole.
Measure = Callable[[DatasetConfig, Dataset], Awaitable[TransformedDataset]]


@dataclass(frozen=True, slots=True)
class _Filtered:
    """A dataset that was filtered: which one, how, and its rest.

    Attributes:
        transforms: tells the transforms whose lengths were compared; empty for none.
        lengths: of the remaining samples under these, by field.
    """

    stored: Dataset
    config: DatasetConfig
    left: Dataset
    transforms: str = ""
    lengths: Mapping[str, Lengths] = field(default_factory=dict)


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
            GyreError: a value that it compares cannot be read.
        """
        asked = _asked(config, dataset)
        if not asked:
            return dataset
        async with self._locks.setdefault(name, asyncio.Lock()):
            kept = self._kept.get(name)
            if kept is None or kept.stored is not dataset or not _alike(kept.config, config):
                kept = await self._filter(asked, config, dataset)
                self._kept[name] = kept
            return kept.left

    async def reading(
        self, config: DatasetConfig, dataset: Dataset
    ) -> AsyncIterator[ColumnReading]:
        """Reads the columns that a filter compares, and says how far that is; `of` takes them.

        Raises:
            GyreError: as `of`.
        """
        for name in _asked(config, dataset).columns:
            async for each in self._columns.progress(dataset, name):
                yield each

    def lengths_of(self, dataset: TransformedDataset) -> Lengths | None:
        """Known lengths of a filtered dataset's samples under its transforms."""
        names = [spec.name for spec in dataset.made_ragged]
        for kept in self._kept.values():
            is_its = kept.left is dataset.stored and kept.transforms == dataset.transforms
            if is_its and names and kept.lengths.keys() >= set(names):
                return np.stack([kept.lengths[name] for name in names], axis=1)
        return None

    async def _filter(self, asked: Asked, config: DatasetConfig, dataset: Dataset) -> _Filtered:
        columns = [await self._columns.read(dataset, name) for name in asked.columns]
        lengths: dict[str, Lengths] = {}
        transforms = ""
        if asked.lengths and config.transforms:
            measured = await self._measure(config, dataset)
            transforms = measured.transforms
            for place, spec in enumerate(measured.made_ragged if measured.measured else ()):
                lengths[spec.name] = measured.measured.lengths[:, place]  # type: ignore[union-attr]
        made = {
            name: each.astype(np.int64) for name, each in lengths.items() if name in asked.lengths
        }
        left, ids = await compute(apply_late, dataset, config.filter, columns, made)
        if lengths and config.on_corrupt != "replace":
            some = {name: each[ids] for name, each in lengths.items()}
            return _Filtered(dataset, config, left, transforms, some)
        return _Filtered(dataset, config, left)


def _asked(config: DatasetConfig, dataset: Dataset) -> Asked:
    """The columns and lengths that a filter needs and the index lacks.

    Raises:
        ConfigError: the dataset may grow, and it asks for anything.
    """
    asked = asked_of(config.filter, dataset.fields)
    if asked and config.append:
        raise ConfigError(
            f"the filter {config.filter!r:.200} compares values that only the samples have, and a "
            "dataset with `append` is filtered by its index alone. Leave one of them out."
        )
    return asked


def _alike(first: DatasetConfig, second: DatasetConfig) -> bool:
    keys = ("filter", "transforms", "on_corrupt", "max_corrupt")
    return all(getattr(first, key) == getattr(second, key) for key in keys)
