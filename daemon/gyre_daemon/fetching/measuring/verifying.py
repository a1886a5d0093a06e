"""Decides whether a faster program transforms a dataset: only if it makes the same of samples."""

import asyncio

import numpy as np

from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.fetching.fetch import NOTHING_AHEAD
from gyre_daemon.fetching.portions import PortionPlan, PortionReader
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import NO_JOB, Claims, FairExecutor
from gyre_daemon.storage.base import Draws
from gyre_daemon.storage.delays import Delays
from gyre_daemon.transforms.declared import TransformedDataset, Transforms
from gyre_daemon.transforms.messages import Kind

# The first samples, which both make in a fraction of a second. More would delay the first job.
_NUM_SAMPLES = 1000
_MAX_KEPT = 64  # decisions, each a few words

_Key = tuple[int, str, str]


class EngineVerifier:
    """Chooses the engine of each chain of a dataset, and remembers it."""

    def __init__(self, transforms: Transforms, threads: FairExecutor) -> None:
        """Choose nothing yet.

        Args:
            transforms: of the daemon.
            threads: the daemon's.
        """
        self._transforms, self._threads = transforms, threads
        self._chosen: dict[_Key, str] = {}
        self._lock = asyncio.Lock()

    async def fastest(self, dataset: TransformedDataset) -> TransformedDataset:
        """The dataset, transformed by the fastest engine that makes the same of its first samples.

        Raises:
            GyreError: a shard cannot be read, or no process can be started.
        """
        if not dataset.engines:
            return dataset
        key = id(dataset.storage), dataset.fingerprint, dataset.transforms
        async with self._lock:
            if key not in self._chosen:
                if len(self._chosen) >= _MAX_KEPT:
                    del self._chosen[next(iter(self._chosen))]
                self._chosen[key] = await self._choose(dataset)
        engine = self._chosen[key]
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
            async with reader.read(plan, claims, NOTHING_AHEAD, Delays()) as portion:
                await reader.work(Kind.VERIFY, portion, claims)
