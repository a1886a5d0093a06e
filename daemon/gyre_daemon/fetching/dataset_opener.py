"""Opens datasets as their definitions or their jobs want them.

Transforms come first, then measured lengths, filters on columns or lengths, and packing.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from msgspec import Struct, field

from gyre_daemon.config import DatasetConfig, mixture_height
from gyre_daemon.datasets.dataset import Dataset, Memo
from gyre_daemon.datasets.filters import Asked, apply_late, asked_of
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.errors import ConfigError, CorruptSample, InvalidRequest
from gyre_daemon.fetching.columns import (
    BEGUN,
    Measurer,
    Measuring,
    must_be_measured,
    with_measured,
)
from gyre_daemon.fetching.portions import PortionPlan, PortionReader
from gyre_daemon.fetching.transformed import MadeSources
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import NO_JOB, Claims, FairExecutor, compute
from gyre_daemon.storage.reads import Draws
from gyre_daemon.transforms.declared import STEP as CACHE
from gyre_daemon.transforms.declared import Lengths, TransformedDataset, Transforms
from gyre_daemon.transforms.recipes import Kind

# The first samples, which both make in a fraction of a second. More would delay the first job.
_NUM_SAMPLES = 1000
_MAX_KEPT = 64  # decisions, each a few words
_MAX_FILTERED = 1024  # as many as are configured
# Takes a dataset as it is stored; returns it with the transforms of its definition, measured, and
# nothing cached: a filtered dataset has other records than the whole.
Measure = Callable[[DatasetConfig, Dataset], Awaitable[TransformedDataset]]


class DatasetOpener:
    """Opens datasets of a catalog, which then opens sources of mixtures and filters by it."""

    def __init__(self, catalog: Catalog, transforms: Transforms, measurer: Measurer) -> None:
        """Open nothing yet.

        Args:
            catalog: the datasets.
            transforms: makes datasets whose samples are transformed.
            measurer: finds how long these samples are.
        """
        self._catalog = catalog
        self._transforms = transforms
        self._measurer = measurer
        self._engines = EngineVerifier(transforms, measurer.threads)
        self._sources = MadeSources(transforms, measurer.threads)
        catalog.open_source = self._open_source
        self._late = LateFilters(measurer, self._measured_documents)
        catalog.filter_late = self._late.of

    @property
    def measurings(self) -> list[Measuring]:
        """The measurements under way."""
        return self._measurer.under_way

    async def made(
        self,
        name: str,
        config: DatasetConfig,
        tables: Sequence[Mapping[str, Any]],
        *,
        by_client: bool,
        needs_lengths: bool = True,
        is_measured: bool = True,
    ) -> Dataset:
        """An open dataset: its samples transformed, measured where they differ in length, packed.

        Args:
            name: of the dataset.
            config: its definition.
            tables: the transforms; the samples are as they are stored if there are none.
            by_client: whether a client declared them.
            needs_lengths: whether limits of the lengths do not suffice. Packing needs lengths, too.
            is_measured: whether lengths, or their limits, must be known.

        Raises:
            GyreError: as `Catalog.open`, `Transforms.apply` and `Measurer.measured`.
        """
        if not tables:
            return await self._catalog.open(name, config)
        dataset = await self._transformed(name, config, tables, by_client=by_client)
        pack = config.pack
        if not pack and not is_measured:
            return dataset
        made = [spec.name for spec in dataset.fields[: dataset.num_made] if spec.ragged]
        if pack and pack.field not in made:
            there = ", ".join(made) or "none"
            raise InvalidRequest(
                f"`pack` names the field {pack.field!r:.100}, which the transforms do not make; of "
                f"those whose samples differ in length they make {there}. Name one of these, or "
                "leave the transforms out."
            )
        needs_lengths = needs_lengths or bool(pack) or config.on_corrupt == "replace"
        dataset = await self._measured(dataset, config, needs_lengths=needs_lengths)
        return await self._catalog.packed(dataset, pack) if pack else dataset

    async def _open_source(self, name: str, config: DatasetConfig) -> Dataset:
        """An open source of a mixture, as its own transforms make it.

        Raises:
            GyreError: as `open_dataset` and `MadeSources.of`.
        """
        if not config.transforms:
            return await self._catalog.open(name, config)
        dataset = await self._transformed(name, config, config.transforms, by_client=False)
        measured = await self._measured(dataset, config)
        return self._sources.of(name, measured, mixture_height(config, self._catalog.datasets))

    async def _measured_documents(
        self, config: DatasetConfig, documents: Dataset
    ) -> TransformedDataset:
        """A dataset without the filter of its definition, with its transforms, measured."""
        tables = [each for each in config.transforms if each["name"] != CACHE]
        dataset = await self._fastest(config, documents, tables, by_client=False)
        assert isinstance(dataset, TransformedDataset)
        return await self._measurer.measured(dataset, config)

    async def _measured(
        self, dataset: Dataset, config: DatasetConfig, *, needs_lengths: bool = True
    ) -> Dataset:
        """See `Measurer.measured`; records of the step `cache` were measured before."""
        if not isinstance(dataset, TransformedDataset):
            return dataset
        if not needs_lengths and self._late.lengths_of(dataset) is None:
            limited = dataset.with_limits()
            if limited:
                return limited
        return await self._measured_chain(dataset, config)

    async def _measured_chain(
        self, dataset: TransformedDataset, config: DatasetConfig
    ) -> TransformedDataset:
        """See `Measurer.measured`; a filter may have measured the samples already."""
        lengths = self._late.lengths_of(dataset)
        if lengths is None:
            return await self._measurer.measured(dataset, config)
        return with_measured(dataset, config, lengths)

    async def finding(
        self,
        name: str,
        config: DatasetConfig,
        tables: Sequence[Mapping[str, Any]],
        *,
        by_client: bool,
    ) -> AsyncGenerator[Measuring, None]:
        """Open a dataset, not packed, and yield the states of columns and lengths that it needs.

        See `made` for the arguments.

        Raises:
            GyreError: as `made`.
        """
        if not tables and not config.filter:
            return
        found: asyncio.Queue[Measuring | None] = asyncio.Queue()

        async def find() -> None:
            BEGUN.set(found)
            try:
                documents = replace(config, pack=None)
                await self.made(name, documents, tables, by_client=by_client)
            finally:
                found.put_nowait(None)

        finding = asyncio.create_task(find())
        try:
            while measuring := await found.get():
                async for each in measuring.states():
                    yield each
            await finding
        finally:
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)

    async def measuring(
        self,
        name: str,
        config: DatasetConfig,
        tables: Sequence[Mapping[str, Any]],
        shards: range,
        *,
        by_client: bool,
    ) -> AsyncIterator[Measuring]:
        """Measure the samples of these shards alone; see `made` for the other arguments.

        Raises:
            GyreError: as `made`.
        """
        documents = replace(config, pack=None)
        dataset = await self.made(name, documents, tables, by_client=by_client, is_measured=False)
        if isinstance(dataset, TransformedDataset) and must_be_measured(dataset, config):
            async for measuring in self._measurer.progress(dataset, config, shards):
                yield measuring

    async def _transformed(
        self,
        name: str,
        config: DatasetConfig,
        tables: Sequence[Mapping[str, Any]],
        *,
        by_client: bool,
    ) -> Dataset:
        documents = await self._catalog.open(name, replace(config, pack=None))
        return await self._fastest(config, documents, tables, by_client=by_client)

    async def _fastest(
        self,
        config: DatasetConfig,
        documents: Dataset,
        tables: Sequence[Mapping[str, Any]],
        *,
        by_client: bool,
    ) -> Dataset:
        ready = partial(self._ready, config)
        dataset = await self._transforms.apply(
            documents,
            tables,
            ready,
            by_client=by_client,
            height=mixture_height(config, self._catalog.datasets),
        )
        if not isinstance(dataset, TransformedDataset):
            return dataset
        return await self._engines.fastest(dataset)

    async def _ready(
        self,
        config: DatasetConfig,
        prefix: TransformedDataset,
        is_last: bool,
    ) -> TransformedDataset:
        """Results of the transforms before `cache`, by their engine, measured; see `Ready`."""
        prefix = await self._engines.fastest(prefix)
        # records of one size are tried by the transforms behind them, if there are any
        if is_last or prefix.made_ragged:
            return await self._measured_chain(prefix, config)
        return prefix


class _Filtered(Struct, frozen=True):
    """The rest of a dataset that was filtered.

    Attributes:
        left: the dataset without the samples that were left out.
        transforms: tells the transforms whose lengths were compared; empty for none.
        lengths: of the remaining samples under these, by field.
    """

    left: Dataset
    transforms: str = ""
    lengths: Mapping[str, Lengths] = field(default_factory=dict)


class LateFilters:
    """Filters each dataset once, and again when it or its definition is another."""

    def __init__(self, columns: Measurer, measure: Measure) -> None:
        """Filter nothing yet.

        Args:
            columns: reads stored columns.
            measure: see `Measure`.
        """
        self._columns, self._measure = columns, measure
        self._filtered: Memo[_Filtered] = Memo(_MAX_FILTERED)
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
            rules = config.filter, config.transforms, config.on_corrupt, config.max_corrupt
            found = self._filtered.get(name, dataset, rules)
            if found is None:
                found = await self._filter(asked, config, dataset)
                self._filtered.keep(found, name, dataset, rules)
            return found.left

    def lengths_of(self, dataset: TransformedDataset) -> Lengths | None:
        """Known lengths of a filtered dataset's samples under its transforms."""
        names = [spec.name for spec in dataset.made_ragged]
        for kept in self._filtered:
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
            return _Filtered(left, transforms, some)
        return _Filtered(left)


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


