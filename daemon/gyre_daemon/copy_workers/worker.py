"""One copy worker, as the thread of the daemon sees it that uses it at the moment."""

import contextlib
import os
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from gyre_daemon.copy_workers.process import run
from gyre_daemon.copy_workers.protocol import (
    CopyRequest,
    Kind,
    Reply,
    receive_reply,
    send_request,
)
from gyre_daemon.copy_workers.ranges import Ranges
from gyre_daemon.runtime.spawning import spawn_python

# A worker that has not replied after _DEADLINE_S hangs. A batch group is copied in some 10 ms, and
# ranges on a disk are seldom given to a worker; a much shorter deadline would kill workers of a
# machine that is merely busy. A killed process is gone within _END_S, unless it waits for a
# disk. Then, too, it never writes to an arena again, since it ends before its next instruction.
_DEADLINE_S = 30
_END_S = 2.0


class File(Protocol):
    """An open file."""

    @property
    def key(self) -> int:
        """The file's name in requests."""

    @property
    def descriptor(self) -> int:
        """Stays open while a copy from the file is under way."""


class CopyWorker:
    """A process that copies, used by one thread at a time.

    Every request raises OSError where the process is gone or hangs.

    Attributes:
        pid: of the process.
        arenas: keys of the arenas that it has mapped.
        unneeded: keys of files that nobody reads any more; any thread may append to it.
        unneeded_arenas: keys of arenas that were closed while it was busy; the same.
    """

    def __init__(self, connection: socket.socket, pid: int, arenas: Iterable[int] = ()) -> None:
        """Take over a connection to a process that runs.

        Raises:
            OSError: the process has ended.
        """
        self.pid = pid
        self.arenas = set(arenas)
        self.unneeded: deque[int] = deque()
        self.unneeded_arenas: deque[int] = deque()
        self._connection = connection
        self._files: set[int] = set()
        self._process = os.pidfd_open(pid)
        # by the kernel: `settimeout` would cost a system call more for each request
        deadline = struct.pack("@ll", _DEADLINE_S, 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, deadline)

    def map(self, arena: int, descriptor: int) -> None:
        """Map one more arena; where that fails, `arenas` does not have it."""
        if self._ask(CopyRequest(Kind.MAP, arena, descriptor=descriptor)).is_done:
            self.arenas.add(arena)

    def unmap(self, arena: int) -> None:
        """Unmap an arena, if it is mapped."""
        if arena in self.arenas:
            self.arenas.remove(arena)
            self._ask(CopyRequest(Kind.UNMAP, arena))

    def unmap_unneeded(self) -> None:
        """Unmap the arenas that were closed while it was busy."""
        while self.unneeded_arenas:
            self.unmap(self.unneeded_arenas.popleft())

    def copy(self, arena: int, files: Iterable[File], ranges: Ranges) -> Reply:
        """Copy ranges of these files into an arena."""
        while self.unneeded:
            key = self.unneeded.popleft()
            if key in self._files:
                self._files.remove(key)
                send_request(self._connection, CopyRequest(Kind.CLOSE, key))
        for file in files:
            if file.key not in self._files:
                self._files.add(file.key)
                request = CopyRequest(Kind.OPEN, file.key, descriptor=file.descriptor)
                send_request(self._connection, request)
        return self._ask(CopyRequest(Kind.COPY, arena, ranges.to_bytes()))

    def hang_up(self) -> None:
        """Let the process end after its current request; a thread that waits for it is told."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; it is of no use afterwards."""
        self.hang_up()
        self._connection.close()
        os.close(self._process)

    def kill(self) -> None:
        """End the process now, so that it writes nothing more, and close."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self._await_end()
        self.close()

    def _ask(self, request: CopyRequest) -> Reply:
        try:
            send_request(self._connection, request)
            return receive_reply(self._connection)
        except BlockingIOError as error:
            raise TimeoutError(f"it did not answer in {_DEADLINE_S} s") from error

    def _await_end(self) -> None:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.poll(_END_S * 1000)


class ForkServer(CopyWorker):
    """The process that copy workers are forked from.

    It maps every arena and copies nothing. So a worker that replaces a dead one has all arenas,
    although those are sealed by then and could not be mapped for writing any more.
    """

    def fork(self) -> CopyWorker | None:
        """Fork a copy worker that has all arenas; None where no further process can be forked."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reply = self._ask(CopyRequest(Kind.FORK, descriptor=theirs.fileno()))
                if reply.is_done:
                    return CopyWorker(ours, reply.value, self.arenas)
            except OSError:
                ours.close()
                raise
        ours.close()
        return None

    def close(self) -> None:
        """Let it end, which it does after all its workers, and leave no zombie."""
        self.hang_up()
        self._await_end()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        super().close()


def start_fork_server() -> ForkServer:
    """Fork the fork server; the caller has no thread yet and no descriptor that matters.

    Raises:
        OSError: no further process can be forked.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            raise
        if not pid:
            run(theirs)
    return ForkServer(ours, pid)


def spawn_fork_server() -> ForkServer:
    """Start a fork server in a new interpreter, and wait until it serves.

    The caller may have threads: a process that has any must not fork. The new fork server has no
    arena that exists already, since those are sealed.

    Raises:
        OSError: the process cannot be started, or it ended at once.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            arguments = ("-m", "gyre_daemon.copy_workers")
            pid = spawn_python(arguments, os.environ, theirs.fileno())
        except OSError:
            ours.close()
            raise
    fork_server = ForkServer(ours, pid)
    try:
        receive_reply(ours)
    except OSError:
        fork_server.kill()
        raise
    return fork_server
