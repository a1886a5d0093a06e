"""Reads of shards: their arrays, the storages that do them, and copies of many ranges at once.

[Note: One way to read]

All reads go through `Storage.read`, which takes a `ReadPlan`: any number of items (samples of a
batch group, blocks, ranges) whose reads can be asked for in parts. A storage decides where the
arrays of reads are worked out. A local one cuts the plan and works out each part in the thread that
copies it; the others ask for all of it at once. `Reads`, whose arrays exist already, are a plan
too. All that the layers above know about a storage is a declared property of it, never its type.

[Note: Samples of sources that depend on chance]

A mixture reads a sample of a source as bytes at a place. Where the source's transforms draw random
numbers, these bytes depend on a seed and an epoch, too: so its reads bring both, `Draws`, the epoch
being that of the sample in its own source. Each mixture that a read passes turns the seed into that
of the source, as its order does. So a sample is what a job on that source alone would get, under
the source's seed.

[Note: Files that follow each other]

A dataset of single files is one shard for the layers above, in which each file comes after its
*head*, a few bytes that are kept in memory, such as its path. So a sample is a range of a shard, a
block is a run of neighbouring files, and the order, the cache and the index know nothing of files.
Only this module knows which range is which file.

[Note: Copying many ranges]

A plain copy out of a mapping takes one Python call per sample, holds the interpreter's lock through
every page fault, and dies of SIGBUS where the file was truncated. `process_vm_readv(2)` and
`process_vm_writev(2)` on one's own process take 1024 ranges per call, and report a missing page as
a short count. The first looks up and pins every page that it reads, the second every page that it
writes. Written pages are adjacent and read pages are not, so writing is cheaper for small ranges.
Large ranges are read: that is faster out of huge pages, and otherwise no slower.
"""

import asyncio
import ctypes
import errno
import functools
import hashlib
import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import first_error
from gyre_daemon.runtime.threads import NO_JOB, Claims, Flow, compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.open_shards import ShardChecksums
from gyre_daemon.storage.shard import (
    FileTable,
    Integers,
    Shard,
    Texts,
    sizes_of,
    starts_of,
    truncated,
)


@dataclass(frozen=True, slots=True)
class RequestDelays:
    """Where one request's time went.

    Attributes:
        shard: its name.
        start: the first requested byte.
        stop: the byte after the last.
        queue_s: time in the queue before the first attempt.
        tried_s: time spent on attempts that failed, and on pauses between them.
        first_byte_s: time from sending the successful attempt to its first byte.
        body_s: time from the first byte to the last.
        num_tries: attempts, hedges included.
    """

    shard: str
    start: int
    stop: int
    queue_s: float
    tried_s: float
    first_byte_s: float
    body_s: float
    num_tries: int

    @property
    def total_s(self) -> float:
        """Time from the request to the last byte."""
        return self.queue_s + self.tried_s + self.first_byte_s + self.body_s


@dataclass(slots=True)
class Delays:
    """How long some reads took, and the requests that they became.

    Attributes:
        read_s: time until the last byte was in memory.
        storage_s: the part of `read_s` spent waiting for the storage; the rest is copying, and
            waiting for a thread.
        finish_s: time from there until everything was checked and decoded, waiting for a thread
            included.
        num_requests: ranges that were needed.
        num_joined: ranges that another read was already fetching.
        num_refused: responses with status 429 or 503.
        num_retries: requests sent again after a failure.
        num_hedges: requests sent again because the first was late.
        num_bytes: bytes received.
        slowest: the request that took longest, if any was sent.
    """

    read_s: float = 0.0
    storage_s: float = 0.0
    finish_s: float = 0.0
    num_requests: int = 0
    num_joined: int = 0
    num_refused: int = 0
    num_retries: int = 0
    num_hedges: int = 0
    num_bytes: int = 0
    slowest: RequestDelays | None = None

    def add_requests(self, other: "Delays") -> None:
        """Count the requests of reads that were done at the same time as these."""
        for name in ("num_requests", "num_joined", "num_refused", "num_retries", "num_hedges"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_bytes += other.num_bytes
        slowest = [each for each in (self.slowest, other.slowest) if each]
        self.slowest = max(slowest, key=lambda each: each.total_s, default=None)


# Fields of one sample that lie this close together are read with one request. A larger gap would
# transfer more bytes that nobody needs; a smaller one would send more requests.
MAX_GAP_BYTES = 4096
STREAM_CHUNK_BYTES = 8 << 20

NextUse = Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.int64]]


class ArenaClosed(Exception):
    """The arena was closed: nobody waits for the bytes that would be written there."""


