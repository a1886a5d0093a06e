"""The storages of a mixture's sources as one: their shards, one source behind the other."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import numpy as np

from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import ReadPlan, Storage
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.shard import Shard

# Reads that are computed on the event loop, in some 2 ms. More of them go through a thread, which
# costs a hop.
_MAX_ON_LOOP = 4096


class MixedStorage:
    """A `Storage` with the shards of several others.

    Attributes:
        shards: of all sources.
    """

    checksums = None
    block_cache = None

    def __init__(
        self, storages: Sequence[Storage], seeds: Sequence[Callable[[int], int] | None]
    ) -> None:
        """Join K storages.

        Args:
            storages: of the sources.
            seeds: K, each takes the seed of reads and returns that of the source; None where the
                source's bytes do not depend on chance.
        """
        self.shards: Sequence[Shard] = [shard for each in storages for shard in each.shards]
        self._storages, self._seeds = storages, seeds
        counts = [len(each.shards) for each in storages]
        self._first = [0, *np.cumsum(counts).tolist()]

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`: if all sources are."""
        return all(each.is_node_local for each in self._storages)

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`: all sources at once."""
        everything = slice(0, len(plan))
        if len(plan) <= _MAX_ON_LOOP:
            reads = plan.part(everything)
        else:
            reads = await compute(plan.part, everything)
        source = np.searchsorted(self._first, reads.shard, side="right") - 1
        async with asyncio.TaskGroup() as tasks:
            for number in np.unique(source).tolist():
                its = reads.part(np.flatnonzero(source == number))
                seed_of = self._seeds[number]
                draws = None
                if its.draws and seed_of:
                    draws = replace(its.draws, seed=seed_of(its.draws.seed))
                own = replace(its, shard=its.shard - self._first[number], draws=draws)
                tasks.create_task(self._storages[number].read(own))

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        storage, own = self._of(shard)
        return storage.stream(own)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        storage, own = self._of(shard)
        return storage.path(own)

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""
        storage, own = self._of(shard)
        return storage.local_file(own)

    def _of(self, shard: int) -> tuple[Storage, int]:
        number = bisect_right(self._first, shard) - 1
        return self._storages[number], shard - self._first[number]