class EngineVerifier:
    """Chooses the engine of each chain of a dataset, and remembers it."""

    def __init__(self, transforms: Transforms, threads: FairExecutor) -> None:
        """Choose nothing yet.

        Args:
            transforms: of the daemon.
            threads: the daemon's.
        """
        self._transforms, self._threads = transforms, threads
        self._chosen: Memo[str] = Memo(_MAX_KEPT)
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    async def fastest(self, dataset: TransformedDataset) -> TransformedDataset:
        """The dataset, transformed by the fastest engine that makes the same of its first samples.

        Raises:
            GyreError: a shard cannot be read, or no process can be started.
        """
        if not dataset.engines:
            return dataset
        key = id(dataset.storage), dataset.fingerprint, dataset.transforms
        async with self._locks.setdefault(key, asyncio.Lock()):
            engine = self._chosen.get(key)
            if engine is None:
                engine = self._chosen.keep(await self._choose(dataset), key)
        return await self._transforms.with_engine(dataset, engine) if engine else dataset

    async def _choose(self, dataset: TransformedDataset) -> str:
        for engine in dataset.engines:
            facts = {"dataset": dataset.name, "engine": engine}
            try:
                await self._verify(await self._transforms.with_engine(dataset, engine))
            except (ConfigError, CorruptSample) as error:
                log_event("engine not used", {**facts, "reason": error})
            else:
                log_event("engine verified", facts)
                return engine
        return ""

    async def _verify(self, dataset: TransformedDataset) -> None:
        """Compare the engine's results for the first samples.

        Raises:
            CorruptSample: names one of which it makes something else.
        """
        reader = PortionReader(dataset, self._threads)
        ids = np.arange(min(_NUM_SAMPLES, dataset.index.num_samples))
        ids = ids[~np.isin(ids, dataset.corrupt)]
        extents = dataset.index.locate(ids)
        for some in reader.cut(extents, None):
            draws = Draws.first(len(ids[some]))
            plan = PortionPlan(ids[some], draws, extents.part(some), some.start, None)
            claims = Claims(NO_JOB, some.start)
            async with reader.transformed(plan, claims, kind=Kind.VERIFY):
                pass  # `CorruptSample` names a difference
