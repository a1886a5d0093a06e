"""Compute workers: pools of processes that run foreign code, and the memory that they share.

A process may get any bytes and run any code, so it must not have the daemon's memory: its server is
a new program, and its own memory is limited. Which class computes is told by the request to fork.
For large inputs and results, a process and the daemon map one exchange file, which is used again
for the next one.
"""

import asyncio
import contextlib
import fcntl
import gc
import importlib
import mmap
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.runtime.threads import Claims, FairQueue, in_thread
from gyre_daemon.workers.supervisor import (
    ForkServer,
    Kind,
    Message,
    Process,
    ask,
    introduced,
    serve,
)


class Computation(Protocol):
    """The work of the processes of one pool; each has an instance."""

    @classmethod
    def preload(cls) -> None:
        """Import common modules: once in the server, for all that it forks later."""

    def answer(self, body: memoryview, descriptors: Sequence[int]) -> bytes:
        """The reply's body.

        Args:
            body: of the request.
            descriptors: that came along; they are the callee's.
        """


class ComputeWork:
    """See `supervisor.Work`; the body of `FORK` is NAME MODULE:CLASS."""

    def __init__(self) -> None:
        """Have nothing imported yet."""
        self.name = "gyre-compute"
        self._known: dict[str, type[Computation]] = {}
        self._computation: Computation | None = None

    def prepare(self, body: bytes | bytearray) -> None:
        """Import the class with its imports."""
        _, target = body.decode().split(" ")
        if target not in self._known:
            module, _, name = target.partition(":")
            found: type[Computation] = getattr(importlib.import_module(module), name)
            found.preload()
            self._known[target] = found
            gc.collect()
            gc.freeze()

    def begin(self, body: bytes | bytearray) -> None:
        """Become a process of one pool."""
        with contextlib.suppress(OSError):  # the kernel ends this process before the daemon
            Path("/proc/self/oom_score_adj").write_text("500")
        self.name, target = body.decode().split(" ")
        self._computation = self._known[target]()

    def answer(self, request: Message) -> Message:
        """Have the class compute the reply."""
        assert self._computation
        answer = self._computation.answer(memoryview(request.body), request.descriptors)
        return Message(Kind.DONE, body=answer)


def main() -> NoReturn:
    """Be the server of compute workers, for the daemon that started this program."""
    serve(socket.socket(fileno=int(sys.argv[1])), ComputeWork())


_PAGE_BYTES = mmap.PAGESIZE
# Files are as large as powers of two from here on, so that one serves chunks of similar sizes.
_MIN_FILE_BYTES = 1 << 20
# Unused files to keep. More would take memory that nothing counts; with fewer, the kernel
# clears fresh pages for every chunk.
_MAX_KEPT_BYTES = 64 << 20