class WritableArena(Protocol):
    """An arena, for code that writes into it."""

    @property
    def key(self) -> int:
        """The arena's name."""

    @property
    def address(self) -> int:
        """The address of its first byte."""

    def lease(self) -> AbstractContextManager[None]:
        """Keep the arena's memory inside the context; raises ArenaClosed if it is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """The seeds of n samples or reads; their random numbers follow from these and the ids.

    Attributes:
        seed: of the job, or of a source of its mixture.
        epochs: int64 [n], of each one's own source.
    """

    seed: int
    epochs: npt.NDArray[np.int64]

    @classmethod
    def first(cls, num: int) -> "Draws":
        """Those under which samples are measured and verified: seed 0 and epoch 0."""
        return cls(0, np.zeros(num, np.int64))

    def part(self, which: slice | npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Draws":
        """Those of some."""
        return Draws(self.seed, self.epochs[which])


class ReadPlan(Protocol):
    """Reads that a storage asks for, all at once or in parts."""

    @property
    def num_bytes(self) -> int:
        """About how many bytes all parts read."""

    @property
    def flow(self) -> Flow:
        """The job that reads."""

    @property
    def urgency(self) -> int:
        """Among the job's reads the lowest goes first."""

    @property
    def delays(self) -> Delays | None:
        """Records how long the reads took."""

    def __len__(self) -> int:
        """The number of items."""

    def part(self, which: slice) -> "Reads":
        """The reads of some items; any thread may ask, for each item once."""

    def lease(self) -> AbstractContextManager[None]:
        """Keep the memory of all targets inside the context; raises ArenaClosed if it is gone."""


