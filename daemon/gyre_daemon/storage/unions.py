"""Storages made of others: single files as one shard, and the shards of a mixture's sources.

[Note: Files that follow each other]

A dataset of single files is one shard for the layers above, in which each file comes after its
*head*, a few bytes that are kept in memory, such as its path. So a sample is a range of a shard, a
block is a run of neighbouring files, and the order, the cache and the index know nothing of files.
Only this module knows which range is which file.
"""

import asyncio
import ctypes
import hashlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from gyre_daemon.runtime.threads import Flow, compute
from gyre_daemon.storage.base import Delays, ReadPlan, Reads, ShardBounds, Storage, stream_by_reads
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.shard import FileTable, Integers, Shard, Texts, starts_of

_NAME = "files"  # of the one shard

# Reads that are computed on the event loop, in some 2 ms. More of them go through a thread, which
# costs a hop.
_MAX_ON_LOOP = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFiles(Shard):
    """All files as one shard.

    Attributes:
        table: the files.
        heads: of the files.
        starts: int64 [n + 1], where the head of each begins in the shard, and its end.
    """

    table: FileTable = field(repr=False, compare=False)
    heads: Texts = field(repr=False, compare=False)
    starts: Integers = field(repr=False, compare=False)

    def place_of(self, offset: int) -> tuple[str, int]:
        """See `Shard.place_of`. The bytes of a head count as the first of its file."""
        file = int(np.searchsorted(self.starts[:-1], offset, side="right")) - 1
        begin = int(self.starts[file]) + len(self.heads[file])
        return self.table.name(file), max(0, offset - begin)


class ConcatenatedFiles:
    """A `Storage` with one shard, made of the files of another one.

    Attributes:
        shards: the one shard.
        table: the files.
    """

    checksums = None
    block_cache = None

    def __init__(self, files: Storage, table: FileTable, heads: Texts, location: str) -> None:
        """Describe the shard.

        Args:
            files: each of its shards is a file.
            table: the files.
            heads: of the files.
            location: of the dataset, without credentials.
        """
        self.table = table
        self._files = files
        self._heads = heads
        self._head_memory = np.frombuffer(heads.data or b"\0", np.uint8)
        self._starts = starts_of(heads, table.sizes)
        self._location = location
        size, starts = int(self._starts[-1]), self._starts
        version = _version(table, heads)
        self.shards: Sequence[Shard] = [
            JoinedFiles(_NAME, size, version, table=table, heads=heads, starts=starts)
        ]
        self._bounds = ShardBounds(self.shards)

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`."""
        return self._files.is_node_local

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`."""
        await self._files.read(_FilePlan(plan, self))

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        return stream_by_reads(self, shard)

    def path(self, shard: int) -> str:
        """See `Storage.path`: where the files are."""
        return self._location

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`: the shard is no file."""
        return None

    def of_files(self, reads: Reads) -> Reads:
        """The reads of files that reads of the shard are; copies the heads among them."""
        self._bounds.check(reads)
        reads = reads.nonempty()
        first = np.searchsorted(self._starts, reads.start, side="right") - 1
        last = np.searchsorted(self._starts, reads.start + reads.size, side="left") - 1
        counts = last - first + 1
        if (counts == 1).all():
            row, file = np.arange(len(reads)), first
        else:
            row = np.repeat(np.arange(len(reads)), counts)
            file = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        # in each file: the bytes [begin, end) of its head and itself together
        begin = np.maximum(reads.start[row] - self._starts[file], 0)
        end = np.minimum(reads.start[row] + reads.size[row], self._starts[file + 1])
        end -= self._starts[file]
        target = reads.target[row] + (self._starts[file] + begin - reads.start[row]).astype(
            np.uint64
        )
        head_bytes = self._heads.ends[file + 1] - self._heads.ends[file]
        self._copy_heads(file, begin, np.minimum(end, head_bytes), target)
        before = np.maximum(head_bytes - begin, 0)
        start = np.maximum(begin - head_bytes, 0)
        size = end - np.maximum(begin, head_bytes)
        some = size > 0
        return replace(
            reads,
            shard=file[some],
            start=start[some],
            size=size[some],
            target=target[some] + before[some].astype(np.uint64),
            sample=reads.sample[row][some],
        )

    def _copy_heads(self, file: Integers, begin: Integers, end: Integers, target: object) -> None:
        """Copy the bytes `[begin, end)` of heads, where there are any."""
        some = np.flatnonzero(end > begin)
        if not len(some):
            return
        source = self._heads.ends[file[some]] + begin[some] + self._head_memory.ctypes.data
        size, into = end[some] - begin[some], np.asarray(target)[some]
        for each in zip(into.tolist(), source.tolist(), size.tolist(), strict=True):
            ctypes.memmove(*each)


def _version(table: FileTable, heads: Texts) -> str:
    """Changes whenever a file or a head does, since caches have both; empty if a file has none."""
    if not table.version or heads is table.names:
        return table.version
    return hashlib.blake2b(table.version.encode() + heads.data, digest_size=16).hexdigest()


class _FilePlan:
    """A plan whose reads are those of files."""

    def __init__(self, plan: ReadPlan, owner: ConcatenatedFiles) -> None:
        self._plan = plan
        self._owner = owner

    @property
    def num_bytes(self) -> int:
        return self._plan.num_bytes

    @property
    def flow(self) -> Flow:
        return self._plan.flow

    @property
    def urgency(self) -> int:
        return self._plan.urgency

    @property
    def delays(self) -> Delays | None:
        return self._plan.delays

    def __len__(self) -> int:
        return len(self._plan)

    def part(self, which: slice) -> Reads:
        return self._owner.of_files(self._plan.part(which))

    def lease(self) -> AbstractContextManager[None]:
        return self._plan.lease()


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