def pages(num_bytes: int) -> int:
    """This many bytes in whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Exchange:
    """A memory file that nobody can resize, mapped by the daemon.

    Attributes:
        num_bytes: its size.
        file: the open file.
        memory: uint8 [num_bytes]; another process may write to it at any time.
    """

    def __init__(self, num_bytes: int) -> None:
        """Make a file.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.num_bytes = num_bytes
        try:
            descriptor = os.memfd_create("gyre-decode", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
            os.ftruncate(descriptor, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            mapping = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise Overloaded(
                f"there is no memory for {num_bytes} bytes to decode: {error.strerror}"
            ) from error
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Give up the file; its memory goes with the last array that refers to it."""
        self.file.close()
        self.memory = np.empty(0, np.uint8)


class ExchangeRoom:
    """Files for chunks being decoded, within bounds; a larger chunk has its turn alone."""

    def __init__(self, max_bytes: int) -> None:
        """Use no memory yet.

        Args:
            max_bytes: of all files that are held at once. They are not part of any budget.
        """
        self._max_bytes = max_bytes
        self._max_files = descriptor_shares().exchanges
        self._unused: list[Exchange] = []
        self._used_bytes = 0
        self._num_used = 0
        self._line = FairQueue(1)  # those that wait for memory
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, num_bytes: int, claims: Claims) -> AsyncIterator[Exchange]:
        """A file of at least this size, inside the context.

        Raises:
            Overloaded: the machine has no such memory.
        """
        async with self._line.turn_of(claims, num_bytes):
            while self._num_used and (
                self._used_bytes + num_bytes > self._max_bytes or self._num_used >= self._max_files
            ):
                self._freed.clear()
                await self._freed.wait()
            self._used_bytes += num_bytes
            self._num_used += 1
        exchange = None
        try:
            exchange = self._take(num_bytes)
            yield exchange
            self._give_back(exchange)
        except BaseException:
            # A storage or a process may still write to it: nobody else must get it.
            if exchange:
                exchange.close()
            raise
        finally:
            self._used_bytes -= num_bytes
            self._num_used -= 1
            self._freed.set()

    def close(self) -> None:
        """Give back the files that are not held."""
        while self._unused:
            self._unused.pop().close()

    def _take(self, num_bytes: int) -> Exchange:
        """A file of at least this size, which counts as used already."""
        size = max(_MIN_FILE_BYTES, 1 << (num_bytes - 1).bit_length())
        for place, exchange in enumerate(self._unused):
            if exchange.num_bytes == size:
                return self._unused.pop(place)
        while self._unused and self._num_used + len(self._unused) > self._max_files:
            self._unused.pop(0).close()
        return Exchange(size)

    def _give_back(self, exchange: Exchange) -> None:
        """Keep a file for later, or close it."""
        kept_bytes = sum(each.num_bytes for each in self._unused)
        if kept_bytes + exchange.num_bytes > _MAX_KEPT_BYTES:
            exchange.close()
        else:
            self._unused.append(exchange)


# Variables that programs need to run; all others, such as credentials, stay in the daemon.
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("PYTHON", "VIRTUAL_ENV")
_PROGRAM = "from gyre_daemon.workers.compute_workers import main; main()"
# Threads of a library must not exist when the server forks.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# The server imports a pool's modules before it forks its first process.
_MAX_START_S = 60.0


class Task(Struct, frozen=True):
    """The work of the processes of one pool.

    Attributes:
        name: of the processes, as `ps` shows it; at most 15 characters, no space.
        target: their `Computation`, MODULE:CLASS.
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

    async def start(self, task: Task) -> "ComputeWorker":
        """A new process.

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

    async def _start(self, task: Task) -> "ComputeWorker":
        ours, theirs = socket.socketpair()
        forking = asyncio.create_task(
            in_thread(partial(self._fork, task, theirs), "gyre-processes")
        )

        def forked(_: object) -> None:
            theirs.close()  # not before: the thread would send whatever has its number by then
            if not forking.cancelled():
                forking.exception()  # nobody asks for it where the caller was cancelled

        forking.add_done_callback(forked)
        try:
            await asyncio.shield(forking)
            ours.setblocking(False)
            async with asyncio.timeout(_MAX_START_S):
                await _readable(ours)
            return ComputeWorker(ours, *introduced(ours))
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
                        self._server = ForkServer.spawned(_PROGRAM, _environment(os.environ))
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


class ComputeWorker(Process):
    """One process, with a connection that does not block, used by one task at a time."""

    async def compute(self, body: bytes, descriptors: Sequence[int], max_bytes: int) -> bytes:
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
            return await ask(self.connection, request, max_bytes)
        except ConnectionError as error:
            raise WorkerLost(is_hung=False) from error


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
            return await self._server.start(self._task)
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
        """The reply of an idle process; see `ComputeWorker.compute`. The caller has a turn.

        Raises:
            Overloaded: no process can be started.
            WorkerLost: the process died, took longer than the deadline, or sent no reply of its
                task, as `is_reply` tells.
        """
        worker = self.idle.pop() if self.idle else await self.start()
        is_sound = False
        try:
            async with asyncio.timeout(deadline_s):
                reply = await worker.compute(body, descriptors, max_bytes)
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
