"""Processes that work for the daemon: their messages, their side, and the daemon's side.

[Note: Messages]

Each process has a socket pair that only it and the daemon have. A message is HEADER | body, and may
bring descriptors. A new process sends `DONE` with its process id and a descriptor of itself; if it
cannot be forked, its server sends `FAILED` in its place. From then on the daemon sends requests,
and the process answers them in their order: `OPEN`, `CLOSE` and `FORK` with nothing, each other one
with `DONE` or `FAILED`.

Requests come from the daemon. Replies may come from a process that foreign bytes took over, so
their reader says how long they may be, and trusts nothing in them.

[Note: Servers]

A server forks the processes of its kind. It is started once, with its modules imported, so that a
further process takes some milliseconds. All processes of a server end with the daemon, however that
ends. The daemon knows each by a descriptor.

[Note: Programs are started without files]

A new program gets a copy of all descriptors of the thread that starts it, and the kernel closes
these copies when the program begins. To close a file of FUSE, even a copy, the kernel asks the
file's server. So while a mount with open files hangs, no program could be started. Programs
are started by a thread with its own descriptor table, which has no file of any dataset, because it
was made before one was opened. The event loop's descriptor for signals is missing there, too, so
the thread takes no signal: while the main thread starts another one, it blocks signals, and the
kernel gives them to the next thread.
"""

import asyncio
import contextlib
import ctypes
import functools
import gc
import os
import queue
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol, Self

HEADER = struct.Struct("<3q")  # kind, number, bytes of the body
_MAX_DESCRIPTORS = 2
# A reply is read in pieces of this size; most replies are shorter than one.
_PIECE_BYTES = 1 << 16


class Kind(IntEnum):
    """The kind of a message.

    Attributes:
        DONE: the request is done. The number of the first message of a process is its id; to
            `COPY`, the number tells how often it waited for a disk.
        FAILED: it is not done. The number of the first message is the `errno` of `fork`.
        FORK: fork a process that serves the connection whose descriptor comes along. The number is
            the limit of its memory, 0 for none.
        MAP: map the arena whose descriptor comes along, for writing. Its number names it.
        UNMAP: unmap an arena.
        OPEN: map the file whose descriptor comes along, for reading. Its number names it.
        CLOSE: unmap a file.
        COPY: copy the ranges in the body into an arena.
        COMPUTE: compute the reply's body.
    """

    DONE = 0
    FAILED = 1
    FORK = 2
    MAP = 3
    UNMAP = 4
    OPEN = 5
    CLOSE = 6
    COPY = 7
    COMPUTE = 8


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: selects the action, or tells the outcome.
        number: see `Kind`.
        body: bytes for the action, or its result.
        descriptors: at most two. The sender keeps its own, the receiver owns others.
    """

    kind: Kind
    number: int = 0
    body: bytes | bytearray = b""
    descriptors: Sequence[int] = ()


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone, or took nothing until the connection's deadline.
    """
    rest = _send_some(connection, message)
    if rest:
        connection.sendall(rest)


def receive(connection: socket.socket) -> Message | None:
    """The next message, of a sender that is trusted; None where the other side is gone.

    Raises:
        OSError: none came until the connection's deadline.
    """
    header, descriptors, _, _ = socket.recv_fds(
        connection, HEADER.size, _MAX_DESCRIPTORS, socket.MSG_WAITALL
    )
    if len(header) < HEADER.size:
        return None
    kind, number, num_bytes = HEADER.unpack(header)
    body = bytearray(num_bytes)
    rest = memoryview(body)
    while rest:
        num_received = connection.recv_into(rest, 0, socket.MSG_WAITALL)
        if not num_received:
            return None
        rest = rest[num_received:]
    return Message(Kind(kind), number, body, descriptors)


async def ask(connection: socket.socket, request: Message, max_bytes: int) -> bytes:
    """The body of the reply to a request, over a connection that does not block.

    Args:
        connection: nothing else is under way on it.
        request: to send.
        max_bytes: of the reply's body.

    Raises:
        ConnectionError: the other side is gone, or sent no such reply.
    """
    loop = asyncio.get_running_loop()
    rest = _send_some(connection, request)
    if rest:
        await loop.sock_sendall(connection, rest)
    data, num_bytes = bytearray(), HEADER.size
    while len(data) < num_bytes:
        piece = await loop.sock_recv(connection, _PIECE_BYTES)
        if not piece:
            raise ConnectionResetError("it ended")
        data += piece
        if num_bytes == HEADER.size <= len(data):
            kind, _, length = HEADER.unpack_from(data)
            if kind != Kind.DONE or not 0 <= length <= max_bytes:
                raise ConnectionResetError("it sent no reply")
            num_bytes += length
    if len(data) > num_bytes:
        raise ConnectionResetError("it sent more than a reply")
    return bytes(memoryview(data)[HEADER.size :])


