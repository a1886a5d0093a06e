"""Measures how long the results of a shard's samples are, once: they are kept in a sidecar.

A sidecar belongs to the shard as it is, to the chain of transforms and to the samples that a filter
left.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptRecord, CorruptReports, check_limit
from gyre_daemon.datasets.dataset import shard_bounds
from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.shard_worker import Damage, from_arrays, to_arrays
from gyre_daemon.datasets.sidecars import SidecarKey, SidecarStore
from gyre_daemon.errors import CorruptSample, first_error
from gyre_daemon.fetching.fetch import NOTHING_AHEAD
from gyre_daemon.fetching.measuring.columns import ColumnReader
from gyre_daemon.fetching.measuring.shared_work import SharedWork, WorkByKey
from gyre_daemon.fetching.portions import PortionPlan, PortionReader, ReadPortion
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.planner import NO_SAMPLES
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow, compute
from gyre_daemon.storage.base import Delays, Draws
from gyre_daemon.storage.cache.node import NodeCache
from gyre_daemon.fetching.portions import PortionPlan, PortionReader
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow, compute
from gyre_daemon.storage.base import Draws
from gyre_daemon.storage.delays import Delays
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.made_samples import Lengths

_SUFFIX = ".gyre-lengths"
# Samples whose places are looked up together.
AT_ONCE = 1 << 16
_LENGTHS, _VERSION, _VERSION_WITH_FAILURES = "lengths", "lengths/1", "lengths and failures/1"
# Portions that are under way at once: enough for all processes while others are read, and few
# enough that the portions of jobs have their turns soon.
_MAX_PORTIONS = 32
_Key = tuple[int, str, str, bool, range | None]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The samples of one shard.

    Attributes:
        dataset: as it is transformed.
        reader: of the dataset.
        shard: its number.
        ids: int64 [n], of its samples.
        goes_on: see `Measuring`.
        advance: is told how many samples were measured, with each portion.
    """

    dataset: TransformedDataset
    reader: PortionReader
    shard: int
    ids: Int64Array
    goes_on: bool
    advance: Callable[[int], None]


