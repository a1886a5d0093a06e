"""The keeper: the process that copiers are forked from, so that each has the arenas that were mapped before it began.

The first is forked by the daemon, before that has threads. One that died is replaced by a process that starts from nothing
(`__main__`), since a process with threads must not fork. It knows no arena that was there before: those are sealed, and nobody
can map them for writing any more.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from gyre_daemon.copiers.copier import Copier
from gyre_daemon.copiers.process import run
from gyre_daemon.copiers.wire import receive_reply

_MAX_WAIT_S = 2.0  # at the end, for one that waits for a disk
_START_DEADLINE_S = 60.0  # of an interpreter and numpy, on a machine with much else to do


class Keeper(Copier):
    """A copier that only forks others. Every method raises OSError where the process is gone."""

    def __init__(self, connection: socket.socket, pid: int, wait: Callable[[], None]) -> None:
        super().__init__(connection, pid, ())
        self._wait = wait

    @property
    def is_gone(self) -> bool:
        """The process has ended. Only for who holds it: it says nothing that was not asked."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """It ends, and leaves nothing to look after."""
        super().close()
        self._wait()


def fork_keeper() -> Keeper:
    """A new one; to be called before this process has threads or descriptors that matter.

    Raises:
        OSError: there can be no further process.
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
    return Keeper(ours, pid, partial(_await_end, pid))


def spawn_keeper() -> Keeper:
    """A new one, in a process that may have threads; waits until it has started.

    Raises:
        OSError: it cannot be started, or ended at once.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "gyre_daemon.copiers", str(theirs.fileno())]
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        except OSError:
            ours.close()
            raise
    keeper = Keeper(ours, child.pid, partial(_await_child, child))
    ours.settimeout(_START_DEADLINE_S)
    try:
        receive_reply(ours)
    except OSError:
        child.kill()
        keeper.close()
        raise
    ours.settimeout(None)
    return keeper


def _await_end(pid: int) -> None:
    deadline_s = time.monotonic() + _MAX_WAIT_S
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline_s:
            time.sleep(0.001)


def _await_child(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_MAX_WAIT_S)
