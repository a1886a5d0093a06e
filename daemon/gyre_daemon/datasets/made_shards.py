"""Made shards: bytes that nobody stored, which a recipe makes when they are read.

[Note: Made shards] A made shard is a row of *cells*. A recipe knows their places and makes those
touched by a read: it decodes a chunk of stored rows (`DecodeRows`), or runs the beginning of a
chain of transforms on a sample (`fetching.transformed`). Cells are kept by the node cache and
nowhere else. So memory, disk, eviction by next use and counters are those of any cached shard.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
from msgspec import Struct

from gyre_daemon.datasets.formats.chunk_index import Chunks
from gyre_daemon.datasets.scanning import (
    MAX_REPLY_BYTES,
    SCAN,
    is_reply,
    scan_request,
    scanned,
)
from gyre_daemon.datasets.shard_worker import DecodeRequest
from gyre_daemon.errors import CorruptSample, StorageUnavailable
from gyre_daemon.order.permutation import Int64Array
from gyre_daemon.runtime.threads import Claims, FairExecutor
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.cache.blocks import BlockMap
from gyre_daemon.storage.open_shards import ShardChecksums
from gyre_daemon.storage.reads import Addresses, ReadPlan, Reads, ShardBounds, Storage, copy
from gyre_daemon.storage.shard import Shard
from gyre_daemon.workers.compute_workers import (
    ComputeServer,
    ComputeWorkers,
    Exchange,
    ExchangeRoom,
    WorkerLost,
    pages,
)

# Memory of chunks in fetching and decoding, of all datasets; one larger chunk has its
# turn alone. It is not part of any budget. Less would leave a slow storage idle.
_MAX_BYTES_AT_ONCE = 128 << 20
# Each takes a core while jobs wait for chunks, and some ten MiB. More than this would rarely be
# needed: one decodes some hundred MB a second.
_MAX_PROCESSES = 8
# A chunk that is not decoded after this long never will be: the largest takes seconds. A shorter
# time would fail chunks on a very busy machine.
MAX_DECODE_S = 120.0


class CellReads(Struct, frozen=True):
    """n reads of at least one byte, each in one cell, whose cells are made together.

    Attributes:
        cells: int64 [n], the numbers of the cells.
        reads: of the made shards.
    """

    cells: Int64Array
    reads: Reads


class CellMemory(Struct, frozen=True):
    """The memory with the bytes of n reads.

    Attributes:
        owner: keeps the memory as long as anything refers to it.
        sources: uint64 [n], the address of the first byte of each read.
    """

    owner: object
    sources: Addresses


class Recipe(Protocol):
    """How the cells of made shards are made.

    Attributes:
        shards: as large as they are made.
    """

    shards: Sequence[Shard]

    def split(self, reads: Reads) -> Iterable[CellReads]:
        """Group reads of at least one byte by the cells to make together."""

    def made(self, its: CellReads) -> AbstractAsyncContextManager[CellMemory]:
        """Make the cells of some reads, which stay inside the context.

        Raises:
            GyreError: a cell cannot be made.
        """


class MadeStorage:
    """A `Storage` of made shards; it keeps nothing.

    Attributes:
        shards: as large as they are made.
    """

    block_cache = None

    def __init__(
        self, recipe: Recipe, threads: FairExecutor, stored: Storage | None = None
    ) -> None:
        """Make nothing yet.

        Args:
            recipe: makes the cells.
            threads: the daemon's.
            stored: the shards that the made ones stand for, each for one; None for none.
        """
        self.shards = recipe.shards
        self._recipe, self._threads, self._stored = recipe, threads, stored
        self._bounds = ShardBounds(recipe.shards)

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`."""
        return self._stored is not None and self._stored.is_node_local

    @property
    def checksums(self) -> ShardChecksums | None:
        """See `Storage.checksums`: of the shards as they are stored."""
        return self._stored.checksums if self._stored else None

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; each cell is made once for all of the plan."""
        reads = plan.part(slice(None))
        self._bounds.check(reads)
        async with asyncio.TaskGroup() as tasks:
            for its in self._recipe.split(reads.nonempty()):
                tasks.create_task(self._read(its))

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`: the shard as it is stored."""
        if self._stored is None:
            raise StorageUnavailable("transformed samples are no file, and cannot be streamed")
        return self._stored.stream(shard)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return self._stored.path(shard) if self._stored else self.shards[shard].name

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`: made shards are no files."""
        return None

    async def _read(self, its: CellReads) -> None:
        reads = its.reads
        async with self._recipe.made(its) as memory:
            work = partial(self._copy, memory, reads)
            await self._threads.run_of(reads.claimed(), reads.num_bytes, work)

    def _copy(self, memory: CellMemory, reads: Reads) -> None:
        """Copy parts of cells to where they are wanted; runs in a thread."""
        with reads.lease():
            copy(memory.sources, reads.size, reads.target)


class Decoders:
    """Decodes chunks for all datasets of a daemon, fairly between jobs.

    Attributes:
        threads: the daemon's.
        exchanges: the memory of chunks in decoding.
    """

    def __init__(
        self, server: ComputeServer, threads: FairExecutor, max_decode_s: float = MAX_DECODE_S
    ) -> None:
        """Start no process yet."""
        self.threads, self.exchanges = threads, ExchangeRoom(_MAX_BYTES_AT_ONCE)
        self._max_decode_s = max_decode_s
        self._workers = ComputeWorkers(
            server, SCAN, min(_MAX_PROCESSES, len(os.sched_getaffinity(0)))
        )

    async def decode(
        self, request: DecodeRequest, shard: str, exchange: Exchange, claims: Claims
    ) -> None:
        """Have a chunk decoded, whose pieces are in the exchange.

        A process that dies or hangs is replaced once: it may have been killed for another's memory.

        Raises:
            CorruptSample: the chunk cannot be decoded. Or both processes died or hung: then it has
                the fact `was_lost`, since the machine may be at fault.
            Overloaded: no process can be started.
        """
        cost = sum(expected.num_bytes for expected in request.expected)
        body = scan_request(request, shard, "file")
        async with self._workers.line.turn_of(claims, cost):
            for _ in range(2):
                try:
                    reply = await self._workers.ask(
                        body,
                        [exchange.file.fileno()],
                        max_bytes=MAX_REPLY_BYTES,
                        deadline_s=self._max_decode_s,
                        is_reply=is_reply,
                    )
                    await scanned(reply)
                    return
                except WorkerLost as lost:
                    reason = (
                        f"it was not decoded within {self._max_decode_s:g} s"
                        if lost.is_hung
                        else "the process that decoded it died; see the log of the kernel"
                    )
        offset = request.pieces[-1][0]
        where = {"shard": shard, "chunk": request.number, "offset": offset}
        raise CorruptSample(
            f"{request.noun} {request.number} of shard {shard} (at byte {offset}): {reason}",
            where | {"reason": reason, "was_lost": True},
        )

    def close(self) -> None:
        """End all processes that do nothing, and give back unused memory.

        The others end with their requests.
        """
        self._workers.close()
        self.exchanges.close()


def decoded_shards(
    source: Storage, chunks: Chunks, digest: bytes, decoders: Decoders
) -> MadeStorage:
    """The decoded shards of a dataset; see [Note: Rows of chunks] in `formats.chunk_index`."""
    return MadeStorage(DecodeRows(source, chunks, digest, decoders), decoders.threads, source)


def places_of(chunks: Chunks) -> BlockMap:
    """The places of chunks in the decoded shards."""
    return BlockMap.of(chunks.shard, chunks.base, chunks.base + chunks.chunk_bytes)


class _Decoding:
    """A chunk in decoding, for all who read from it at the same time.

    Attributes:
        ready: the memory of the decoded chunk.
        target: where the chunk begins there.
        claims: the jobs that read from it.
        num_readers: who wait for it or copy from it.
        unused: set when there are none any more.
    """

    def __init__(self, claims: Claims) -> None:
        self.claims = claims
        self.ready: asyncio.Future[Exchange] = asyncio.get_running_loop().create_future()
        self.target = 0
        self.num_readers = 0
        self.unused = asyncio.Event()


class DecodeRows:
    """The recipe of decoded shards: a cell is a chunk.

    The chunk's pieces are fetched from the shards, and decoded by another process into memory that
    it shares with the daemon.

    Attributes:
        shards: as large as they are decoded.
    """

    def __init__(self, source: Storage, chunks: Chunks, digest: bytes, decoders: Decoders) -> None:
        """Decode nothing yet; see `decoded_shards`."""
        sizes = np.zeros(len(source.shards), np.int64)
        np.add.at(sizes, chunks.shard, chunks.chunk_bytes)
        self.shards: Sequence[Shard] = [
            Shard(shard.name, size, f"{shard.version} {digest.hex()}" if shard.version else "")
            for shard, size in zip(source.shards, sizes.tolist(), strict=True)
        ]
        self._source, self._chunks, self._decoders = source, chunks, decoders
        self._places = places_of(chunks)
        self._decodings: dict[int, tuple[_Decoding, asyncio.Task[None]]] = {}

    def split(self, reads: Reads) -> Iterable[CellReads]:
        """See `Recipe.split`: each chunk by itself."""
        chunks = self._places.blocks_of(reads)
        for chunk in np.unique(chunks).tolist():
            some = chunks == chunk
            yield CellReads(chunks[some], reads.part(some))

    @asynccontextmanager
    async def made(self, its: CellReads) -> AsyncIterator[CellMemory]:
        """See `Recipe.made`; reads of several jobs share a chunk in decoding."""
        chunk, reads = int(its.cells[0]), its.reads
        claims = reads.claimed()
        if chunk not in self._decodings:
            decoding = _Decoding(Claims(reads.flow, reads.urgency))
            decode = self._decode(chunk, decoding, reads)
            self._decodings[chunk] = decoding, asyncio.create_task(decode, name="decode chunk")
        decoding, task = self._decodings[chunk]
        decoding.num_readers += 1
        try:
            with claims.told(decoding.claims.join):
                memory = (await asyncio.shield(decoding.ready)).memory
            begins = reads.start - int(self._chunks.base[chunk]) + decoding.target
            yield CellMemory(memory, begins.astype(np.uint64) + np.uint64(memory.ctypes.data))
        finally:
            decoding.num_readers -= 1
            if not decoding.num_readers:
                del self._decodings[chunk]
                decoding.unused.set()
                if not decoding.ready.done():
                    task.cancel()

    async def _decode(self, chunk: int, decoding: _Decoding, reads: Reads) -> None:
        """Fetch and decode a chunk, and keep it while it is read."""
        its, claims = self._chunks, decoding.claims
        shard, (index, place) = int(its.shard[chunk]), its.owner(chunk)
        pieces = index.pieces(place)
        sizes = [stop - start for start, stop in pieces]
        decoding.target = pages(sum(sizes))
        num_bytes = decoding.target + pages(int(its.chunk_bytes[chunk]))
        try:
            async with self._decoders.exchanges.hold(num_bytes, claims) as exchange:
                ends = np.cumsum(sizes).tolist()
                memories = [
                    exchange.memory[end - size : end] for size, end in zip(sizes, ends, strict=True)
                ]
                fetch = Reads.into(memories, [shard] * len(pieces), [start for start, _ in pieces])
                await self._source.read(
                    replace(
                        fetch,
                        flow=reads.flow,
                        urgency=reads.urgency,
                        claims=claims,
                        delays=reads.delays,
                    )
                )
                listed = self._source.shards[shard]
                request = DecodeRequest(
                    index.decode,
                    its.noun,
                    int(index.numbers[place]),
                    listed.size_bytes,
                    tuple(index.parameters[place]),
                    pieces,
                    index.expected(place),
                    decoding.target,
                    exchange.num_bytes,
                )
                await self._decoders.decode(request, listed.name, exchange, claims)
                decoding.ready.set_result(exchange)
                await decoding.unused.wait()
        except Exception as error:
            if not decoding.ready.done():
                decoding.ready.set_exception(error)
