"""Object storage and every other fsspec driver: one request per read, many in flight."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.errors import GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.metrics import Metrics, Outcome, RequestKind, RequestLabels
from gyre_daemon.storage.base import Read, Shard
from gyre_daemon.storage.local import truncated
from gyre_daemon.storage.location import redact

_STREAM_CHUNK_BYTES = 8 << 20
_READ_DEADLINE_S = 60.0


class RemoteStorage:
    """Shards behind an asynchronous fsspec file system that was made on this event loop."""

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

    async def read(self, reads: Sequence[Read], arrived: Callable[[Sequence[int]], None]) -> None:
        """See `Storage.read`; each read is one range request."""
        async with asyncio.TaskGroup() as group:
            for index, read in enumerate(reads):
                group.create_task(self._read_one(index, read, arrived))

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

    async def close(self) -> None:
        """Nothing to close: the driver drops its connections with its last reference."""

    async def _read_one(self, index: int, read: Read, arrived: Callable[[Sequence[int]], None]) -> None:
        data = memoryview(await self._get(read.shard, read.start, read.start + read.num_bytes, "read"))
        if data.nbytes != read.num_bytes:
            raise truncated(self.shards[read.shard].name, read, data.nbytes)
        begin = 0
        for target in read.targets:
            target[:] = data[begin : begin + target.nbytes]
            begin += target.nbytes
        arrived([index])

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
