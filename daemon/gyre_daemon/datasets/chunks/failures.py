"""Finds the chunks of a dataset that cannot be decoded, and stores their numbers.

A shard's chunks are tried once for each version of it. Each is decoded as for a job.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import partial

import numpy as np

from gyre_daemon.datasets.checks.damage import Damage, from_arrays, to_arrays
from gyre_daemon.datasets.chunks.decoded import DecodedStorage
from gyre_daemon.datasets.formats.base import Arrays, DamagedSample, SampleIndex
from gyre_daemon.datasets.formats.indexes.chunk_index import Chunks, chunks_of
from gyre_daemon.datasets.sidecars.store import SidecarKey, SidecarStore
from gyre_daemon.errors import CorruptSample, first_error
from gyre_daemon.storage.base import Reads, Storage

CHUNKS_SUFFIX = ".gyre-chunks"


class ChunkFailures:
    """Tries the chunks of a daemon's datasets."""

    def __init__(self, sidecars: SidecarStore) -> None:
        """Try nothing yet.

        Args:
            sidecars: any kind; the findings are kept in the same folders.
        """
        self._sidecars = sidecars.sibling(CHUNKS_SUFFIX)

    async def samples(
        self, location: str, source: Storage, decoded: DecodedStorage, index: SampleIndex
    ) -> list[DamagedSample]:
        """All samples of chunks that cannot be decoded, in the order of their ids.

        Args:
            location: of the dataset, redacted.
            source: its shards, as they are stored.
            decoded: the same, decoded.
            index: of rows of their chunks.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: a shard cannot be read.
        """
        turns = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        found: list[DamagedSample] = []
        table, all_chunks = index.blocks(0), chunks_of(index)
        assert all_chunks is not None
        for shard in np.unique(all_chunks.shard).tolist():
            chunks = np.flatnonzero(all_chunks.shard == shard)
            listed = source.shards[shard]
            kind = f"chunks/1 {index.digest().hex()}"
            key = SidecarKey(location, listed.name, listed.size_bytes, listed.version, kind)
            check, local = partial(_check, len(chunks)), source.local_file(shard)
            arrays = await self._sidecars.load(key, local, check)
            if arrays is None:
                arrays = to_arrays(await _try_all(decoded, all_chunks, chunks.tolist(), turns))
                await self._sidecars.try_to_save(key, local, arrays)
            for damage in from_arrays(arrays, len(chunks)):
                chunk = int(chunks[damage.sample])
                first, stop = table.first_sample(np.array([chunk, chunk + 1])).tolist()
                found += [
                    DamagedSample(shard, sample, damage.offset, damage.reason)
                    for sample in range(first, stop)
                ]
        return found


async def _try_all(
    decoded: DecodedStorage, its: Chunks, chunks: Sequence[int], turns: asyncio.Semaphore
) -> list[Damage]:
    """Why chunks of a shard cannot be decoded, by their number among these."""

    async def attempt(number: int, chunk: int) -> Damage | None:
        async with turns:
            if not its.chunk_bytes[chunk]:
                return None
            target = np.empty(1, np.uint8)  # the whole chunk is decoded for it
            shard, base = int(its.shard[chunk]), int(its.base[chunk])
            try:
                await decoded.read(Reads.into([target], [shard], [base]))
            except ExceptionGroup as errors:
                error = first_error(errors)
                if not isinstance(error, CorruptSample):
                    raise
                reason = str(error.facts.get("reason", error))
                return Damage(number, its.pieces(chunk)[-1][0], reason)
            return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(*each)) for each in enumerate(chunks)]
    return [damage for task in tasks if (damage := task.result())]


def _check(num_chunks: int, arrays: Arrays) -> None:
    """Refuse stored failures that cannot be this shard's."""
    from_arrays(arrays, num_chunks)
