"""Measures how long a chain of transforms makes the samples of a dataset, once for each shard.

Packing, balance and layouts need to know that before anything is read. The samples of a shard are
read and transformed in the worker processes, which say how long the results are; these lengths are
kept in a sidecar. It belongs to the shard as it is, to the chain and to the samples that a filter
left, so that the next daemon measures only what it has not measured before.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import numpy as np

from gyre_daemon.datasets.formats import SampleIndex, stored_fields
from gyre_daemon.datasets.formats.base import Arrays, array_of
from gyre_daemon.datasets.sidecars.store import SidecarKey, SidecarStore
from gyre_daemon.errors import Overloaded, first_error
from gyre_daemon.fetching.batch_group import NOTHING_AHEAD
from gyre_daemon.fetching.portions import PortionPlan, PortionReader
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.storage.delays import Delays
from gyre_daemon.transforms.declared import TransformedDataset
from gyre_daemon.transforms.measured import Lengths, MeasuredIndex
from gyre_daemon.transforms.messages import Kind

SUFFIX = ".gyre-lengths"
_LENGTHS, _VERSION = "lengths", "lengths/1"
# Samples whose places are looked up together.
_AT_ONCE = 1 << 16
# Portions that are under way at once: enough for all processes while others are read, and few
# enough that the portions of jobs have their turns soon.
_MAX_PORTIONS = 32
# Chains whose lengths are kept in memory: 4 bytes for each sample. Others are read from sidecars.
_MAX_KEPT = 8

_Key = tuple[int, str, str]


@dataclass(slots=True)
class Measuring:
    """The measuring of one dataset, for all that wait for it.

    Attributes:
        num_shards: of the dataset.
        num_done: shards whose lengths are known.
        num_reused: those of them that had been measured before.
        num_samples: of the shards that are done.
        shard: the name of the one done last.
        task: does it, and returns the lengths of all samples.
    """

    num_shards: int
    num_done: int = 0
    num_reused: int = 0
    num_samples: int = 0
    shard: str = ""
    task: "asyncio.Task[Lengths] | None" = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def after(self, shard: str, num_samples: int, *, was_kept: bool) -> None:
        """One more shard is done."""
        self.num_done += 1
        self.num_reused += was_kept
        self.num_samples += num_samples
        self.shard = shard
        self.moved.set()


class Measurer:
    """Finds the lengths of transformed samples; all jobs of one chain wait for one measuring.

    Attributes:
        threads: the daemon's.
    """

    def __init__(self, sidecars: SidecarStore, threads: FairExecutor) -> None:
        """Measure nothing yet.

        Args:
            sidecars: keep what was measured.
            threads: the daemon's.
        """
        self._sidecars, self.threads = sidecars, threads
        self._flow = Flow("measuring")
        self._found: dict[_Key, Measuring] = {}

    async def measured(self, dataset: TransformedDataset) -> TransformedDataset:
        """The dataset with the lengths of its samples; waits until all are measured.

        A caller that no longer waits does not stop the measuring.

        Raises:
            CorruptSample: a sample cannot be transformed; names it.
            GyreError: a shard cannot be read, or no process can be started.
        """
        async for measuring in self.progress(dataset):
            if measuring.task and measuring.task.done():
                index = _measured_index(dataset, measuring.task.result())
                return replace(dataset, measured=index)
        raise AssertionError("measuring ends with a result")

    async def progress(self, dataset: TransformedDataset) -> AsyncIterator[Measuring]:
        """The state of the measuring, whenever it has moved; at last its task is done.

        Raises:
            GyreError: as `measured`.
        """
        measuring = self._begun(dataset)
        assert measuring.task
        while not measuring.task.done():
            measuring.moved.clear()
            await measuring.moved.wait()
            if not measuring.task.done():
                yield measuring
        measuring.task.result()
        yield measuring

    def close(self) -> None:
        """Stop what is being measured; shards that are done stay measured."""
        for measuring in self._found.values():
            if measuring.task:
                measuring.task.cancel()
        self._found.clear()

    def _begun(self, dataset: TransformedDataset) -> Measuring:
        key = id(dataset.storage), dataset.fingerprint, dataset.transforms
        measuring = self._found.pop(key, None)
        if measuring is None:
            measuring = Measuring(len(dataset.shards))
            measuring.task = asyncio.create_task(self._measure(dataset, measuring))
            measuring.task.add_done_callback(lambda task: self._ended(key, measuring))
            done = [each for each, its in self._found.items() if its.task and its.task.done()]
            for each in done[: max(0, len(done) + 1 - _MAX_KEPT)]:
                del self._found[each]
        self._found[key] = measuring
        return measuring

    def _ended(self, key: _Key, measuring: Measuring) -> None:
        """Wake those that wait; one that failed is tried again by the next that asks."""
        measuring.moved.set()
        task = measuring.task
        if task and (task.cancelled() or task.exception()) and self._found.get(key) is measuring:
            del self._found[key]

    async def _measure(self, dataset: TransformedDataset, measuring: Measuring) -> Lengths:
        index, num_shards = dataset.stored.index, len(dataset.shards)
        counts = await asyncio.to_thread(_samples_of_shards, index, num_shards)
        lengths = np.zeros((index.num_samples, len(dataset.made_ragged)), np.int32)
        reader = PortionReader(dataset, self.threads, seed=0)
        for shard, count in enumerate(counts):
            ids = np.arange(measuring.num_samples, measuring.num_samples + count)
            ids = ids[~np.isin(ids, dataset.corrupt)]
            lengths[ids], was_kept = await self._shard(dataset, reader, shard, ids)
            measuring.after(dataset.shards[shard].name, count, was_kept=was_kept)
            if not was_kept:
                facts = {"dataset": dataset.name, "shard": measuring.shard}
                log_event("shard measured", {**facts, "done": f"{shard + 1}/{num_shards}"})
        return lengths

    async def _shard(
        self, dataset: TransformedDataset, reader: PortionReader, shard: int, ids: Int64Array
    ) -> tuple[Lengths, bool]:
        """The lengths of a shard's samples, and whether they had been measured before."""
        listed, shape = dataset.shards[shard], (len(ids), len(dataset.made_ragged))
        chain, kind = await asyncio.to_thread(_identities, dataset, ids)
        sidecars = self._sidecars.sibling(f".{chain}{SUFFIX}")
        key = SidecarKey(dataset.uri, listed.name, listed.size_bytes, listed.version, kind)

        def check(arrays: Arrays) -> None:
            found = array_of(arrays, _LENGTHS, np.int32, 2)
            if found.shape != shape or (found < 0).any():
                raise ValueError("its lengths are not those of the shard's samples")

        arrays = await asyncio.to_thread(sidecars.load, key, None, check)
        if arrays is not None:
            return arrays[_LENGTHS], True
        try:
            lengths = await self._lengths_of(dataset, reader, ids)
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        await asyncio.to_thread(sidecars.try_to_save, key, None, {_LENGTHS: lengths})
        return lengths, False

    async def _lengths_of(
        self, dataset: TransformedDataset, reader: PortionReader, ids: Int64Array
    ) -> Lengths:
        lengths = np.zeros((len(ids), len(dataset.made_ragged)), np.int32)
        room = asyncio.Semaphore(_MAX_PORTIONS)
        async with asyncio.TaskGroup() as tasks:
            for begin in range(0, len(ids), _AT_ONCE):
                some = ids[begin : begin + _AT_ONCE]
                extents = dataset.index.locate(some)
                for part in reader.cut(extents, None):
                    its = some[part]
                    epochs = np.zeros(len(its), np.int64)
                    plan = PortionPlan(its, epochs, extents.part(part), begin, None)
                    into = lengths[begin:][part]
                    await room.acquire()
                    tasks.create_task(self._portion(reader, plan, into, room))
        return lengths

    async def _portion(
        self, reader: PortionReader, plan: PortionPlan, into: Lengths, room: asyncio.Semaphore
    ) -> None:
        try:
            async with reader.read(plan, self._flow, NOTHING_AHEAD, Delays()) as portion:
                answers = await reader.work(Kind.MEASURE, portion, self._flow)
            found = np.frombuffer(b"".join(each.lengths for each in answers), "<i4")
            if len(found) != into.size or (found < 0).any():
                raise Overloaded("a process that measures samples gave a wrong answer; try again")
            into[:] = found.reshape(into.shape)
        finally:
            room.release()


