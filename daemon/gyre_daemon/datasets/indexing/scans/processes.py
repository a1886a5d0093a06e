"""Has shards scanned by processes that may be killed; see `server` for their side."""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from gyre_daemon.datasets.indexing.scans.server import LENGTH, RANGE, Kind, Run
from gyre_daemon.datasets.sidecars.file import Arrays, decode
from gyre_daemon.errors import (
    ConfigError,
    CorruptSample,
    GyreError,
    InvalidRequest,
    NotAllowed,
    Overloaded,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.runtime.process_server import ProcessServer
from gyre_daemon.runtime.threads import compute

ReadRange = Callable[[int, int], Awaitable[bytes]]  # from the first byte up to the end

# The most that a reply may have: the index of some hundred million members.
_MAX_REPLY_BYTES = 8 << 30
_PIECE_BYTES = 1 << 20
# The most that is read at once for a scan. Several scans run beside each other.
_MAX_RANGE_BYTES = 8 << 20
_ERRORS: Mapping[str, type[GyreError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        CorruptSample,
        InvalidRequest,
        NotAllowed,
        ShardMissing,
        StorageUnavailable,
    )
}


class ScanProcesses:
    """Starts processes that scan, for all datasets of a daemon. Nothing runs before the first."""

    def __init__(self) -> None:
        self._server = ProcessServer("gyre_daemon.datasets.indexing.scans.server")

    async def start(self) -> "ScanProcess":
        """A process that scans one shard at a time; the caller ends it.

        Raises:
            Overloaded: no process can be started.
        """
        try:
            return ScanProcess(*await self._server.start())
        except (OSError, TimeoutError) as error:
            raise Overloaded(
                f"no process could be started to index shards: {error}; raise the limit of "
                "processes, or end some"
            ) from error

    def close(self) -> None:
        """End all processes; waits until the server has ended."""
        self._server.close()


class ScanProcess:
    """One process, used by one task at a time.

    Attributes:
        has_died: whether it ended while it worked for a request.
    """

    def __init__(self, connection: socket.socket, process: int) -> None:
        """Take over a connection, which does not block, and a process descriptor."""
        self.has_died = False
        self._connection = connection
        self._process = process

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self._connection.close()
        os.close(self._process)

    async def scan_file(self, run: Run, name: str, file: int) -> Arrays:
        """Scan an open file from its beginning.

        Args:
            run: of a `Scan`; it must be picklable.
            name: of the shard.
            file: its descriptor, which stays the caller's.

        Raises:
            CorruptSample: as `run`, or the scan needs too much memory.
            GyreError: the file cannot be read.
        """
        self._ask(run, name, file, "file")
        return await self._reply(name)

    async def scan_stream(self, run: Run, name: str, chunks: AsyncIterator[bytes]) -> Arrays:
        """Scan a stream, which is closed at the end.

        Raises:
            GyreError: as `scan_file`; what reading the stream raises is raised.
        """
        return await self._scan_socket(run, name, "stream", lambda ours: _send_all(ours, chunks))

    async def scan_ranges(
        self, run: Run, name: str, num_bytes: int, read: ReadRange, *, in_windows: bool = False
    ) -> Arrays:
        """Scan a shard of which the scan reads only what it asks for.

        Args:
            run: of a `Scan`; it must be picklable.
            name: of the shard.
            num_bytes: its size.
            read: reads a range of it.
            in_windows: the scan goes forward, and what it reads is asked for in windows.

        Raises:
            GyreError: as `scan_file`; what `read` raises is raised.
        """
        kind = str(num_bytes) if in_windows else num_bytes
        return await self._scan_socket(
            run, name, kind, lambda ours: _send_ranges(ours, num_bytes, read)
        )

    async def _scan_socket(
        self,
        run: Run,
        name: str,
        kind: Kind,
        send: Callable[[socket.socket], Coroutine[None, None, None]],
    ) -> Arrays:
        """Scan what is sent through a socket."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                self._ask(run, name, theirs.fileno(), kind)
            sending = asyncio.create_task(send(ours))
            replying = asyncio.create_task(self._reply(name))
            try:
                await asyncio.wait({sending, replying}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()  # the storage's own error, before one of a stream cut off
                return await replying
            finally:
                sending.cancel()
                replying.cancel()
                await asyncio.gather(sending, replying, return_exceptions=True)

    def _ask(self, run: Run, name: str, descriptor: int, kind: Kind) -> None:
        with os.fdopen(os.memfd_create("gyre-scan-request"), "wb") as body:
            pickle.dump((run, name, kind), body)
            body.flush()
            try:
                socket.send_fds(self._connection, [b"\0"], [descriptor, body.fileno()])
            except ConnectionError as error:
                raise self._died(name) from error

    def _died(self, name: str) -> CorruptSample:
        self.has_died = True
        reason = "the process that indexed it died; see the log of the kernel"
        return CorruptSample(
            f"shard {name} has no index: {reason}", {"shard": name, "reason": reason}
        )

    async def _reply(self, name: str) -> Arrays:
        loop = asyncio.get_running_loop()
        try:
            (num_bytes,) = LENGTH.unpack(await _receive(loop, self._connection, LENGTH.size))
            if num_bytes > _MAX_REPLY_BYTES:
                raise ConnectionResetError
            data = await _receive(loop, self._connection, num_bytes)
            failure, arrays = await compute(decode, bytes(data))
        except (ConnectionError, ValueError) as error:
            raise self._died(name) from error
        if failure:
            raise to_error(failure)
        return arrays


def to_error(text: str) -> GyreError:
    """The error that a reply tells."""
    kind, message, facts = msgspec.json.decode(text, type=tuple[str, str, dict[str, str]])
    return _ERRORS.get(kind, GyreError)(message, dict[str, Any](facts))


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
        close = getattr(chunks, "aclose", None)
        if close:
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
