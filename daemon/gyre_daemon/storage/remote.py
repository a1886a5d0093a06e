"""Object storage and every other fsspec driver: one request per sample, many in flight."""

import asyncio
import ctypes
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.errors import GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.metrics import Metrics, Outcome, RequestKind, RequestLabels
from gyre_daemon.storage.base import Bounds, Reads, Shard, changed, truncated
from gyre_daemon.storage.location import redact

_STREAM_CHUNK_BYTES = 8 << 20
_READ_DEADLINE_S = 60.0
_STATUS = re.compile(r"status code: (\d{3})")
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
        self._bounds = Bounds(shards)
        self._slots = asyncio.Semaphore(max_requests)
        self._metrics = metrics

    async def read(self, reads: Reads) -> None:
        """See `Storage.read`; each request brings the fields of one sample that lie close together."""
        self._bounds.check(reads)
        reads = reads.nonempty()
        async with asyncio.TaskGroup() as group:
            for request in _requests(reads):
                group.create_task(self._read_one(reads, request))

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`; the next chunk is requested while this one is used."""
        size = self.shards[shard].size_bytes
        ahead: asyncio.Task[bytes] | None = None
        try:
            for start in range(0, size, _STREAM_CHUNK_BYTES):
                stop = min(start + _STREAM_CHUNK_BYTES, size)
                chunk = await (ahead or self._get(shard, start, stop, "stream"))
                following = min(stop + _STREAM_CHUNK_BYTES, size)
                ahead = asyncio.create_task(self._get(shard, stop, following, "stream")) if following > stop else None
                yield chunk
        finally:
            if ahead:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def local_path(self, shard: int) -> Path | None:
        """See `Storage.local_path`: nowhere."""
        return None

    async def _read_one(self, reads: Reads, request: range) -> None:
        first, last = request[0], request[-1]
        shard, start, stop = int(reads.shard[first]), int(reads.start[first]), int(reads.start[last] + reads.size[last])
        data = await self._get(shard, start, stop, "read")
        source = memoryview(data)
        for index in request:
            begin, size = int(reads.start[index]) - start, int(reads.size[index])
            ctypes.memmove(int(reads.target[index]), bytes(source[begin : begin + size]) if begin else data, size)

    async def _get(self, shard: int, start: int, stop: int, kind: RequestKind) -> bytes:
        """The bytes `[start, stop)` of a shard."""
        outcome: Outcome = "error"
        data = b""
        name = self.shards[shard].name
        try:
            async with self._slots, asyncio.timeout(_READ_DEADLINE_S):
                data = await self._request(shard, start, stop)
            if len(data) != stop - start:
                raise truncated(name, start, stop, len(data))
            outcome = "ok"
        except GyreError:
            raise
        except Exception as error:
            raise driver_error(name, error, _READ_DEADLINE_S) from error
        finally:
            self._metrics.count_requests(RequestLabels(self._scheme, kind, outcome), 1, len(data))
        return data

    async def _request(self, shard: int, start: int, stop: int) -> bytes:
        path, version = self._paths[shard], self.shards[shard].version
        if version.startswith('"') and hasattr(self._filesystem, "read_version"):  # a strong etag
            data: bytes = await self._filesystem.read_version(path, start, stop, version)
            return data
        return bytes(await self._filesystem._cat_file(path, start=start, end=stop))


def driver_error(name: str, error: Exception, deadline_s: float) -> GyreError:
    """What a driver's exception about a shard or a location means.

    Drivers raise what they like: builtin meanings and HTTP statuses are kept, all else is the storage's fault.
    """
    facts = {"shard": name}
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return ShardMissing(f"{name} does not exist; restore it or correct the dataset's URI", facts)
    if isinstance(error, PermissionError) or status in (401, 403):
        return NotAllowed(f"the storage refused access to {name}; check the daemon's credentials", facts)
    if status in (412, 416):
        return changed(name)
    if isinstance(error, TimeoutError):
        return StorageUnavailable(f"the storage did not answer for {name} within {deadline_s:g} s", facts)
    first_line = redact(str(error)).partition("\n")[0][:300]
    return StorageUnavailable(f"the storage failed for {name}: {type(error).__name__}: {first_line}", facts)


def _status(error: Exception) -> int:
    """The HTTP status that the driver was answered with; 0 where there is none."""
    found = _STATUS.search(str(error))
    status = getattr(error, "status", int(found[1]) if found else 0)
    return status if isinstance(status, int) else 0


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
