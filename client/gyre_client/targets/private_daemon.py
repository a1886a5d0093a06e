"""A private daemon: a child process on a socket that only this user can reach.

All loaders of a process share one daemon: the first loader starts it, the last one stops it. The
child watches its parent, so it ends, and removes its folder, even if the parent is killed. If both
are killed, the next private daemon on this machine removes the folder.

Its log, `gyred.log` in the folder, ends with the folder. If the daemon does not start and says
why, the folder stays until the next private daemon.
"""

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
import time
from io import FileIO

from gyre_client.errors import DaemonUnavailable, NotInstalled, StorageUnavailable
from gyre_client.targets.private_folder import LOG, SOCKET, PrivateFolder
from gyre_client.transport.address import Address, parse_address
from gyre_client.transport.connection import Connection
from gyre_client.transport.trust import check_listener

# The daemon ends with this status if its configuration is wrong: to start it again is no use.
BAD_CONFIGURATION = 2
# A start takes about a second; a busy machine or a cold disk may need many. A stop waits for reads
# in flight before the child is killed.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.02
# An error quotes the end of the log. Beyond its limit, the log keeps its last quarter; that is
# looked at when a session opens, as a line comes with a session, an outage or a fault.
MAX_QUOTED_BYTES = 2000
MAX_LOG_BYTES = 4 << 20
_NEEDED = ("gyre_daemon", "aiofiles", "fsspec", "numpy", "prometheus_client", "uvloop")

_log = logging.getLogger("gyre_client")


class PrivateDaemon:
    """One child process and its folder. Safe to use from any thread.

    Attributes:
        address: Where the child listens, also after a restart.
        log_path: What the child says, at most `MAX_LOG_BYTES` when a session opens.
    """

    def __init__(self) -> None:
        """Starts the daemon and waits until it answers.

        Raises:
            NotInstalled: The extra `daemon` is missing.
            DaemonUnavailable: The daemon does not start; the message quotes and names its log.
        """
        missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
        if missing:
            raise NotInstalled.needs("a private daemon", missing, "daemon")
        self._lock = threading.RLock()
        self._folder = PrivateFolder()
        self.address: Address = parse_address(f"unix:{self._folder.path}/{SOCKET}", os.geteuid())
        self.log_path = self._folder.path / LOG
        self._log: FileIO = self.log_path.open("ab+", buffering=0)  # `stop` closes it
        try:
            self._child = self._start()
        except BaseException:
            self._keep_log()
            has_log = self._log.seek(0, os.SEEK_END) > 0
            self._log.close()
            self._folder.leave() if has_log else self._folder.remove()
            raise
        _log.info("private daemon %d writes its log to %s", self.pid, self.log_path)

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._child.pid

    def ensure(self) -> None:
        """Starts another child at the same address if the child has died.

        Raises:
            DaemonUnavailable: The daemon does not start again.
        """
        with self._lock:
            if self._child.poll() is not None:
                self._child = self._start()
            elif os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
                kept = self._end_of_log(MAX_LOG_BYTES // 4)
                self._log.truncate(0)  # both append, so the child goes on at the new end
                self._log.write(kept)

    def stop(self) -> None:
        """Ends the child and removes its folder."""
        with self._lock:
            self._child.terminate()
            try:
                self._child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._log.close()
            self._folder.remove()

    def _start(self) -> "subprocess.Popen[bytes]":
        """Returns a child that answers; a start that fails by chance is tried once more."""
        try:
            return self._start_once()
        except _StartFailed as failure:
            if failure.status == BAD_CONFIGURATION:
                raise
            _log.warning("%s; starting it once more", failure)
            return self._start_once()

    def _start_once(self) -> "subprocess.Popen[bytes]":
        self._keep_log()
        command = [sys.executable, "-m", "gyre_daemon", "serve", "--embedded"]
        command += ["--socket-dir", str(self._folder.path), "--parent-pid", str(os.getpid())]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the parent to handle
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
                raise _StartFailed(child.returncode, self._said())
            if (self._folder.path / SOCKET).exists() and self._answers(child.pid):
                return
            time.sleep(POLL_S)
        raise DaemonUnavailable(
            f"the private daemon did not answer within {START_TIMEOUT_S:.0f} s: {self._said()}"
        )

    def _answers(self, pid: int) -> bool:
        """Whether the child answers; no other process of this user is taken for it."""
        not_yet = (DaemonUnavailable, StorageUnavailable)  # the second if it answers too late
        with contextlib.suppress(*not_yet), Connection(self.address) as connection:
            connection.status(timeout_s=1.0)
            listener = check_listener(self.address)
            return listener is not None and listener.pid == pid
        return False

    def _keep_log(self) -> None:
        """Puts the log where it was: a daemon that ends in good order removes the folder."""
        self._folder.ensure()
        if not self.log_path.exists():
            kept = self._end_of_log(MAX_LOG_BYTES // 4)
            self._log.close()
            self._log = self.log_path.open("ab+", buffering=0)
            self._log.write(kept)

    def _end_of_log(self, max_bytes: int) -> bytes:
        num_bytes = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, num_bytes - max_bytes))
        return self._log.read()

    def _said(self) -> str:
        said = self._end_of_log(MAX_QUOTED_BYTES).decode(errors="replace").strip()
        return f"{said} (its log is {self.log_path})" if said else "it said nothing"


class _StartFailed(DaemonUnavailable):
    """A private daemon ended before it answered.

    Attributes:
        status: Its exit status; a negative signal number if it was killed.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"the private daemon ended with status {status}: {said}")
        self.status = status


class _SharedDaemon:
    """The private daemon of this process, with the number of its users.

    A forked child starts with none: its parent's daemon is not its own.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Reentrant: an interrupt on the way out must not lock out the thread that it interrupted.
        self._lock = threading.RLock()
        self._daemon: PrivateDaemon | None = None
        self._num_users = 0

    def acquire(self) -> PrivateDaemon:
        with self._lock:
            if self._daemon is None:
                self._daemon = PrivateDaemon()
            self._num_users += 1
            return self._daemon

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._daemon is None:
                return
            daemon, self._daemon = self._daemon, None
        daemon.stop()


_shared = _SharedDaemon()


def acquire() -> PrivateDaemon:
    """Returns this process's private daemon, and starts it if there is none.

    Each call needs one `release` in the same process.

    Raises:
        NotInstalled: The extra `daemon` is missing.
        DaemonUnavailable: The daemon does not start.
    """
    return _shared.acquire()


def release() -> None:
    """Ends one use of the private daemon; it stops with its last user."""
    _shared.release()
