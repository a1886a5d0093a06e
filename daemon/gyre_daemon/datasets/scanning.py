"""Has shards scanned by processes that may be killed; see `shard_worker` for their side."""

import asyncio
import contextlib
import pickle
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from gyre_daemon.datasets.shard_worker import MAX_DATA_BYTES, RANGE, Kind, Run
from gyre_daemon.datasets.sidecars import Arrays, decode
from gyre_daemon.errors import (
    ConfigError,
    CorruptSample,
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.listing import check_listed, opened_file
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.reads import Storage, read_ranges
from gyre_daemon.workers.compute_workers import (
    ComputeServer,
    ComputeWorker,
    ComputeWorkers,
    Task,
    WorkerLost,
)

ReadRange = Callable[[int, int], Awaitable[bytes]]  # from the first byte up to the end
SCAN = Task(
    "gyre-scan",
    "gyre_daemon.datasets.shard_worker:ShardScan",
    MAX_DATA_BYTES,
    "index shards",
)
# The most that a reply may have: the index of some hundred million members.
MAX_REPLY_BYTES = 8 << 30
_PIECE_BYTES = 1 << 20
# The most to read at once for a scan. Several scans run at once.
_MAX_RANGE_BYTES = 8 << 20


_KINDS = ConfigError, CorruptSample, InvalidRequest, NotAllowed, ShardMissing, StorageUnavailable
_ERRORS: Mapping[str, type[GyreError]] = {kind.__name__: kind for kind in _KINDS}


def scan_workers(server: ComputeServer) -> ComputeWorkers:
    """Start the workers that scan, for all datasets of a daemon; none runs before the first."""
    return ComputeWorkers(server, SCAN, 1)


class Scanner:
    """Scans one shard at a time in a process, which is started with the first; `kill` ends it."""

    def __init__(self, workers: ComputeWorkers) -> None:
        """Start no process yet; `workers` are from `scan_workers`."""
        self._workers = workers
        self._worker: ComputeWorker | None = None

    async def scan(
        self,
        run: Run,
        source: Storage,
        shard: int,
        unpacked: LocalFile | None = None,
        *,
        seeks: bool = False,
        skips: bool = False,
    ) -> Arrays:
        """Have a shard scanned; once more if its process is killed, or dies, meanwhile.

        Args:
            run: the `run` of a `Scan`, or the same for a check; it must be picklable.
            source: has the shard.
            shard: its number.
            unpacked: the shard's file, if it was unpacked.
            seeks: see `Scan`.
            skips: see `Scan`.

        Raises:
            CorruptSample: it is damaged, or a local one was changed meanwhile.
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
            Overloaded: no process can be started.
        """
        listed, stored = source.shards[shard], source.local_file(shard)
        local = unpacked or stored
        # A process that waits for a slow mount has no deadline; reads by the storage have.
        is_read = local is None or (local is stored and not source.is_node_local)

        async def read(start: int, stop: int) -> bytes:
            return (await read_ranges(source, [shard], [start], [stop]))[0]

        async def scan() -> Arrays:
            if is_read and (seeks or skips):
                return await self.scan_ranges(
                    run, listed.name, listed.size_bytes, read, in_windows=skips
                )
            if is_read:
                return await self.scan_stream(run, listed.name, source.stream(shard))
            assert local
            pid = (await self._started()).pid
            async with opened_file(local, listed.name) as file:
                scanning = self._scan(run, listed.name, file, "file")
                arrays = await MOUNTS.at(local.root.folder).run_in(pid, scanning)
            if local is stored:
                await MOUNTS.run(local.root.folder, check_listed, local, listed)
            return arrays

        try:
            return await scan()
        except CorruptSample as error:
            if not isinstance(error.__cause__, WorkerLost):
                raise
        return await scan()

    async def scan_stream(self, run: Run, name: str, chunks: AsyncIterator[bytes]) -> Arrays:
        """Scan a stream, which is closed at the end.

        Raises:
            CorruptSample: as `run`, or the scan needs too much memory.
            GyreError: and errors of reading the stream.
        """
        return await self._scan_socket(run, name, "stream", 0, lambda ours: _send_all(ours, chunks))

    async def scan_ranges(
        self, run: Run, name: str, num_bytes: int, read: ReadRange, *, in_windows: bool = False
    ) -> Arrays:
        """Scan a shard by the ranges that the scan asks for, in windows if it goes forward.

        Raises:
            GyreError: as `scan_stream`; and those of `read`.
        """
        kind: Kind = "windows" if in_windows else "ranges"
        return await self._scan_socket(
            run, name, kind, num_bytes, lambda ours: _send_ranges(ours, num_bytes, read)
        )

    def kill(self) -> None:
        """End the process at once, whatever it does; the next scan starts another."""
        if self._worker:
            self._worker.kill()
            self._worker = None

    async def _started(self) -> ComputeWorker:
        if self._worker is None:
            self._worker = await self._workers.start()
        return self._worker

    async def _scan_socket(
        self,
        run: Run,
        name: str,
        kind: Kind,
        num_bytes: int,
        send: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> Arrays:
        """Scan bytes from a socket."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            sending = asyncio.create_task(send(ours))
            scanning = asyncio.create_task(self._scan(run, name, theirs.fileno(), kind, num_bytes))
            try:
                await asyncio.wait({sending, scanning}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()  # the storage's own error, before one of a stream cut off
                return await scanning
            finally:
                sending.cancel()
                scanning.cancel()
                await asyncio.gather(sending, scanning, return_exceptions=True)

    async def _scan(
        self, run: Run, name: str, descriptor: int, kind: Kind, num_bytes: int = 0
    ) -> Arrays:
        """Scan an open file, or bytes from a socket; the descriptor stays the caller's."""
        request, worker = scan_request(run, name, kind, num_bytes), await self._started()
        try:
            return await scanned(await worker.compute(request, [descriptor], MAX_REPLY_BYTES))
        except WorkerLost as error:
            self.kill()
            reason = "the process that indexed it died; see the log of the kernel"
            raise CorruptSample(
                f"shard {name} has no index: {reason}", {"shard": name, "reason": reason}
            ) from error


def scan_request(run: Run, name: str, kind: Kind, num_bytes: int = 0) -> bytes:
    """The body of a request; see `shard_worker`. Only reads by ranges need the shard's size."""
    return pickle.dumps((run, name, kind, num_bytes))


def is_reply(reply: bytes) -> bool:
    """Whether it is a reply with few arrays, such as that of a decoder."""
    with contextlib.suppress(ValueError):
        decode(reply)
        return True
    return False


async def scanned(reply: bytes) -> Arrays:
    """The arrays in a reply.

    Raises:
        GyreError: the error that the reply tells.
        WorkerLost: it is none.
    """
    try:
        failure, arrays = await compute(decode, reply)
    except ValueError as error:
        raise WorkerLost(is_hung=False) from error
    if failure:
        kind, message, facts = msgspec.json.decode(failure, type=tuple[str, str, dict[str, str]])
        raise _ERRORS.get(kind, GyreError)(message, dict[str, Any](facts))
    return arrays


async def _receive(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, num_bytes: int
) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, min(_PIECE_BYTES, num_bytes - len(data)))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


async def _send_all(connection: socket.socket, chunks: AsyncIterator[bytes]) -> None:
    """Send a stream until its end, or until its reader hangs up."""
    loop = asyncio.get_running_loop()
    try:
        async for chunk in chunks:
            await loop.sock_sendall(connection, chunk)
    except ConnectionError:
        return
    finally:
        if close := getattr(chunks, "aclose", None):
            await close()
    connection.shutdown(socket.SHUT_WR)


async def _send_ranges(connection: socket.socket, num_bytes: int, read: ReadRange) -> None:
    """Send the ranges that are asked for, until their reader hangs up."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while True:
            start, count = RANGE.unpack(await _receive(loop, connection, RANGE.size))
            if start + count > num_bytes:
                connection.shutdown(socket.SHUT_RDWR)
                return
            stop = start + count
            while start < stop:
                end = min(stop, start + _MAX_RANGE_BYTES)
                await loop.sock_sendall(connection, await read(start, end))
                start = end