@dataclass(frozen=True, slots=True)
class Reads:
    """n reads as arrays, so that no sample costs an object. They are a `ReadPlan` of n items.

    Read i copies the bytes `[start[i], start[i] + size[i])` of shard `shard[i]` to the writable
    memory at `target[i]`. Reads of one sample are adjacent and sorted by start, and a storage may
    combine them into one request.

    Attributes:
        shard: int64 [n].
        start: int64 [n].
        size: int64 [n], in bytes.
        target: uint64 [n], addresses.
        sample: int64 [n], equal for reads of one sample.
        memory: owners of targets outside the arena; kept until the last byte is written, even if
            the caller has been cancelled.
        flow: the job that reads.
        urgency: among the job's reads the lowest goes first.
        block_bytes: a cache should fetch whole blocks of about this size, because the job soon
            reads a range around these bytes; 0 lets the cache choose.
        next_use: a bound method that takes a cache's `block_bytes` and int64 [m] blocks of that
            size, and returns int64 [m]: in how many samples from now the job reads each block. None
            if the job's future is unknown.
        delays: records how long the requests took.
        arena: where targets lie. The caller of `read` holds a lease of it while it waits. A thread
            that writes there holds its own, because it continues if the caller is cancelled.
        claims: the job, and others that may come to need the same bytes; None if nobody else can.
        draws: the seed and epochs [n], where bytes depend on them; see [Note: Samples of sources
            that depend on chance]. None where they do not.
    """

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    target: npt.NDArray[np.uint64]
    sample: npt.NDArray[np.int64]
    memory: tuple[object, ...]
    flow: Flow = NO_JOB
    urgency: int = 0
    block_bytes: int = 0
    next_use: NextUse | None = None
    delays: Delays | None = None
    arena: WritableArena | None = None
    claims: Claims | None = None
    draws: Draws | None = None

    def __len__(self) -> int:
        """The number of reads."""
        return len(self.shard)

    @property
    def num_bytes(self) -> int:
        """The bytes of all reads."""
        return int(self.size.sum())

    def part(self, which: slice | npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "Reads":
        """Some of the reads; for a slice the arrays are views."""
        return replace(
            self,
            shard=self.shard[which],
            start=self.start[which],
            size=self.size[which],
            target=self.target[which],
            sample=self.sample[which],
            draws=self.draws and self.draws.part(which),
        )

    def claimed(self) -> Claims:
        """Who needs these bytes."""
        return self.claims or Claims(self.flow, self.urgency)

    def lease(self) -> AbstractContextManager[None]:
        """Keep the memory of all targets inside the context; raises ArenaClosed if it is gone."""
        return self.arena.lease() if self.arena else nullcontext()

    def nonempty(self) -> "Reads":
        """The reads of at least one byte."""
        some = self.size > 0
        return self if some.all() else self.part(some)

    def of_shards(self, shards: npt.NDArray[np.int64]) -> "Reads":
        """The reads from some shards."""
        return self.part(np.isin(self.shard, shards))

    @classmethod
    def into(
        cls, memories: Sequence[npt.NDArray[np.uint8]], shards: Sequence[int], starts: Sequence[int]
    ) -> "Reads":
        """Reads that fill each array from a range of one shard."""
        return cls(
            np.array(shards, np.int64),
            np.array(starts, np.int64),
            np.array([memory.nbytes for memory in memories], np.int64),
            np.array([memory.ctypes.data for memory in memories], np.uint64),
            np.arange(len(memories)),
            tuple(memories),
        )


class BlockCache(Protocol):
    """A storage that fetches whole blocks and keeps them."""

    async def expect(self, block_bytes: int, blocks: npt.NDArray[np.int64], flow: Flow) -> None:
        """Fetch blocks before they are read, in this order, as memory becomes free.

        Args:
            block_bytes: about how large the blocks are.
            blocks: int64 [m], numbers of blocks of that size.
            flow: the job that will read them.
        """


class Storage(Protocol):
    """The shards of one dataset. Used from one event loop.

    Every method raises ShardMissing, NotAllowed or StorageUnavailable after its own retries, and
    CorruptSample where a shard is shorter than the read, or has changed since it was listed and its
    storage can tell. Each error names the shard, and may be the first member of an exception group.
    """

    shards: Sequence[Shard]

    @property
    def is_node_local(self) -> bool:
        """Whether this node holds all the bytes.

        Reads then wait for processors and not for responses, so small batches are best read in
        groups, and several requests at once gain nothing.
        """
        return False

    @property
    def checksums(self) -> ShardChecksums | None:
        """Checksums of the shards, where only their bytes tell whether they changed.

        None for remote shards: their etags tell.
        """
        return None

    @property
    def block_cache(self) -> BlockCache | None:
        """The cache that wants to know which blocks are read next; None if there is none."""
        return None

    async def read(self, plan: ReadPlan) -> None:
        """Do all reads of a plan, in any order, as many at once as the storage allows."""

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """A whole shard from its beginning, in chunks of some MiB.

        The next chunk is read while one is used.
        """
        size = self.shards[shard].size_bytes

        async def read(start: int) -> bytes:
            stop = min(start + STREAM_CHUNK_BYTES, size)
            return (await read_ranges(self, [shard], [start], [stop]))[0]

        ahead: asyncio.Task[bytes] | None = None
        try:
            for start in range(0, size, STREAM_CHUNK_BYTES):
                chunk, ahead = await (ahead or read(start)), None
                following = start + STREAM_CHUNK_BYTES
                if following < size:
                    ahead = asyncio.create_task(read(following))
                yield chunk
        finally:
            if ahead:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def path(self, shard: int) -> str:
        """A shard's path, with its scheme unless it is a local file."""

    def local_file(self, shard: int) -> LocalFile | None:
        """A shard on this machine's disk; None if it is not there."""
        return None


async def read_ranges(
    storage: Storage, shards: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[bytes]:
    """The n byte ranges `[start, stop)`, all read at once.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: a range cannot be read.
    """
    pieces = [np.empty(stop - start, np.uint8) for start, stop in zip(starts, stops, strict=True)]
    try:
        if pieces:
            await storage.read(Reads.into(pieces, shards, starts))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [piece.tobytes() for piece in pieces]


class ShardBounds:
    """Where the shards of a storage end: beyond a mapped file lies other memory."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._sizes = sizes_of(shards)

    def check(self, reads: Reads) -> None:
        """Refuse reads that extend beyond their shards.

        Raises:
            CorruptSample: names the first shard that is too short.
        """
        sizes = self._sizes if len(self._sizes) == 1 else self._sizes[reads.shard]
        outside = ((reads.start | reads.size) < 0) | (reads.start > sizes - reads.size)
        if outside.any():
            first = int(np.argmax(outside))
            shard = int(reads.shard[first])
            start, size = int(reads.start[first]), int(reads.size[first])
            available = max(0, int(self._sizes[shard]) - start)
            raise truncated(self._shards[shard].name, start, start + size, available)


_NAME = "files"  # of the one shard

# Reads computed on the event loop, in some 2 ms. More go through a thread, which costs a hop.
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


class ConcatenatedFiles(Storage):
    """A storage with one shard, made of the files of another one.

    Attributes:
        shards: the one shard.
        table: the files.
    """

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
        await self._files.read(cast("ReadPlan", _FilePlan(plan, self)))

    def path(self, shard: int) -> str:
        """See `Storage.path`: where the files are."""
        return self._location

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
        copy(source.astype(np.uint64), size, into)


def _version(table: FileTable, heads: Texts) -> str:
    """Changes whenever a file or a head does, since caches have both; empty if a file has none."""
    if not table.version or heads is table.names:
        return table.version
    return hashlib.blake2b(table.version.encode() + heads.data, digest_size=16).hexdigest()


class _FilePlan:
    """A plan whose reads are those of files; all else is as in the plan of the shard."""

    def __init__(self, plan: ReadPlan, owner: ConcatenatedFiles) -> None:
        self._plan = plan
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def __len__(self) -> int:
        return len(self._plan)

    def part(self, which: slice) -> Reads:
        return self._owner.of_files(self._plan.part(which))


class MixedStorage(Storage):
    """A storage with the shards of several others.

    Attributes:
        shards: of all sources.
    """

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


Addresses = npt.NDArray[np.uint64]
Sizes = npt.NDArray[np.int64]

_MAX_RANGES = 1024  # IOV_MAX
# Ranges are written up to this mean size and read above it. `benchmarks/loader/parts/gather.py`
# measures both; twice the value makes copies out of huge pages slower.
_MAX_WRITTEN_BYTES = 16 << 10

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p, ctypes.c_ulong,
        ctypes.c_void_p, ctypes.c_ulong,
        ctypes.c_ulong,
    ]  # fmt: skip


def gather(sources: Addresses, sizes: Sizes, targets: Addresses) -> int | None:
    """Copy `sizes[i]` bytes from address `sources[i]` to address `targets[i]`, for all i.

    Args:
        sources: uint64 [n]; mapped memory, whose pages may be gone.
        sizes: int64 [n], in bytes.
        targets: uint64 [n]; writable and not overlapping. The caller keeps both sides alive.

    Returns:
        None if everything was copied, otherwise the index of the first range that could not be
        read whole.

    Raises:
        OSError: the kernel does not allow it (EPERM, ENOSYS: see `is_allowed`).
    """
    out_of = _ranges(sources, sizes)
    writes = len(sizes) > 0 and int(sizes.sum()) <= _MAX_WRITTEN_BYTES * len(sizes)
    for begin in range(0, len(sizes), _MAX_RANGES):
        some = slice(begin, begin + _MAX_RANGES)
        into = _joined(targets[some], sizes[some])
        if writes:
            copied = _call_kernel(_libc.process_vm_writev, out_of[some], into)
        else:
            copied = _call_kernel(_libc.process_vm_readv, into, out_of[some])
        ends = np.cumsum(sizes[some])
        if copied != ends[-1]:
            return begin + int(np.searchsorted(ends, copied, side="right"))
    return None


def read_each(
    descriptors: Iterable[int], offsets: Sizes, sizes: Sizes, targets: Addresses
) -> int | None:
    """Do the same by one `preadv(2)` per range, where `gather` is not allowed.

    Args:
        descriptors: n files.
        offsets: int64 [n], in the files.
        sizes: int64 [n], in bytes.
        targets: uint64 [n]; see `gather`.

    Returns:
        See `gather`.
    """
    ranges = zip(descriptors, offsets.tolist(), sizes.tolist(), targets.tolist(), strict=False)
    for index, (descriptor, offset, size, target) in enumerate(ranges):
        memory, done = memory_at(target, size), 0
        try:
            while done < size and (count := os.preadv(descriptor, [memory[done:]], offset + done)):
                done += count
        except OSError:
            return index
        if done < size:
            return index
    return None


def _ranges(addresses: Addresses, sizes: Sizes) -> Addresses:
    """An array of `iovec`s: uint64 [n, 2]."""
    ranges = np.empty((len(sizes), 2), np.uint64)
    ranges[:, 0], ranges[:, 1] = addresses, sizes
    return ranges


def _joined(addresses: Addresses, sizes: Sizes) -> Addresses:
    """The same bytes in the same order as the fewest ranges, uint64 [m, 2]; n > 0."""
    begins = np.empty(len(sizes), np.bool_)
    begins[0] = True
    np.not_equal(addresses[1:], addresses[:-1] + sizes[:-1].astype(np.uint64), out=begins[1:])
    first = np.flatnonzero(begins)
    return _ranges(addresses[first], np.add.reduceat(sizes, first))


def _call_kernel(call: "ctypes._NamedFuncPointer", local: Addresses, remote: Addresses) -> int:
    """The number of bytes copied; the remote side is this process, too."""
    num_bytes: int = call(
        os.getpid(), local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0
    )
    if num_bytes < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return max(num_bytes, 0)


@functools.cache
def is_allowed() -> bool:
    """Whether this process may call `gather`; some sandboxes forbid it."""
    source, target = np.ones(1, np.uint8), np.zeros(1, np.uint8)
    try:
        failed = gather(address_of(source), np.ones(1, np.int64), address_of(target))
    except OSError:
        return False
    return failed is None and target[0] == 1


def copy(sources: Addresses, sizes: Sizes, targets: Addresses) -> None:
    """Copy ranges as `gather` does, from memory whose pages stay."""
    if is_allowed():
        gather(sources, sizes, targets)
        return
    for each in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(*each)


def address_of(array: npt.NDArray[np.uint8]) -> Addresses:
    """The address of an array's first byte, uint64 [1]."""
    return np.array([array.ctypes.data], np.uint64)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Writable memory at an address; the caller keeps it alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
