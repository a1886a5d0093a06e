"""The preloaded interpreter and the processes forked from it, as tests see them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
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
        self,
        command: Sequence[str],
        stderr: IO[Any],
        environment: Mapping[str, str],
        stdout: IO[Any] | None = None,
    ) -> Forked:
        """Forks a process that does what `python` with this command does.

        Args:
            command: `-m MODULE` or `-c PROGRAM`, and arguments.
            stderr: The process's standard error.
            environment: The process's whole environment.
            stdout: The process's standard output; None for that of this process.
        """
        told, teller = os.pipe()
        request = {
            "command": list(command),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
        }
        with Path(os.devnull).open("rb") as stdin:
            streams = [stdin.fileno(), stdout.fileno() if stdout else 1, stderr.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*streams, teller])
        os.close(teller)
        return Forked(told)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Forks a process as `start` does, waits for its end, and returns what it printed.

        Raises:
            subprocess.TimeoutExpired: It ran for longer than `timeout_s`; it was killed.
        """
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            process = self.start(command, stderr, environment, stdout)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_DEADLINE_S)
                raise
            for file in (stdout, stderr):
                file.seek(0)
            return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())

    def close(self) -> None:
        """Ends the interpreter; the processes forked from it go on."""
        self._requests.close()
        self._process.wait(_END_DEADLINE_S)