def _samples_of_shards(index: SampleIndex, num_shards: int) -> list[int]:
    """How many samples each shard has."""
    counts = np.zeros(num_shards, np.int64)
    for begin in range(0, index.num_samples, _AT_ONCE):
        ids = np.arange(begin, min(begin + _AT_ONCE, index.num_samples))
        counts += np.bincount(index.locate(ids).shard, minlength=num_shards)
    found: list[int] = counts.tolist()
    return found


def _identities(dataset: TransformedDataset, ids: Int64Array) -> tuple[str, str]:
    """What tells a chain from others, and what tells these samples under it from others."""
    all_of_it = dataset.recipe + dataset.transforms.encode()  # the recipe begins behind `cache`
    chain = hashlib.blake2b(all_of_it, digest_size=8)
    samples = hashlib.blake2b(all_of_it, digest_size=16)
    for begin in range(0, len(ids), _AT_ONCE):
        extents = dataset.stored.index.locate(ids[begin : begin + _AT_ONCE])
        samples.update(extents.start.astype("<i8").tobytes())
        samples.update(extents.size.astype("<i8").tobytes())
    return chain.hexdigest(), f"{_VERSION} {samples.hexdigest()}"


def _measured_index(dataset: TransformedDataset, lengths: Lengths) -> MeasuredIndex:
    passed = [spec for spec in dataset.fields if spec not in dataset.made]
    stored = stored_fields(dataset.source.fields)
    return MeasuredIndex(dataset.source.index, stored, dataset.made, passed, lengths)
