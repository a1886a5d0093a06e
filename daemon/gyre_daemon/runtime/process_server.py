"""Processes that a server of the daemon forks; see `forked` for the server's side."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from functools import partial

from gyre_daemon.runtime.spawning import spawn_python
from gyre_daemon.runtime.threads import in_thread

# To start the server takes 0.3 s, and some seconds on a busy machine. One that does not
# answer for longer never will.
_MAX_START_S = 60.0
# Threads of a library must not exist when the server forks.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class ProcessServer:
    """A process that forks others. Nothing runs before the first of these is asked for."""

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] = os.environ,
        kind: socket.SocketKind = socket.SOCK_STREAM,
    ) -> None:
        """Start nothing yet.

        Args:
            module: is run as `python -m MODULE FD`, and calls `forked.serve` with that descriptor.
            environment: of all its processes.
            kind: of the connection to each process.
        """
        self._module, self._environment, self._kind = module, environment, kind
        self._starting = threading.Lock()  # guards the server
        self._server: socket.socket | None = None
        self._pid = 0
        self._is_closed = False

    async def start(self) -> tuple[socket.socket, int]:
        """A new process: a connection to it, which does not block, and its process descriptor.

        Raises:
            OSError, TimeoutError: no process can be started.
        """
        with contextlib.suppress(ConnectionResetError):
            return await self._start()
        return await self._start()  # the server had died, or the process before it had any work

    def close(self) -> None:
        """End all processes; waits until the server has ended."""
        with self._starting:
            self._is_closed = True
            self._end_server()

    async def _start(self) -> tuple[socket.socket, int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, self._kind)
        try:
            with theirs:
                await in_thread(partial(self._send, theirs), "gyre-processes")
            ours.setblocking(False)
            async with asyncio.timeout(_MAX_START_S):
                return ours, await _receive_process(ours)
        except BaseException:
            ours.close()
            raise

    def _send(self, connection: socket.socket) -> None:
        """Send a connection to the server, which is started if there is none or if it died."""
        with self._starting:
            for _ in range(2):
                if self._is_closed:
                    raise ConnectionAbortedError("the daemon is stopping")
                try:
                    self._server = self._server or self._spawn()
                    socket.send_fds(self._server, [b"\0"], [connection.fileno()])
                except ConnectionError:
                    self._end_server()
                else:
                    return
            raise ConnectionAbortedError("the server of such processes ends at once")

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.settimeout(_MAX_START_S)
        with theirs:
            environment = {**self._environment, **_ONE_THREAD}
            try:
                self._pid = spawn_python(("-m", self._module), environment, theirs.fileno())
            except OSError:
                ours.close()
                raise
        if not ours.recv(1):
            ours.close()
            self._reap()
            raise ConnectionResetError("it ended")
        return ours

    def _end_server(self) -> None:
        if self._server:
            self._server.close()
            self._server = None
        self._reap()

    def _reap(self) -> None:
        if self._pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


async def _receive_process(connection: socket.socket) -> int:
    """The process descriptor that a new process sends first."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def can_read() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection.fileno(), can_read)
    try:
        await readable
    finally:
        loop.remove_reader(connection.fileno())
    descriptors = socket.recv_fds(connection, 1, 1)[1]
    if not descriptors:
        raise ConnectionResetError("it ended at once")
    return descriptors[0]