def introduce(connection: socket.socket) -> None:
    """Send the first message of this process."""
    myself = os.pidfd_open(os.getpid())
    send(connection, Message(Kind.DONE, os.getpid(), descriptors=[myself]))
    os.close(myself)


def introduced(connection: socket.socket) -> tuple[int, int]:
    """The id and the descriptor of a new process, from its first message.

    Raises:
        OSError: it was not forked, or ended at once.
    """
    message = receive(connection)
    if message is None:
        raise ConnectionResetError("it ended at once")
    if message.kind == Kind.FAILED:
        raise OSError(message.number, os.strerror(message.number))
    (descriptor,) = message.descriptors
    return message.number, descriptor


def _send_some(connection: socket.socket, message: Message) -> memoryview | bytes:
    """Send the descriptors and a part of the bytes; the bytes that are left."""
    header = HEADER.pack(message.kind, message.number, len(message.body))
    parts = [header, message.body]
    if message.descriptors:
        num_sent = socket.send_fds(connection, parts, list(message.descriptors))
    else:
        num_sent = connection.sendmsg(parts)
    if num_sent < HEADER.size:
        return header[num_sent:] + message.body
    return memoryview(message.body)[num_sent - HEADER.size :]


# Ctrl-C and a service manager signal the whole group; workers end when the daemon does.
_SIGNALS_FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Work(Protocol):
    """The work of the processes of one kind.

    Attributes:
        name: of the processes, as `ps` shows it; at most 15 characters.
    """

    name: str

    def prepare(self, body: bytes | bytearray) -> None:
        """Do in the server the first work of a process; `body` is that of `FORK`."""

    def begin(self, body: bytes | bytearray) -> None:
        """Begin in a process that was just forked."""

    def answer(self, request: Message) -> Message | None:
        """Carry out a request; its reply, if it has one."""


def serve(connection: socket.socket, work: Work) -> NoReturn:
    """Turn this process into the server of a kind of process, until the daemon hangs up.

    Each process that it forks returns into the same loop, and ends as its own connection does.
    """
    server, status = 0, 1
    children: list[int] = []  # descriptors
    try:
        os.setsid()  # its own group, which is killed at the end
        server = os.getpid()
        _prepare(work.name)
        introduce(connection)
        with contextlib.suppress(ConnectionError):
            _answer(connection, work, children)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if os.getpid() == server:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.wait()  # returns when all have ended, as SIGCHLD is ignored
            os.killpg(0, signal.SIGKILL)  # and processes that users' functions started
        os._exit(status)


def _prepare(name: str) -> None:
    for number in _SIGNALS_FOR_THE_DAEMON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that ends leaves no zombie
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        # a core dump after SIGBUS would hold whole arenas
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _name(name)
    gc.collect()
    gc.freeze()


def _answer(connection: socket.socket, work: Work, children: list[int]) -> None:
    """Answer requests until the daemon hangs up; has descriptors of the processes forked."""
    while request := receive(connection):
        if request.kind == Kind.FORK:
            connection = _fork(connection, request, work, children)
        elif reply := work.answer(request):
            send(connection, reply)


def _fork(
    connection: socket.socket, request: Message, work: Work, children: list[int]
) -> socket.socket:
    """Fork; the connection that this process serves from now on."""
    (descriptor,) = request.descriptors
    own = socket.socket(fileno=descriptor)
    work.prepare(request.body)
    try:
        pid = os.fork()
    except OSError as error:
        pid = -1
        with contextlib.suppress(ConnectionError):
            send(own, Message(Kind.FAILED, error.errno or 0))
    if pid:
        own.close()
        for ended in filter(_has_ended, tuple(children)):
            children.remove(ended)
            os.close(ended)
        with contextlib.suppress(OSError):  # none was forked, or it has ended
            children.append(os.pidfd_open(pid))
        return connection
    connection.close()
    for child in children:
        os.close(child)
    if request.number:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_DATA, (request.number, request.number))
    work.begin(request.body)
    _name(work.name)
    introduce(own)
    return own


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _name(name: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


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
    def spawned(cls, program: str, environment: Mapping[str, str]) -> Self:
        """Start a server as a new program, and wait until it serves.

        Args:
            program: calls `serve`, with the connection whose descriptor is `sys.argv[1]`.
            environment: of the program.

        Raises:
            OSError: it cannot be started, ended at once, or hangs.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = spawn_python(("-c", program), environment, theirs.fileno())
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
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


def _set_deadline(connection: socket.socket, seconds: int) -> None:
    """Limit all waiting by the kernel: `settimeout` would cost a system call for each request."""
    deadline = struct.pack("@ll", seconds, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, deadline)


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
