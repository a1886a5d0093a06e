"""The preloaded interpreter and the processes forked from it, as tests see them."""

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
    """A running process, with the part of Popen's interface that tests use.

    Attributes:
        pid: The process id.
        returncode: As Popen has it; None while the process is not known to have ended.
    """

    def __init__(self, told: int) -> None:
        """Reads the pid.

        Args:
            told: The pipe for the pid and, later, the exit status; this object owns it.
        """
        self._told = os.fdopen(told, "rb", buffering=0)
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status; None while the process runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the process to end and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, signum: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            told = select.poll()  # `select.select` takes no descriptor above 1023
            told.register(self._told, select.POLLIN)
            if told.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = int(self._told.readline())
                self._told.close()
        return self.returncode


class Interpreter:
    """An interpreter that imports once and forks many processes."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Starts the imports; the first forked process waits for them.

        Args:
            modules: The modules to import.
        """
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The command line has no module's name: a search for daemons does not find it.
        command = [sys.executable, "-m", "tests.preloaded"]
        self._process = subprocess.Popen(command, stdin=theirs.fileno(), cwd=_REPOSITORY)
        theirs.close()
        self._requests.send(json.dumps(list(modules)).encode())

    def start(
        self, command: Sequence[str], stderr: IO[Any], environment: Mapping[str, str]
    ) -> Forked:
        """Forks a process that does what `python` with this command does.

        Args:
            command: `-m MODULE` or `-c PROGRAM`, and arguments.
            stderr: The process's standard error.
            environment: The process's whole environment.
        """
        told, teller = os.pipe()
        request = {
            "command": list(command),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
        }
        with Path(os.devnull).open("rb") as stdin:
            streams = [stdin.fileno(), 1, stderr.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, teller])
        os.close(teller)
        return Forked(told)

    def close(self) -> None:
        """Ends the interpreter; the processes forked from it go on."""
        self._requests.close()
        self._process.wait(_END_DEADLINE_S)
