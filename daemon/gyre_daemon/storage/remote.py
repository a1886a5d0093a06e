"""Object storage and every other fsspec driver: one request per sample, many in flight."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.errors import CorruptSample, GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.metrics import Metrics, Outcome, RequestKind, RequestLabels
from gyre_daemon.storage.base import Reads, Shard
from gyre_daemon.storage.location import redact

_STREAM_CHUNK_BYTES = 8 << 20
_READ_DEADLINE_S = 60.0
_MAX_GAP_BYTES = 4096  # between two fields of a sample: reading over it is cheaper than another request


class RemoteStorage:
    """Shards behind an asynchronous fsspec file system that was made on this event loop."""

    reads_in_bulk = False

    def __init__(
        self,
        scheme: str,
        filesystem: AsyncFileSystem,
        paths: Sequence[str],
        shards: Sequence[Shard],
        max_requests: int,
        metrics: Metrics,
    ) -> None:
        self.shards = shards
        self._scheme = scheme
        self._filesystem = filesystem
        self._paths = paths
        self._slots = asyncio.Semaphore(max_requests)
        self._metrics = metrics

    async def read(self, reads: Reads) -> None:
        """See `Storage.read`; each request brings the fields of one sample that lie close together."""
        async with asyncio.TaskGroup() as group:
            for request in _requests(reads):
                group.create_task(self._read_one(reads, request))

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`; the next chunk is requested while this one is used."""
        size = self.shards[shard].size_bytes
        starts = range(0, size, _STREAM_CHUNK_BYTES)
        ahead: asyncio.Task[bytes] | None = None
        try:
            for start in starts:
                chunk = await (ahead or self._get(shard, start, min(start + _STREAM_CHUNK_BYTES, size), "stream"))
                following = start + _STREAM_CHUNK_BYTES
                ahead = None
                if following < size:
                    ahead = asyncio.create_task(
                        self._get(shard, following, min(following + _STREAM_CHUNK_BYTES, size), "stream")
                    )
                yield chunk
        finally:
            if ahead:
                ahead.cancel()

    def local_path(self, shard: int) -> Path | None:
        """See `Storage.local_path`: nowhere."""
        return None

    async def _read_one(self, reads: Reads, request: range) -> None:
        first, last = request[0], request[-1]
        shard, start, stop = int(reads.shard[first]), int(reads.start[first]), int(reads.start[last] + reads.size[last])
        data = await self._get(shard, start, stop, "read")
        if len(data) != stop - start:
            raise truncated(self.shards[shard].name, start, stop, len(data))
        source = memoryview(data)
        for index in request:
            begin, size = int(reads.start[index]) - start, int(reads.size[index])
            ctypes.memmove(int(reads.target[index]), bytes(source[begin : begin + size]) if begin else data, size)

    async def _get(self, shard: int, start: int, stop: int, kind: RequestKind) -> bytes:
        """The bytes `[start, stop)` of a shard."""
        outcome: Outcome = "error"
        data = b""
        try:
            async with self._slots, asyncio.timeout(_READ_DEADLINE_S):
                data = bytes(await self._filesystem._cat_file(self._paths[shard], start=start, end=stop))
            outcome = "ok"
        except Exception as error:
            raise driver_error(self.shards[shard].name, error) from error
        finally:
            self._metrics.count_requests(RequestLabels(self._scheme, kind, outcome), 1, len(data))
        return data


def driver_error(name: str, error: Exception) -> GyreError:
    """What a driver's exception about a shard or a location means.

    Drivers raise what they like; builtin meanings are kept, all else is the storage's fault.
    """
    facts = {"shard": name}
    if isinstance(error, FileNotFoundError):
        return ShardMissing(f"{name} does not exist; restore it or correct the dataset's URI", facts)
    if isinstance(error, PermissionError) or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return NotAllowed(f"the storage refused access to {name}; check the daemon's credentials", facts)
    if isinstance(error, TimeoutError):
        return StorageUnavailable(f"the storage did not answer for {name} within {_READ_DEADLINE_S:g} s", facts)
    first_line = redact(str(error)).partition("\n")[0][:300]
    return StorageUnavailable(f"the storage failed for {name}: {type(error).__name__}: {first_line}", facts)


def truncated(name: str, start: int, stop: int, num_bytes: int) -> CorruptSample:
    """The error for a read that ran past the end of an object."""
    return CorruptSample(
        f"shard {name} is shorter than its index says: bytes [{start}, {stop}) were asked for and {num_bytes} came; restore "
        "the shard, or index the dataset again",
        {"shard": name, "offset": start, "reason": "truncated"},
    )


def _requests(reads: Reads) -> Iterator[range]:
    """The reads of each request, as ranges of indices."""
    begin = 0
    stops = reads.start + reads.size
    for index in range(1, len(reads) + 1):
        if index < len(reads) and reads.sample[index] == reads.sample[begin]:
            gap = reads.start[index] - stops[index - 1]
            if reads.shard[index] == reads.shard[begin] and 0 <= gap <= _MAX_GAP_BYTES:
                continue
        yield range(begin, index)
        begin = index
