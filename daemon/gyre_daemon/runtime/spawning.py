"""Starts programs from a thread with its own descriptor table.

A new process gets a copy of all descriptors of the thread that starts it, and the kernel closes
these copies when its program begins. To close a file of FUSE, even a copy, the kernel asks the
file's server. So while a mount hangs of which files are open, no program could be started. The
table of this thread has no file of any dataset, because it was made before one was opened. The
event loop's descriptor for signals is missing there, too, so the thread takes no signal: while the
main thread starts another one, it blocks signals, and the kernel gives them to the next thread.
"""

import ctypes
import functools
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

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
