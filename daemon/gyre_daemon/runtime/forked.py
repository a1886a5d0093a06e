"""A server that forks processes for a daemon; see `process_server` for the daemon's side.

The server imports its processes' modules once, so that a further process takes some milliseconds.
Over its connection it receives the connections of new processes, one descriptor each. A process
first sends a descriptor of itself, by which the daemon kills it. All processes end with the daemon,
however that ends.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_SIGNALS_FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    connection: socket.socket,
    name: str,
    max_data_bytes: int,
    answer: Callable[[socket.socket], None],
) -> NoReturn:
    """Fork a process for every descriptor that comes; end all when the daemon is gone.

    Args:
        connection: to the daemon.
        name: of the processes, as `ps` shows it; at most 15 characters.
        max_data_bytes: limit of each process's allocations.
        answer: serves the connection of a process until the daemon hangs up.
    """
    os.setsid()  # its own group, which is killed at the end
    for number in _SIGNALS_FOR_THE_DAEMON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that ends leaves no zombie
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    gc.collect()
    gc.freeze()
    connection.sendall(b"\0")
    with contextlib.suppress(OSError):
        while descriptors := socket.recv_fds(connection, 1, 1)[1]:
            _fork(connection, descriptors[0], max_data_bytes, answer)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


def _fork(
    connection: socket.socket,
    descriptor: int,
    max_data_bytes: int,
    answer: Callable[[socket.socket], None],
) -> None:
    own = socket.socket(fileno=descriptor)
    try:
        pid = os.fork()
    except OSError:
        pid = -1  # the daemon sees that its connection is closed
    if pid:
        own.close()
        return
    connection.close()
    status = 1
    try:
        with contextlib.suppress(ConnectionError):
            _introduce(own, max_data_bytes)
            answer(own)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _introduce(connection: socket.socket, max_data_bytes: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_DATA, (max_data_bytes, max_data_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    myself = os.pidfd_open(os.getpid())
    socket.send_fds(connection, [b"\0"], [myself])
    os.close(myself)
