"""The daemon's side: starts fork servers, and knows each process by a descriptor.

A new program gets a copy of all descriptors of the thread that starts it, and the kernel closes
these copies when the program begins. To close a file of FUSE, even a copy, the kernel asks the
file's server. So while a mount hangs of which files are open, no program could be started. Programs
are started by a thread with its own descriptor table, which has no file of any dataset, because it
was made before one was opened. The event loop's descriptor for signals is missing there, too, so
the thread takes no signal: while the main thread starts another one, it blocks signals, and the
kernel gives them to the next thread.
"""

import contextlib
import ctypes
import functools
import os
import queue
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Literal, NamedTuple, Self

from gyre_daemon.workers.process import Work, serve
from gyre_daemon.workers.protocol import Kind, Message, introduced, receive, send

# A program starts in 0.3 s, and in some seconds on a busy machine; one that does not answer for
# longer never will.
_MAX_START_S = 60
# A copy worker that has not replied after _MAX_REPLY_S hangs. A batch group is copied in some
# 10 ms, and ranges on a disk are seldom given to a worker; a much shorter deadline would kill
# workers of a merely busy machine. A killed process is gone within _MAX_END_S, unless it
# waits for a disk. Then, too, it writes to no arena again: it ends before its next instruction.
_MAX_REPLY_S = 30
_MAX_END_S = 2.0


class Process:
    """A process that works for the daemon, used by one thread or task at a time.

    Attributes:
        pid: of the process.
        connection: only this side and the process have it.
    """

    def __init__(self, connection: socket.socket, pid: int, descriptor: int) -> None:
        """Take over a connection to a process that runs, and a descriptor of the process."""
        self.connection, self.pid, self._process = connection, pid, descriptor

    @classmethod
    def met(cls, connection: socket.socket) -> Self:
        """The process at the other side of a connection, once it has introduced itself.

        Raises:
            OSError: it was not forked, ended at once, or hangs; the connection is closed.
        """
        try:
            _set_deadline(connection, _MAX_START_S)
            process = cls(connection, *introduced(connection))
        except BlockingIOError as error:
            connection.close()
            raise TimeoutError(f"it did not start in {_MAX_START_S} s") from error
        except OSError:
            connection.close()
            raise
        _set_deadline(connection, _MAX_REPLY_S)
        return process

    def ask(self, request: Message) -> Message:
        """The reply to a request.

        Raises:
            OSError: the process is gone or hangs.
        """
        try:
            send(self.connection, request)
            reply = receive(self.connection)
        except BlockingIOError as error:
            raise TimeoutError(f"it did not answer in {_MAX_REPLY_S} s") from error
        if reply is None:
            raise ConnectionResetError("it ended")
        return reply

    def hang_up(self) -> None:
        """Let the process end after its current request; a thread that waits for it is told."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up; it is of no use afterwards."""
        self.hang_up()
        self.connection.close()
        os.close(self._process)

    def kill(self, *, waits: bool = False) -> None:
        """End the process now, whatever it does, and close.

        Args:
            waits: until it is gone, so that it writes nothing more.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        if waits:
            self._await_end()
        self.close()

    def _await_end(self) -> None:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        poll.poll(_MAX_END_S * 1000)


class ForkServer(Process):
    """The process that those of one kind are forked from; a child of the daemon."""

    @classmethod
    def forked(cls, work: Work) -> Self:
        """Fork a server with this process's memory, and none of its descriptors.

        The caller has no thread yet: a process that has any must not fork.

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
                own = theirs.fileno()
                os.closerange(3, own)
                os.closerange(own + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
                serve(theirs, work)
        return cls.met(ours)

    @classmethod
    def spawned(cls, kind: Literal["copy", "compute"], environment: Mapping[str, str]) -> Self:
        """Start a server as a new program, and wait until it serves.

        Raises:
            OSError: it cannot be started, ended at once, or hangs.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                arguments = ("-m", "gyre_daemon.workers", kind)
                pid = spawn_python(arguments, environment, theirs.fileno())
            except OSError:
                ours.close()
                raise
        try:
            return cls.met(ours)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def fork(self, connection: socket.socket, body: bytes = b"", max_data_bytes: int = 0) -> None:
        """Have a process forked, which then introduces itself.

        Args:
            connection: that the process serves; the caller closes its own.
            body: for the work of its kind.
            max_data_bytes: that it may allocate; 0 for no limit.

        Raises:
            OSError: the server is gone.
        """
        send(self.connection, Message(Kind.FORK, max_data_bytes, body, [connection.fileno()]))

    def close(self) -> None:
        """Have it end all its processes and itself, and leave no zombie."""
        self.hang_up()
        self._await_end()
        super().close()
        _reap(self.pid)


def _set_deadline(connection: socket.socket, seconds: int) -> None:
    """Limit all waiting by the kernel: `settimeout` would cost a system call for each request."""
    deadline = struct.pack("@ll", seconds, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, deadline)


def _reap(pid: int) -> None:
    """Leave no zombie of a child that has ended."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


_CLONE_FILES = 0x400
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(NamedTuple):
    arguments: Sequence[str]
    environment: Mapping[str, str]
    pid: "Future[int]"


class _Spawner:
    """The thread, which lives as long as the process."""

    def __init__(self) -> None:
        """Return once the thread has its table."""
        self._programs: queue.SimpleQueue[_Program] = queue.SimpleQueue()
        self._ours, self._theirs = socket.socketpair()
        self._turn = threading.Lock()  # of a descriptor and its program
        is_ready = threading.Event()
        threading.Thread(
            target=self._serve, args=(is_ready,), name="gyre-spawner", daemon=True
        ).start()
        is_ready.wait()

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], descriptor: int
    ) -> int:
        program = _Program(arguments, environment, Future())
        with self._turn:
            socket.send_fds(self._ours, [b"\0"], [descriptor])
            self._programs.put(program)
        return program.pid.result()

    def _serve(self, is_ready: threading.Event) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if _libc.unshare(_CLONE_FILES) == 0:  # a sandbox may forbid it
            own = self._theirs.fileno()
            os.closerange(3, own)
            os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
        is_ready.set()
        while True:
            program = self._programs.get()
            (descriptor,) = socket.recv_fds(self._theirs, 1, 1)[1]
            try:
                os.set_inheritable(descriptor, True)
                command = [sys.executable, *program.arguments, str(descriptor)]
                no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
                pid = os.posix_spawn(
                    sys.executable,
                    command,
                    program.environment,
                    file_actions=[no_input],
                    setsigmask=(),
                )
            except OSError as error:
                program.pid.set_exception(error)
            else:
                program.pid.set_result(pid)
            finally:
                os.close(descriptor)


@functools.cache
def start_spawner() -> _Spawner:
    """Make the thread; call this before any file of a dataset is open."""
    return _Spawner()


def spawn_python(arguments: Sequence[str], environment: Mapping[str, str], descriptor: int) -> int:
    """Start a Python interpreter without input, and return its process id.

    Args:
        arguments: of the interpreter; the number of the descriptor follows them.
        environment: of the process.
        descriptor: the only one that it inherits, beside standard output and error.

    Raises:
        OSError: the process cannot be started.
    """
    return start_spawner().spawn(arguments, environment, descriptor)
