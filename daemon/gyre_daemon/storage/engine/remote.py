"""Object storage and every other fsspec driver: about one request per sample, many in flight.

[Note: Answers that tell nothing]

Most storages send a validator with each answer, and it is compared with that of the listing. Some
do not, and drivers of fsspec return bytes alone: then the object is looked at again after its bytes
have come, once for all reads of it that wait, and what is told now must agree with the listing.
Where a listing tells nothing, the first answer counts in its place. Where nothing is told at all, a
change cannot be noticed, and the log says so once.
"""

import asyncio
import ctypes
import functools
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from msgspec import Struct

from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Flow
from gyre_daemon.storage.base import MAX_GAP_BYTES, ReadPlan, Reads, ShardBounds, Storage
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.engine.policies import CredentialRefresh, RangeRequest, pause_s
from gyre_daemon.storage.response import Body, ByteRange, Source
from gyre_daemon.storage.shard import UNKNOWN, Shard, Validators, changed, is_same

# `ctypes.memmove` gives up the interpreter's lock, and waits for it among all threads that read.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_Key = tuple[int, int, int]  # shard, start, stop
# Where the pieces of a range go: each one's begin within the range, its size and its address.
_Pieces = tuple[tuple[int, int, int], ...]

# The size and the validators of an object as it is now.
Look = Callable[[str], Awaitable[tuple[int, Validators]]]
# Called with the error, or None if the bytes are those of the listed version.
Decide = Callable[[GyreError | None], None]

_MAX_LOOK_S = 20.0  # after which a look that fails is not tried again


