"""Reads a range of samples in the order of their ids, for tools that read a dataset once.

Nothing is measured before: each sample is transformed once. Batches are read several at a time, and
come in order.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterator

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import first_error
from gyre_daemon.fetching.fetch import Fetcher
from gyre_daemon.fetching.layout import BatchLayout
from gyre_daemon.fetching.portions import PortionReader, Staging
from gyre_daemon.fetching.transformed import TransformingFetcher
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.order.steps import GroupPlan
from gyre_daemon.runtime.threads import Claims, FairExecutor, Flow
from gyre_daemon.transforms.declared import TransformedDataset

# Samples whose places are looked up together.
_AT_ONCE = 1 << 14
# Of a batch without transforms; one of a portion is as large as that. With smaller ones a client
# would spend its time on messages, and larger ones hold more memory: a call has three batches for
# each core, and two more.
_MAX_SAMPLES, _MAX_BYTES = 1024, 4 << 20
_AHEAD_PER_CORE, _AHEAD = 3, 2

Batch = tuple[BatchLayout, npt.NDArray[np.uint8]]


class RangeReader:
    """Reads ranges of one dataset."""

    def __init__(self, dataset: Dataset, threads: FairExecutor) -> None:
        """Read nothing yet.

        Args:
            dataset: an open one; if its samples are transformed, they need not be measured.
            threads: the daemon's.
        """
        self._dataset, self._flow = dataset, Flow("ranges")
        self._unmeasured: TransformingFetcher | None = None
        self._fetcher: Fetcher | TransformingFetcher
        if isinstance(dataset, TransformedDataset):
            self._fetcher = TransformingFetcher(dataset, threads)
            if dataset.made_ragged and not dataset.measured:
                self._unmeasured = self._fetcher
        else:
            self._fetcher = Fetcher(dataset, threads)
        self._threads = threads
        self._num_ahead = _AHEAD + _AHEAD_PER_CORE * len(os.sched_getaffinity(0))

    async def read(self, first: int, stop: int) -> AsyncGenerator[Batch, None]:
        """Yield the samples `[first, stop)`, without corrupt ones that others replace.

        Raises:
            CorruptSample: names shard, sample, offset and reason.
            GyreError: a shard cannot be read, or no process can be started.
        """
        ids = np.arange(first, min(stop, self._dataset.num_samples))
        ids = ids[~np.isin(ids, self._dataset.corrupt)]
        ahead: deque[asyncio.Task[Batch]] = deque()
        try:
            for step, some in enumerate(self._cut(ids)):
                ahead.append(asyncio.create_task(self._batch(step, some)))
                if len(ahead) > self._num_ahead:
                    yield await ahead.popleft()
            while ahead:
                yield await ahead.popleft()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _batch(self, step: int, ids: Int64Array) -> Batch:
        claims = Claims(self._flow, step)
        plan = GroupPlan(step, ids[None], None, np.zeros(1, np.int64))
        if self._unmeasured:
            fetch, memory = await self._unmeasured.read_unmeasured(plan, claims)
            return fetch.layout.batches[0], memory
        (fetch,) = self._fetcher.prepare(plan, 1)
        memory = np.empty(fetch.layout.num_bytes, np.uint8)
        layout = await self._fetcher.fill(fetch, Staging.of(memory), self._flow)
        return layout.batches[0], memory

    def _cut(self, ids: Int64Array) -> Iterator[Int64Array]:
        """Cut samples into batches."""
        dataset = self._dataset
        for begin in range(0, len(ids), _AT_ONCE):
            some = ids[begin : begin + _AT_ONCE]
            if self._unmeasured:
                assert isinstance(dataset, TransformedDataset)
                portions = PortionReader(dataset, self._threads)
                yield from (some[its] for its in portions.cut(dataset.index.locate(some), None))
                continue
            if dataset.packed:
                sizes = np.full(len(some), dataset.num_bytes // dataset.num_samples)
            else:
                extents = dataset.index.locate(some)
                sizes = np.maximum(extents.size, extents.tensor_bytes).sum(axis=1)
            ends, at = np.cumsum(sizes), 0
            while at < len(some):
                limit = _MAX_BYTES + (int(ends[at - 1]) if at else 0)
                fitting = int(np.searchsorted(ends, limit, side="right"))
                end = max(at + 1, min(fitting, at + _MAX_SAMPLES))
                yield some[at:end]
                at = end
