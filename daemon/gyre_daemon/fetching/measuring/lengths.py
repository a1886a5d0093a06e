"""Measures how long a chain of transforms makes the samples of a dataset, once for each shard.

Packing, balance and layouts need to know that before anything is read. The samples of a shard are
read and transformed in the worker processes, which say how long the results are; these lengths are
kept in a sidecar. It belongs to the shard as it is, to the chain and to the samples that a filter
left, so that the next daemon measures only the rest.

Where others replace corrupt samples, those that cannot be transformed are found in the same way,
and kept with the lengths.
"""

import hashlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks.samples import CorruptRecord, CorruptReports, check_limit
from gyre_daemon.datasets.formats import SampleIndex
from gyre_daemon.datasets.sidecars.store import SidecarStore
from gyre_daemon.fetching.measuring.columns import ColumnReader
from gyre_daemon.fetching.measuring.held import HeldRecords
from gyre_daemon.fetching.measuring.shards import AT_ONCE, ShardMeasurer, ShardPart
from gyre_daemon.fetching.measuring.shared_work import SharedWork, WorkByKey
from gyre_daemon.fetching.portions import PortionReader
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import FairExecutor, compute
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.kept import KeptDataset
from gyre_daemon.transforms.measured import Lengths

_Key = tuple[int, str, str, bool, range | None]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured lengths of a dataset.

    Attributes:
        lengths: of all samples; 0 for those that are corrupt.
        failures: the samples that cannot be transformed, in the order of their ids.
    """

    lengths: Lengths
    failures: list[CorruptRecord]


@dataclass(slots=True)
class Measuring(SharedWork[Measured]):
    """The measuring of one dataset.

    Attributes:
        goes_on: whether it goes on after a sample that cannot be transformed.
        dataset: its name.
        num_total: all samples.
        began_s: a time of the monotonic clock.
        num_samples: of the shards that are done.
        num_in_shard: that are measured of the shard in hand.
        num_known: of the shards that had been measured before.
        num_waiting: who waits for it.
        held: samples made meanwhile, where they are wanted; for the first that takes it.
    """

    goes_on: bool = False
    dataset: str = ""
    num_total: int = 0
    began_s: float = field(default_factory=time.monotonic)
    num_samples: int = 0
    num_in_shard: int = 0
    num_known: int = 0
    num_waiting: int = 0
    held: HeldRecords | None = None

    @property
    def is_wanted(self) -> bool:
        """See `SharedWork.is_wanted`."""
        return bool(self.num_waiting)

    def advance(self, num: int) -> None:
        """Some samples of the shard in hand are measured."""
        self.num_in_shard += num

    def take_held(self) -> HeldRecords | None:
        """The held samples; whoever takes them releases them."""
        held, self.held = self.held, None
        return held

    def release_if_unwanted(self) -> None:
        """Hold nothing once it is over and nobody waits."""
        if self.held and self.is_over and not self.num_waiting:
            self.held.release()
            self.held = None


class Measurer:
    """Finds the lengths of transformed samples; all jobs of one chain wait for one measuring.

    Attributes:
        threads: the daemon's.
        columns: reads stored columns once, as this measures.
    """

    def __init__(
        self,
        sidecars: SidecarStore,
        threads: FairExecutor,
        reports: CorruptReports,
        cache: NodeCache | None,
    ) -> None:
        """Measure nothing yet.

        Args:
            sidecars: keep the lengths.
            threads: the daemon's.
            reports: of samples that cannot be transformed and that others replace.
            cache: the node's.
        """
        self.threads, self._reports = threads, reports
        self.columns = ColumnReader(sidecars, threads)
        self._cache = cache
        self._shards = ShardMeasurer(sidecars)
        self._measurings: WorkByKey[_Key, Measuring] = WorkByKey()

    async def measured(
        self, dataset: TransformedDataset, config: DatasetConfig, *, keeps: bool = False
    ) -> TransformedDataset:
        """The dataset with the lengths of its samples; waits until all are measured.

        Where the caller `keeps` what is made, it has what is held, too, and must release that.

        A caller that no longer waits does not stop the measuring, unless there are many such ones
        (`WorkByKey`). Where others replace corrupt samples, they replace those that cannot be
        transformed, too.

        Raises:
            CorruptSample: a sample cannot be transformed, and none replaces it, or more cannot than
                `max_corrupt` allows; names the first.
            GyreError: a shard cannot be read, or no process can be started.
        """
        if not is_measured(dataset, config):
            return dataset
        async for measuring in self.progress(dataset, config, keeps=keeps):
            if measuring.task and measuring.task.done():
                found = with_measured(dataset, config, measuring.task.result())
                return replace(found, held=measuring.take_held()) if keeps else found
        raise AssertionError("measuring ends with a result")

    @property
    def under_way(self) -> list[Measuring]:
        """The measurements under way."""
        return [each for each in self._measurings.all if not each.is_over]

    async def progress(
        self,
        dataset: TransformedDataset,
        config: DatasetConfig,
        *,
        keeps: bool = False,
        shards: range | None = None,
    ) -> AsyncIterator[Measuring]:
        """The state of the measuring, whenever it has moved; at last its task is done.

        Raises:
            GyreError: as `measured`.
        """
        goes_on = config.on_corrupt == "replace"
        measuring = self._begun(dataset, goes_on=goes_on, keeps=keeps, shards=shards)
        measuring.num_waiting += 1
        try:
            async for each in measuring.states():
                yield each
        finally:
            measuring.num_waiting -= 1
            measuring.release_if_unwanted()

    def close(self) -> None:
        """Stop all measurements and reads; shards that are done stay so."""
        self.columns.close()
        self._measurings.close()

    def _begun(
        self,
        dataset: TransformedDataset,
        *,
        goes_on: bool,
        keeps: bool,
        shards: range | None,
    ) -> Measuring:
        key = id(dataset.storage), dataset.fingerprint, dataset.transforms, goes_on, shards

        def begin() -> Measuring:
            measuring = Measuring(len(dataset.shards), goes_on=goes_on, dataset=dataset.name)
            measuring.num_total = dataset.index.num_samples
            if keeps and self._cache:
                measuring.held = HeldRecords(dataset, self._cache)
            measuring.begin(
                self._measure(dataset, measuring, shards), partial(self._ended, key, measuring)
            )
            return measuring

        return self._measurings.begun(key, begin)

    def _ended(self, key: _Key, measuring: Measuring) -> None:
        """One that failed is tried again by the next that asks."""
        measuring.release_if_unwanted()
        if measuring.has_failed:
            self._measurings.forget(key, measuring)

    async def _measure(
        self, dataset: TransformedDataset, measuring: Measuring, shards: range | None
    ) -> Measured:
        index, num_shards = dataset.stored.index, len(dataset.shards)
        counts = await compute(_samples_of_shards, index, num_shards)
        lengths = np.zeros((index.num_samples, len(dataset.made_ragged)), np.int32)
        reader = PortionReader(dataset, self.threads)
        failures: list[CorruptRecord] = []
        for shard, count in enumerate(counts):
            if shards is not None and shard not in shards:
                measuring.num_samples += count
                continue
            ids = np.arange(measuring.num_samples, measuring.num_samples + count)
            ids = ids[~np.isin(ids, dataset.corrupt)]
            part = ShardPart(
                dataset, reader, shard, ids, measuring.goes_on, measuring.held, measuring.advance
            )
            lengths[ids], found, was_kept = await self._shards.measured(part)
            listed = dataset.shards[shard]
            failures += [
                CorruptRecord(*listed.place_of(each.offset), int(ids[each.sample]), each.reason)
                for each in found
            ]
            measuring.num_samples += count
            measuring.num_in_shard = 0
            measuring.num_known += count * was_kept
            measuring.after(listed.name, was_kept=was_kept)
            if not was_kept:
                facts = {"dataset": dataset.name, "shard": measuring.shard}
                log_event("shard measured", {**facts, "done": f"{shard + 1}/{num_shards}"})
        if measuring.goes_on and shards is None:
            identity = f"{dataset.uri} {dataset.transforms}"
            path = await self._reports.write(dataset.name, identity, failures)
            if failures:
                about = {"dataset": dataset.name, "samples": len(failures), "report": path}
                log_event("samples cannot be transformed", about, logging.WARNING)
        return Measured(lengths, failures)


def is_measured(dataset: TransformedDataset, config: DatasetConfig) -> bool:
    """Whether each sample of a dataset is transformed once before it is served."""
    return bool(dataset.made_ragged) or config.on_corrupt == "replace"


def _samples_of_shards(index: SampleIndex, num_shards: int) -> list[int]:
    """How many samples each shard has."""
    counts = np.zeros(num_shards, np.int64)
    for begin in range(0, index.num_samples, AT_ONCE):
        ids = np.arange(begin, min(begin + AT_ONCE, index.num_samples))
        counts += np.bincount(index.locate(ids).shard, minlength=num_shards)
    found: list[int] = counts.tolist()
    return found


def with_measured(
    dataset: TransformedDataset, config: DatasetConfig, found: Measured
) -> TransformedDataset:
    """A dataset with its measured lengths.

    Raises:
        CorruptSample: too many samples cannot be transformed.
    """
    before = dataset.source.failed if isinstance(dataset.source, KeptDataset) else NO_SAMPLES
    if found.failures or len(before):
        num_before, num_samples = len(dataset.corrupt), dataset.index.num_samples
        if found.failures:
            check_limit(dataset.name, found.failures, num_samples, config.max_corrupt, num_before)
        failed = np.array([each.sample_id for each in found.failures], np.int64)
        failed = np.union1d(before, failed)
        # the replaced samples are part of the transforms: the data are the same
        digest = hashlib.blake2b(dataset.transforms.encode(), digest_size=8)
        digest.update(failed.astype("<i8").tobytes())
        corrupt = np.union1d(dataset.corrupt, failed)
        dataset = replace(dataset, corrupt=corrupt, transforms=digest.hexdigest())
    return dataset.with_lengths(found.lengths) if dataset.made_ragged else dataset
