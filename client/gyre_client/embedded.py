"""A private daemon: a child process on a socket that only this user can reach, gone with its parent.

All loaders of a process share one; the first starts it, the last stops it. The child watches its parent, so it ends, and
removes its directory, even when the parent is killed. Where both are killed, the next private daemon removes it.
"""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

from gyre_client.address import Address, parse_address
from gyre_client.connection import Connection
from gyre_client.errors import DaemonUnavailable, NotInstalled
from gyre_client.private_folder import SOCKET, PrivateFolder

BAD_CONFIGURATION = 2  # an exit status: it would end so again
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
MAX_STDERR_BYTES = 2000  # of the child's last words, in an error
_NEEDED = ("gyre_daemon", "aiofiles", "fsspec", "numpy", "prometheus_client", "uvloop")

_log = logging.getLogger(__name__)


class EmbeddedDaemon:
    """One child process and its directory. Safe to use from any thread."""

    def __init__(self) -> None:
        """Starts the daemon and waits until it answers.

        Raises:
            NotInstalled: The extra `daemon` is missing.
            DaemonUnavailable: The daemon does not start; the message has its last words.
        """
        missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
        if missing:
            raise NotInstalled.needs("a private daemon", missing, "daemon")
        self._lock = threading.Lock()
        self._folder = PrivateFolder()
        self.address: Address = parse_address(f"unix:{self._folder.path}/{SOCKET}")
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (has no name and ends with `stop`)
        try:
            self._child = self._start()
        except BaseException:
            self._remove_files()
            raise

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def ensure(self) -> None:
        """The child runs: if it died, another one has taken its place at the same address.

        Raises:
            DaemonUnavailable: It does not start again.
        """
        with self._lock:
            if self._child.poll() is not None:
                self._child = self._start()

    def stop(self) -> None:
        """The child has ended and its directory is gone."""
        with self._lock:
            self._child.terminate()
            try:
                self._child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._remove_files()

    def _remove_files(self) -> None:
        self._stderr.close()
        self._folder.remove()

    def _start(self) -> "subprocess.Popen[bytes]":
        """A child that answers; one that dies of anything but its configuration is started once more."""
        try:
            return self._start_once()
        except _Died as death:
            if death.status == BAD_CONFIGURATION:
                raise
            _log.warning("%s; starting it once more", death)
            return self._start_once()

    def _start_once(self) -> "subprocess.Popen[bytes]":
        self._folder.ensure()
        command = [sys.executable, "-m", "gyre_daemon", "serve", "--embedded"]
        command += ["--socket-dir", str(self._folder.path), "--parent-pid", str(os.getpid())]
        child = subprocess.Popen(  # a session of its own: Ctrl-C is for the parent to handle
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._stderr, start_new_session=True
        )
        try:
            self._wait_until_it_answers(child)
        except BaseException:
            child.kill()
            child.wait()
            raise
        return child

    def _wait_until_it_answers(self, child: "subprocess.Popen[bytes]") -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if child.poll() is not None:
                raise _Died(child.returncode, self._last_words())
            if (self._folder.path / SOCKET).exists() and self._answers():
                return
            time.sleep(POLL_S)
        raise DaemonUnavailable(f"the private daemon did not answer within {START_TIMEOUT_S:.0f} s: {self._last_words()}")

    def _answers(self) -> bool:
        with contextlib.suppress(DaemonUnavailable), Connection(self.address) as connection:
            connection.status(timeout_s=1.0)
            return True
        return False

    def _last_words(self) -> str:
        size_bytes = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size_bytes - MAX_STDERR_BYTES))
        return self._stderr.read().decode(errors="replace").strip() or "it said nothing"


class _Died(DaemonUnavailable):
    """A private daemon ended while it was started.

    Attributes:
        status: its exit status; a negative signal number where it was killed.
    """

    def __init__(self, status: int, last_words: str) -> None:
        super().__init__(f"the private daemon ended with status {status}: {last_words}")
        self.status = status


class _Shared:
    """The daemon of this process, counted by its users. A forked child starts with none: its parent's is not its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._daemon: EmbeddedDaemon | None = None
        self._num_users = 0
        os.register_at_fork(after_in_child=self._forget)

    def acquire(self) -> EmbeddedDaemon:
        with self._lock:
            if self._daemon is None:
                self._daemon = EmbeddedDaemon()
            self._num_users += 1
            return self._daemon

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._daemon is None:
                return
            daemon, self._daemon = self._daemon, None
        daemon.stop()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._daemon = None
        self._num_users = 0


_shared = _Shared()


def acquire() -> EmbeddedDaemon:
    """Returns this process's private daemon, started if there is none. Each call needs one `release` in the same process.

    Raises:
        DaemonUnavailable: See `EmbeddedDaemon`.
    """
    return _shared.acquire()


def release() -> None:
    """One user less; with the last one the daemon stops."""
    _shared.release()
