"""An interpreter that has imported, and the processes that are forked from it, as tests see them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_REPOSITORY = Path(__file__).parents[2]
_END_DEADLINE_S = 120.0


class Forked:
    """A process, with the part of Popen's interface that tests use.

    Attributes:
        pid: its own.
        returncode: as Popen has it; None while it is not known to have ended.
    """

    def __init__(self, told: int) -> None:
        """It runs.

        Args:
            told: a descriptor from which its pid can be read, and its exit status when it has ended; is owned from now on.
        """
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, in so many seconds.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, signum: int) -> None:
        """Nothing, if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout_s)[0]:
            self.returncode = int(self._told.readline())
            self._told.close()
        return self.returncode


class Interpreter:
    """One that imports once."""

    def __init__(self, modules: Sequence[str]) -> None:
        """It imports from now on; its first process has to wait for that.

        Args:
            modules: what it imports.
        """
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.preloaded"]  # without names: nobody who looks for a daemon takes it for one
        self._process = subprocess.Popen(command, stdin=theirs.fileno(), cwd=_REPOSITORY)
        theirs.close()
        self._requests.send(json.dumps(list(modules)).encode())

    def start(self, command: Sequence[str], stderr: IO[Any], environment: Mapping[str, str]) -> Forked:
        """A process that does what `python` with this command does: `-m MODULE` or `-c PROGRAM`, and arguments."""
        told, teller = os.pipe()
        request = {"command": list(command), "environment": dict(environment), "folder": str(Path.cwd())}
        with Path(os.devnull).open("rb") as stdin:
            streams = [stdin.fileno(), 1, stderr.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, teller])
        os.close(teller)
        return Forked(told)

    def close(self) -> None:
        """It has ended; what was forked from it goes on."""
        self._requests.close()
        self._process.wait(_END_DEADLINE_S)