class ShardMeasurer:
    """Finds the lengths of the results of a shard's samples, or takes those that are kept."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Measure nothing yet.

        Args:
            sidecars: keep the lengths.
        """
        self._sidecars = sidecars
        self._flow = Flow("measuring")

    async def measured(self, part: ShardPart) -> tuple[Lengths, list[Damage], bool]:
        """The lengths of a shard's samples, its failures, and whether both were known before.

        The numbers of failures are places in the part.

        Raises:
            CorruptSample: a sample cannot be transformed, and none replaces it.
            GyreError: the shard cannot be read, or no process can be started.
        """
        dataset, num = part.dataset, len(part.ids)
        listed, shape = dataset.shards[part.shard], (num, len(dataset.made_ragged))
        chain, kind = await compute(_identities, part)
        sidecars = self._sidecars.sibling(f".{chain}{_SUFFIX}")
        key = SidecarKey(dataset.uri, listed.name, listed.size_bytes, listed.version, kind)

        def check(arrays: Arrays) -> None:
            found = array_of(arrays, _LENGTHS, np.int32, 2)
            if found.shape != shape or (found < 0).any():
                raise ValueError("its lengths are not those of the shard's samples")
            if part.goes_on:
                from_arrays(arrays, num)

        arrays = await sidecars.load(key, None, check)
        if arrays is not None:
            return arrays[_LENGTHS], from_arrays(arrays, num) if part.goes_on else [], True
        try:
            lengths, failures = await self._lengths_of(part)
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        arrays = {_LENGTHS: lengths, **(to_arrays(failures) if part.goes_on else {})}
        await sidecars.try_to_save(key, None, arrays)
        return lengths, failures, False

    async def _lengths_of(self, part: ShardPart) -> tuple[Lengths, list[Damage]]:
        dataset, ids = part.dataset, part.ids
        lengths = np.zeros((len(ids), len(dataset.made_ragged)), np.int32)
        failures: list[Damage] = []
        room = asyncio.Semaphore(_MAX_PORTIONS)
        async with asyncio.TaskGroup() as tasks:
            for begin in range(0, len(ids), AT_ONCE):
                some = ids[begin : begin + AT_ONCE]
                extents = dataset.index.locate(some)
                for its in part.reader.cut(extents, None):
                    draws = Draws.first(its.stop - its.start)
                    into = _Into(lengths, failures, begin + its.start)
                    await room.acquire()
                    plan = PortionPlan(some[its], draws, extents.part(its), begin, None)
                    tasks.create_task(self._portion(part, plan, into, room))
        return lengths, sorted(failures, key=lambda each: each.sample)

    async def _portion(
        self, part: ShardPart, plan: PortionPlan, into: "_Into", room: asyncio.Semaphore
    ) -> None:
        try:
            left = [(0, plan)]
            while left:
                begin, some = left.pop()
                try:
                    await self._measure_portion(part, some, into.lengths_at(begin, some))
                except CorruptSample as error:
                    if not part.goes_on:
                        raise
                    number = _number(some, error)
                    into.failures.append(_failure(into.first + begin + number, part, error))
                    left += [
                        (begin + each.start, some.part(each))
                        for each in (slice(0, number), slice(number + 1, len(some)))
                        if each.start < each.stop
                    ]
            part.advance(len(plan))
        finally:
            room.release()

    async def _measure_portion(self, part: ShardPart, plan: PortionPlan, into: Lengths) -> None:
        reader, claims = part.reader, Claims(self._flow, plan.urgency)
        try:
            async with reader.read(plan, claims, NOTHING_AHEAD, Delays()) as portion:
                into[:], _ = await reader.measure(portion, claims)
        except ExceptionGroup as errors:  # of records that are made before they are kept
            raise first_error(errors) from errors


@dataclass(frozen=True, slots=True)
class _Into:
    """Where the results of a portion go.

    Attributes:
        lengths: of all samples of the shard.
        failures: of the shard.
        first: the place of the portion in the shard.
    """

    lengths: Lengths
    failures: list[Damage]
    first: int

    def lengths_at(self, begin: int, plan: PortionPlan) -> Lengths:
        """Those of a part of the portion."""
        return self.lengths[self.first + begin :][: len(plan)]


def _number(plan: PortionPlan, error: CorruptSample) -> int:
    """Which sample of a portion an error is about."""
    (found,) = np.nonzero(plan.sample_ids == int(error.facts["sample_id"]))
    return int(found[0])


def _failure(place: int, part: ShardPart, error: CorruptSample) -> Damage:
    """An error as damage of the shard, where it may name a file and a byte of that."""
    extents = part.dataset.stored.index.locate(np.array([int(error.facts["sample_id"])]))
    start, shard = int(extents.start[0, 0]), part.dataset.shards[int(extents.shard[0])]
    offset = start - shard.place_of(start)[1] + int(error.facts["offset"])
    by, reason = error.facts.get("transform"), str(error.facts["reason"])
    return Damage(place, offset, f"{by}: {reason}" if by else reason)


