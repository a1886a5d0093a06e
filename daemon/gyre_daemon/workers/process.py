"""The processes' side: a server that forks the processes of its kind, and their common code.

A server is started once, with its modules imported, so that a further process takes some
milliseconds. All processes of a server end with the daemon, however that ends.
"""

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import traceback
from pathlib import Path
from typing import NoReturn, Protocol

from gyre_daemon.workers.protocol import Kind, Message, introduce, receive, send

# Ctrl-C and a service manager signal the whole group; workers end when the daemon does.
_SIGNALS_FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Work(Protocol):
    """What the processes of one kind do.

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
