"""Object storage and every other fsspec driver: one request per sample, many in flight, each in its place when it comes."""

import asyncio
import ctypes
import functools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.metrics import RequestKind
from gyre_daemon.runtime.fair import NO_JOB, Flow
from gyre_daemon.storage.answer import Range
from gyre_daemon.storage.base import MAX_GAP_BYTES, Bounds, Reads
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.engine.request import Request
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.source import Source

_STREAM_CHUNK_BYTES = 8 << 20

_Key = tuple[int, int, int]  # shard, start, stop
_Places = tuple[tuple[int, int, int], ...]  # of each read its begin within the request, its size, and its address


class RemoteStorage:
    """Shards behind an endpoint that many datasets may share. Identical ranges that several wait for are one request."""

    reads_in_bulk = False

    def __init__(self, source: Source, endpoint: Endpoint, paths: Sequence[str], shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._source = source
        self._endpoint = endpoint
        self._paths = paths
        self._bounds = Bounds(shards)
        self._in_flight: dict[_Key, _Joint] = {}

    async def read(self, reads: Reads) -> None:
        """See `Storage.read`; each request brings the fields of one sample that lie close together."""
        self._bounds.check(reads)
        reads = reads.nonempty()
        if not len(reads):
            return
        asked_at = time.monotonic()
        async with self._endpoint.reading(reads.flow, reads.urgency, asked_at):
            wanted = list(_pieces(reads))
            arrival = _Arrival(reads, len(wanted), asked_at)
            try:
                for key, places in wanted:
                    self._join(key, arrival, places)
                await arrival.whole
            finally:
                arrival.is_over = True
                arrival.account()
                for joint in reversed(list(arrival.joints)):  # those that wait for a turn before those that give theirs back
                    self._leave(joint, arrival)

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`; the next chunk is requested while this one is used."""
        size = self.shards[shard].size_bytes
        ahead: asyncio.Task[bytes] | None = None
        try:
            for start in range(0, size, _STREAM_CHUNK_BYTES):
                stop = min(start + _STREAM_CHUNK_BYTES, size)
                chunk = await (ahead or self._get(shard, start, stop))
                following = min(stop + _STREAM_CHUNK_BYTES, size)
                ahead = asyncio.create_task(self._get(shard, stop, following)) if following > stop else None
                yield chunk
        finally:
            if ahead:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def local_path(self, shard: int) -> Path | None:
        """See `Storage.local_path`: nowhere."""
        return None

    def path(self, shard: int) -> str:
        """Where the shard lies, with scheme."""
        return self._paths[shard]

    async def _get(self, shard: int, start: int, stop: int) -> bytes:
        """The bytes `[start, stop)` of a shard."""
        arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def finish(data: bytes, error: GyreError | None) -> None:
            if arrived.done():
                return
            if error:
                arrived.set_exception(error)
            else:
                arrived.set_result(data)

        request = self._request((shard, start, stop), "stream", NO_JOB, 0)
        request.asked_at = time.monotonic()
        request.finish = finish
        self._endpoint.submit(request)
        try:
            return await arrived
        finally:
            self._endpoint.abandon(request)

    def _request(self, key: _Key, kind: RequestKind, flow: Flow, urgency: int) -> Request:
        shard, start, stop = key
        return Request(self._source, self._paths[shard], Range(self.shards[shard], start, stop), kind, flow, urgency)

    def _join(self, key: _Key, arrival: "_Arrival", places: _Places) -> None:
        joint = self._in_flight.get(key)
        if joint:
            joint.waiting.append((arrival, places))
            arrival.joints[joint] = None
            arrival.note_joined()
            return
        request = self._request(key, "read", arrival.reads.flow, arrival.reads.urgency)
        request.asked_at = arrival.asked_at
        joint = self._in_flight[key] = _Joint(key, request, [(arrival, places)])
        arrival.joints[joint] = None
        request.finish = functools.partial(self._finish, joint)
        self._endpoint.submit(request)

    def _leave(self, joint: "_Joint", arrival: "_Arrival") -> None:
        joint.waiting = [each for each in joint.waiting if each[0] is not arrival]
        if not joint.waiting:
            self._in_flight.pop(joint.key, None)
            self._endpoint.abandon(joint.request)

    def _finish(self, joint: "_Joint", data: bytes, error: GyreError | None) -> None:
        """A range is there, or never will be."""
        del self._in_flight[joint.key]
        for arrival, places in joint.waiting:
            arrival.joints.pop(joint, None)
            arrival.take(joint.request, places, data, error)


class _Joint:
    """A request, and all who wait for it."""

    __slots__ = ("key", "request", "waiting")

    def __init__(self, key: _Key, request: Request, waiting: list[tuple["_Arrival", _Places]]) -> None:
        self.key = key
        self.request = request
        self.waiting = waiting


class _Arrival:
    """One call of `read` that waits until all is there."""

    def __init__(self, reads: Reads, num_missing: int, asked_at: float) -> None:
        self.reads = reads  # keeps the memory
        self.asked_at = asked_at
        self.joints: dict[_Joint, None] = {}
        self.is_over = False
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_missing = num_missing
        self._slowest: Request | None = None
        if reads.delays:
            reads.delays.num_requests += num_missing

    def note_joined(self) -> None:
        """Somebody else asked for it already."""
        if self.reads.delays:
            self.reads.delays.num_joined += 1

    def take(self, request: Request, places: _Places, data: bytes, error: GyreError | None) -> None:
        """One request has ended."""
        if self.is_over or self.whole.done():
            return
        if self.reads.delays:
            request.add_to(self.reads.delays)
            if self._slowest is None or request.total_s > self._slowest.total_s:
                self._slowest = request
        if error:
            self.whole.set_exception(error)
            return
        for begin, size, address in places:
            ctypes.memmove(address, data[begin : begin + size] if begin else data, size)
        self._num_missing -= 1
        if not self._num_missing:
            self.whole.set_result(None)

    def account(self) -> None:
        """Tell where the time of the slowest request went."""
        delays, slowest = self.reads.delays, self._slowest
        if delays and slowest and slowest.ended_at and (not delays.slowest or slowest.total_s > delays.slowest.total_s):
            delays.slowest = slowest.account()


def _pieces(reads: Reads) -> Iterator[tuple[_Key, _Places]]:
    """The requests: what each brings, and where to."""
    columns = reads.shard, reads.start, reads.size, reads.target, reads.sample
    rows = zip(*(column.tolist() for column in columns), strict=True)
    places: list[tuple[int, int, int]] = []
    first = begin = end = last_sample = -1
    for shard, start, size, target, sample in rows:
        if places and sample == last_sample and shard == first and 0 <= start - end <= MAX_GAP_BYTES:
            places.append((start - begin, size, target))
        else:
            if places:
                yield (first, begin, end), tuple(places)
            places, first, begin, last_sample = [(0, size, target)], shard, start, sample
        end = start + size
    if places:
        yield (first, begin, end), tuple(places)