def _identities(part: ShardPart) -> tuple[str, str]:
    """The keys of a chain, and of these samples under it."""
    dataset, ids = part.dataset, part.ids
    version = _VERSION_WITH_FAILURES if part.goes_on else _VERSION
    # the recipe begins behind `cache`
    all_of_it = dataset.recipe + dataset.transforms.encode() + version.encode()
    chain = hashlib.blake2b(all_of_it, digest_size=8)
    samples = hashlib.blake2b(all_of_it, digest_size=16)
    for begin in range(0, len(ids), AT_ONCE):
        extents = dataset.stored.index.locate(ids[begin : begin + AT_ONCE])
        samples.update(extents.start.astype("<i8").tobytes())
        samples.update(extents.size.astype("<i8").tobytes())
    return chain.hexdigest(), f"{version} {samples.hexdigest()}"


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
    """

    goes_on: bool = False
    dataset: str = ""
    num_total: int = 0
    began_s: float = field(default_factory=time.monotonic)
    num_samples: int = 0
    num_in_shard: int = 0
    num_known: int = 0
    num_waiting: int = 0

    @property
    def is_wanted(self) -> bool:
        """See `SharedWork.is_wanted`."""
        return bool(self.num_waiting)

    def advance(self, num: int) -> None:
        """Some samples of the shard in hand are measured."""
        self.num_in_shard += num


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
    ) -> None:
        """Measure nothing yet.

        Args:
            sidecars: keep the lengths.
            threads: the daemon's.
            reports: of samples that cannot be transformed and that others replace.
        """
        self.threads, self._reports = threads, reports
        self.columns = ColumnReader(sidecars, threads)
        self._shards = ShardMeasurer(sidecars)
        self._measurings: WorkByKey[_Key, Measuring] = WorkByKey()

    async def measured(
        self, dataset: TransformedDataset, config: DatasetConfig
    ) -> TransformedDataset:
        """The dataset with the lengths of its samples; waits until all are measured.

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
        async for measuring in self.progress(dataset, config):
            if measuring.task and measuring.task.done():
                return with_measured(dataset, config, measuring.task.result())
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
        shards: range | None = None,
    ) -> AsyncIterator[Measuring]:
        """The state of the measuring, whenever it has moved; at last its task is done.

        Raises:
            GyreError: as `measured`.
        """
        goes_on = config.on_corrupt == "replace"
        measuring = self._begun(dataset, goes_on=goes_on, shards=shards)
        measuring.num_waiting += 1
        try:
            async for each in measuring.states():
                yield each
        finally:
            measuring.num_waiting -= 1

    def close(self) -> None:
        """Stop all measurements and reads; shards that are done stay so."""
        self.columns.close()
        self._measurings.close()

    def _begun(
        self,
        dataset: TransformedDataset,
        *,
        goes_on: bool,
        shards: range | None,
    ) -> Measuring:
        key = id(dataset.storage), dataset.fingerprint, dataset.transforms, goes_on, shards

        def begin() -> Measuring:
            measuring = Measuring(len(dataset.shards), goes_on=goes_on, dataset=dataset.name)
            measuring.num_total = dataset.index.num_samples
            measuring.begin(
                self._measure(dataset, measuring, shards), partial(self._ended, key, measuring)
            )
            return measuring

        return self._measurings.begun(key, begin)

    def _ended(self, key: _Key, measuring: Measuring) -> None:
        """One that failed is tried again by the next that asks."""
        if measuring.has_failed:
            self._measurings.forget(key, measuring)

    async def _measure(
        self, dataset: TransformedDataset, measuring: Measuring, shards: range | None
    ) -> Measured:
        index, num_shards = dataset.stored.index, len(dataset.shards)
        bounds = await compute(shard_bounds, index, num_shards)
        lengths = np.zeros((index.num_samples, len(dataset.made_ragged)), np.int32)
        reader = PortionReader(dataset, self.threads)
        failures: list[CorruptRecord] = []
        for shard, count in enumerate(np.diff(bounds).tolist()):
            if shards is not None and shard not in shards:
                measuring.num_samples += count
                continue
            ids = np.arange(measuring.num_samples, measuring.num_samples + count)
            ids = ids[~np.isin(ids, dataset.corrupt)]
            part = ShardPart(dataset, reader, shard, ids, measuring.goes_on, measuring.advance)
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


def with_measured(
    dataset: TransformedDataset, config: DatasetConfig, found: Measured
) -> TransformedDataset:
    """A dataset with its measured lengths.

    Raises:
        CorruptSample: too many samples cannot be transformed.
    """
    before = dataset.source.failed
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