class RemoteStorage(Storage):
    """Shards behind an endpoint that many datasets may share.

    Concurrent reads of the same range share one request.
    """

    def __init__(
        self,
        source: Source,
        endpoint: Endpoint,
        paths: Sequence[str],
        shards: Sequence[Shard],
        look: Look | None = None,
        *,
        is_compared: bool = False,
    ) -> None:
        """Read listed objects.

        Args:
            source: carries the requests.
            endpoint: sends them.
            paths: of the objects, as the source knows them.
            shards: as listed.
            look: see `ChangeCheck`.
            is_compared: whether the source itself refuses changed objects.
        """
        self.shards = shards
        self._changes = None if is_compared else ChangeCheck(endpoint.name, paths, shards, look)
        self._credentials = CredentialRefresh(source)
        self._endpoint = endpoint
        self._paths = paths
        self._bounds = ShardBounds(shards)
        self._in_flight: dict[_Key, _SharedRequest] = {}

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; fields of one sample that lie close together are one request."""
        reads = plan.part(slice(None))
        self._bounds.check(reads)
        reads = reads.nonempty()
        if not len(reads):
            return
        asked_at, claims = time.monotonic(), reads.claimed()
        async with self._endpoint.admission.admitted(claims, asked_at):
            wanted = list(_ranges(reads))
            pending = _PendingRead(reads, len(wanted), asked_at)
            try:
                for key, pieces in wanted:
                    self._join(key, pending, pieces)
                with claims.told(functools.partial(self._hasten, pending)):
                    await pending.done
            finally:
                pending.close()
                # Requests that wait for a turn leave before others give theirs back.
                for shared in reversed(list(pending.shared_requests)):
                    self._leave(shared, pending)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return self._paths[shard]

    def _join(self, key: _Key, pending: "_PendingRead", pieces: _Pieces) -> None:
        """Wait for a range: for a request in flight, or for a new one."""
        reads, shared = pending.reads, self._in_flight.get(key)
        if shared:
            shared.waiting.append((pending, pieces))
            pending.shared_requests[shared] = None
            if reads.delays:
                reads.delays.num_joined += 1
            return
        shard, start, stop = key
        path, wanted = self._paths[shard], ByteRange(self.shards[shard], start, stop)
        request = RangeRequest(
            self._credentials, path, wanted, reads.flow, reads.urgency, pending.asked_at
        )
        shared = self._in_flight[key] = _SharedRequest(key, request, [(pending, pieces)])
        pending.shared_requests[shared] = None
        deliver = functools.partial(self._finish, shared)
        request.finish = functools.partial(self._checked, request, shard, deliver)
        self._endpoint.submit(request)

    def _checked(
        self,
        request: RangeRequest,
        shard: int,
        deliver: Callable[[Body, GyreError | None], None],
        data: Body,
        error: GyreError | None,
    ) -> None:
        """Deliver a range, if it is of the version that was listed."""
        if error or self._changes is None:
            deliver(data, error)
        else:
            decide = functools.partial(deliver, data)
            self._changes.check(shard, request.wanted.shard, request.told, decide)

    def _hasten(self, pending: "_PendingRead", flow: Flow, urgency: int) -> None:
        """Somebody needs the ranges of a read."""
        for shared in list(pending.shared_requests):
            self._endpoint.join(shared.request, flow, urgency)

    def _leave(self, shared: "_SharedRequest", pending: "_PendingRead") -> None:
        shared.waiting = [each for each in shared.waiting if each[0] is not pending]
        if not shared.waiting:
            self._in_flight.pop(shared.key, None)
            self._endpoint.abandon(shared.request)

    def _finish(self, shared: "_SharedRequest", data: Body, error: GyreError | None) -> None:
        """A range has arrived or failed."""
        if self._in_flight.get(shared.key) is shared:  # it may have been left meanwhile
            del self._in_flight[shared.key]
        for pending, pieces in shared.waiting:
            pending.shared_requests.pop(shared, None)
            pending.take(shared.request, pieces, data, error)


class _SharedRequest(Struct, eq=False):
    """A request, and the reads that wait for it."""

    key: _Key
    request: RangeRequest
    waiting: "list[tuple[_PendingRead, _Pieces]]"


class _PendingRead:
    """A call of `read` that waits for its ranges; keeps the memory that they go to."""

    def __init__(self, reads: Reads, num_missing: int, asked_at: float) -> None:
        self.reads = reads
        self.asked_at = asked_at
        self.shared_requests: dict[_SharedRequest, None] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_closed = False
        self._num_missing = num_missing
        self._slowest: RangeRequest | None = None
        if reads.delays:
            reads.delays.num_requests += num_missing

    def take(
        self, request: RangeRequest, pieces: _Pieces, data: Body, error: GyreError | None
    ) -> None:
        """Copy a range that has arrived, or fail."""
        if self._is_closed or self.done.done():
            return
        if self.reads.delays:
            request.count_in(self.reads.delays)
            if self._slowest is None or request.total_s > self._slowest.total_s:
                self._slowest = request
        if error:
            self.done.set_exception(error)
            return
        for begin, size, address in pieces:
            _memmove(address, _source(data, begin, size), size)
        self._num_missing -= 1
        if not self._num_missing:
            self.done.set_result(None)

    def close(self) -> None:
        """Accept nothing more, and record where the time of the slowest request went."""
        self._is_closed = True
        delays, slowest = self.reads.delays, self._slowest
        if not delays or not slowest or not slowest.ended_at:
            return
        if not delays.slowest or slowest.total_s > delays.slowest.total_s:
            delays.slowest = slowest.timing()


def _source(data: Body, begin: int, size: int) -> "bytes | ctypes.Array[ctypes.c_char]":
    """A part of a body for `memmove`; a mapping is not copied for it."""
    if isinstance(data, bytes):
        return data[begin : begin + size] if begin else data
    return (ctypes.c_char * size).from_buffer(data, begin)


def _ranges(reads: Reads) -> Iterator[tuple[_Key, _Pieces]]:
    """The ranges to request, and where their pieces go."""
    columns = reads.shard, reads.start, reads.size, reads.target, reads.sample
    rows = zip(*(column.tolist() for column in columns), strict=True)
    pieces: list[tuple[int, int, int]] = []
    first = begin = end = last_sample = -1
    for shard, start, size, target, sample in rows:
        is_same = sample == last_sample and shard == first
        if pieces and is_same and 0 <= start - end <= MAX_GAP_BYTES:
            pieces.append((start - begin, size, target))
        else:
            if pieces:
                yield (first, begin, end), tuple(pieces)
            pieces, first, begin, last_sample = [(0, size, target)], shard, start, sample
        end = start + size
    if pieces:
        yield (first, begin, end), tuple(pieces)


class ChangeCheck:
    """Compares answers with the listing, for the objects of one dataset."""

    def __init__(
        self, name: str, paths: Sequence[str], shards: Sequence[Shard], look: Look | None
    ) -> None:
        """Know nothing but the listing.

        Args:
            name: of the storage, for the log.
            paths: of the objects.
            shards: as listed.
            look: looks at an object again; None if that tells nothing.
        """
        self._name, self._paths, self._shards, self._look = name, paths, shards, look
        self._known: dict[int, Validators] = {}  # where answers told more than the listing
        self._waiting: dict[int, list[tuple[Validators, Decide]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_warned = False

    def check(self, number: int, shard: Shard, told: Validators, decide: Decide) -> None:
        """Decide about bytes of an object that came with these validators, now or later."""
        known = self._known.get(number, shard.validators)
        same = is_same(known, told)
        if same is not None:
            decide(None if same else changed(shard.name))
        elif shard.validators and self._look:
            if number in self._waiting:  # and so a task looks
                self._waiting[number].append((told, decide))
                return
            self._waiting[number] = [(told, decide)]
            task = asyncio.get_running_loop().create_task(self._look_again(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._learn(number, known, told)
            decide(None)

    async def _look_again(self, number: int) -> None:
        """Decide about all bytes that came before a look began, until none wait."""
        while waiting := self._waiting[number]:
            self._waiting[number] = []
            error, now = await self._see(number)
            for told, decide in waiting:
                decide(error or self._compared(number, now, told))
        del self._waiting[number]

    def _compared(self, number: int, now: Validators, told: Validators) -> GyreError | None:
        """The error if the bytes or the object as it is now differ from the listing."""
        known = self._known.get(number, self._shards[number].validators)
        if is_same(known, now) is False or is_same(now, told) is False:
            return changed(self._shards[number].name)
        if is_same(known, now) is None:
            self._look = None  # it tells nothing that could be compared
            self._learn(number, known, told)
        elif told:
            self._known[number] = known.joined(told)
        return None

    async def _see(self, number: int) -> tuple[GyreError | None, Validators]:
        """The object as it is now."""
        shard, look = self._shards[number], self._look
        if look is None:
            return None, UNKNOWN
        until = time.monotonic() + _MAX_LOOK_S
        for attempt in itertools.count(1):
            try:
                size, now = await look(self._paths[number])
            except GyreError as error:
                if not isinstance(error, StorageUnavailable) or time.monotonic() > until:
                    return error, UNKNOWN
                await asyncio.sleep(pause_s(attempt, random.random()))
            else:
                return (changed(shard.name) if size != shard.size_bytes else None), now
        raise AssertionError

    def _learn(self, number: int, known: Validators, told: Validators) -> None:
        if told:
            self._known[number] = known.joined(told)
        elif not self._has_warned:
            self._has_warned = True
            facts = {
                "storage": self._name,
                "shard": self._shards[number].name,
                "reason": "the storage tells no ETag, version or time of its objects: bytes of a "
                "replaced object of equal size are served as if they were the old ones; never "
                "overwrite a shard there, write a new name",
            }
            log_event("changes cannot be noticed", facts, logging.WARNING)
