"""The compute workers of a daemon: pools of processes, and the server that forks all of them."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.threads import FairQueue, in_thread
from gyre_daemon.workers import protocol
from gyre_daemon.workers.protocol import Kind, Message
from gyre_daemon.workers.supervisor import ForkServer, Process

# Variables that programs need to run; all others, such as credentials, stay in the daemon.
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("PYTHON", "VIRTUAL_ENV")
# Threads of a library must not exist when the server forks.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# The server imports a pool's modules before it forks its first process.
_MAX_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Task:
    """What the processes of one pool do.

    Attributes:
        name: of the processes, as `ps` shows it; at most 15 characters, no space.
        target: their `computing.Computation`, MODULE:CLASS.
        max_data_bytes: that each may allocate.
        purpose: for errors, such as "index shards".
    """

    name: str
    target: str
    max_data_bytes: int
    purpose: str


class WorkerLost(Exception):
    """A process died or hung while it computed, and is replaced.

    Attributes:
        is_hung: whether it took too long.
    """

    def __init__(self, *, is_hung: bool) -> None:
        super().__init__("it took too long" if is_hung else "it died; see the log of the kernel")
        self.is_hung = is_hung


class ComputeServer:
    """Forks the processes of all pools. Nothing runs before the first is asked for."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._starting = threading.Lock()  # guards the server
        self._server: ForkServer | None = None
        self._is_closed = False

    async def start(self, task: Task) -> Process:
        """A new process, with a connection that does not block.

        Raises:
            OSError, TimeoutError: no process can be started.
        """
        with contextlib.suppress(ConnectionResetError):
            return await self._start(task)
        return await self._start(task)  # the server had died, or the process before it had any work

    def close(self) -> None:
        """End all processes; waits until the server has ended."""
        with self._starting:
            self._is_closed = True
            self._end_server()

    async def _start(self, task: Task) -> Process:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await in_thread(partial(self._fork, task, theirs), "gyre-processes")
            ours.setblocking(False)
            async with asyncio.timeout(_MAX_START_S):
                await _readable(ours)
            return Process(ours, *protocol.introduced(ours))
        except BaseException:
            ours.close()
            raise

    def _fork(self, task: Task, connection: socket.socket) -> None:
        """Have a process forked by the server, which is started if there is none or if it died."""
        body = f"{task.name} {task.target}".encode()
        with self._starting:
            for _ in range(2):
                if self._is_closed:
                    raise ConnectionAbortedError("the daemon is stopping")
                try:
                    if self._server is None:
                        self._server = ForkServer.spawned("compute", _environment(os.environ))
                    self._server.fork(connection, body, task.max_data_bytes)
                except ConnectionError:
                    self._end_server()
                else:
                    return
            raise ConnectionAbortedError("the server of such processes ends at once")

    def _end_server(self) -> None:
        if self._server:
            self._server.close()
            self._server = None


class ComputeWorker:
    """One process, used by one task at a time.

    Attributes:
        has_died: whether it ended while it computed.
    """

    def __init__(self, process: Process) -> None:
        """Take over a process."""
        self.has_died = False
        self.process = process

    async def ask(self, body: bytes, descriptors: Sequence[int], max_bytes: int) -> bytes:
        """The reply to a request, which may come from a process that foreign bytes took over.

        Args:
            body: of the request.
            descriptors: at most two, which stay the caller's.
            max_bytes: of the reply.

        Raises:
            WorkerLost: the process ended, or sent no such reply.
        """
        request = Message(Kind.COMPUTE, 0, body, descriptors)
        try:
            return await protocol.ask(self.process.connection, request, max_bytes)
        except ConnectionError as error:
            self.has_died = True
            raise WorkerLost(is_hung=False) from error

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self.process.kill()


class ComputeWorkers:
    """A pool of processes for one task.

    Attributes:
        line: turns to use them.
        idle: those that wait for work.
        is_closed: whether no further one waits.
    """

    def __init__(self, server: ComputeServer, task: Task, num: int) -> None:
        """Start no process yet.

        Args:
            server: forks them; closed by its owner.
            task: of all of them.
            num: of turns at once.
        """
        self._server, self._task = server, task
        self.line = FairQueue(num)
        self.idle: list[ComputeWorker] = []
        self.is_closed = False

    async def start(self) -> ComputeWorker:
        """A process that the caller uses alone, and ends.

        Raises:
            Overloaded: no process can be started.
        """
        try:
            return ComputeWorker(await self._server.start(self._task))
        except (OSError, TimeoutError) as error:
            raise Overloaded(
                f"no process could be started to {self._task.purpose}: {error}; raise the limit "
                "of processes, or end some"
            ) from error

    async def ask(
        self,
        body: bytes,
        descriptors: Sequence[int],
        *,
        max_bytes: int,
        deadline_s: float,
        is_reply: Callable[[bytes], bool] = bool,
    ) -> bytes:
        """The reply of an idle process; see `ComputeWorker.ask`. The caller has a turn.

        Raises:
            Overloaded: no process can be started.
            WorkerLost: the process died, took longer than the deadline, or sent no reply of its
                task, as `is_reply` tells.
        """
        worker = self.idle.pop() if self.idle else await self.start()
        is_sound = False
        try:
            async with asyncio.timeout(deadline_s):
                reply = await worker.ask(body, descriptors, max_bytes)
            is_sound = is_reply(reply)
            if not is_sound:
                raise WorkerLost(is_hung=False)
        except TimeoutError as error:
            raise WorkerLost(is_hung=True) from error
        finally:
            if is_sound and not self.is_closed:
                self.idle.append(worker)
            else:
                worker.kill()
        return reply

    def close(self) -> None:
        """End the processes that do nothing; the others end with their requests."""
        self.is_closed = True
        for worker in self.idle:
            worker.kill()
        self.idle.clear()


async def _readable(connection: socket.socket) -> None:
    """Wait until something has come."""
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


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    passed = {
        name: value
        for name, value in environment.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    return passed | _ONE_THREAD
