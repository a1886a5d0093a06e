"""A daemon to talk to: one at an address that was given, or the private one of this run.

A private daemon is a process on a socket that only this user can reach. All loaders of
all ranks of a run on this machine share one. The first of them starts it; it is no child of theirs,
so it survives when one of them ends. The last one stops it. Where all were killed, it ends by
itself within seconds: it sees that no client holds a lock on its folder.

Its log, `gyred.log` in the folder, ends with the folder. If the daemon does not start and says
why, the folder stays until the next private daemon.
"""

import contextlib
import fcntl
import importlib.util
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    NotInstalled,
)
from gyre_client.transport.arguments import is_location, text
from gyre_client.transport.channel import (
    ENVIRONMENT_VARIABLE,
    Address,
    check_listener,
    parse_address,
)
from gyre_client.transport.connection import Connection, Outage
from gyre_client.transport.run import LOG, SOCKET, PrivateFolder, launched_as, locked, this_run

# The daemon ends with this status if its configuration is wrong: to start it again is no use.
BAD_CONFIGURATION = 2
# A start takes about a second; a busy machine or a cold disk may need many. A stop waits for reads
# in flight before the daemon is killed.
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
# An error quotes the end of the log. Beyond its limit, the log keeps its last quarter; its size
# is checked when a session opens, as a line comes with a session, an outage or a fault.
MAX_QUOTED_BYTES = 2000
MAX_LOG_BYTES = 4 << 20
_NEEDED = ("gyre_daemon", "fsspec", "numpy", "prometheus_client", "uvloop")

_log = logging.getLogger("gyre_client")


class PrivateDaemon:
    """The daemon of a run on this machine, and its folder. Safe to use from any thread.

    Attributes:
        name: The name of the run on this machine; processes that join with it share the daemon.
        address: Where the daemon listens, also after a restart.
        log_path: The daemon's log, at most `MAX_LOG_BYTES` when a session opens.
        pid: The process id of the daemon.
    """

    def __init__(self, name: str) -> None:
        """Joins the daemon, or starts it and waits until it answers.

        Raises:
            NotInstalled: The extra `daemon` is missing.
            DaemonUnavailable: The daemon does not start; the message quotes and names its log.
        """
        missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
        if missing:
            raise NotInstalled.needs("a private daemon", missing, "daemon")
        self._lock = threading.RLock()
        self.name = name
        self._folder = PrivateFolder(name)
        self.address: Address = parse_address(f"unix:{self._folder.path}/{SOCKET}", os.geteuid())
        self.log_path = self._folder.path / LOG
        self._log: FileIO = self.log_path.open("ab+", buffering=0)  # `leave` closes it
        self.pid = 0
        self._process = -1  # a descriptor, which cannot mean another process with its pid
        try:
            self._join()
        except BaseException:
            has_log = self._log.seek(0, os.SEEK_END) > 0
            self._log.close()
            if self._folder.is_last() and not has_log:
                self._folder.remove()
            else:
                self._folder.leave()
            raise

    def ensure(self) -> None:
        """Starts another daemon at the same address if the daemon has died.

        Raises:
            DaemonUnavailable: The daemon does not start again.
        """
        with self._lock:
            if not self._is_alive():
                self._join()
            elif os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
                kept = self._end_of_log(MAX_LOG_BYTES // 4)
                self._log.truncate(0)  # both append, so the daemon goes on at the new end
                self._log.write(kept)

    def leave(self) -> None:
        """Ends this process's use of the daemon; the last client stops it and removes the folder.

        Raises:
            DaemonUnavailable: Another user listens in its place.
        """
        with self._lock:
            is_last = self._folder.is_last()
            if is_last and (self._is_alive() or self._find()):
                self._stop()
            self._log.close()
            self._folder.remove() if is_last else self._folder.leave()
            if self._process >= 0:
                os.close(self._process)

    def forget(self) -> None:
        """Closes a forked process's descriptors of its parent's daemon."""
        self._folder.forget()
        if self._process >= 0:
            os.close(self._process)

    def _join(self) -> None:
        """Finds the daemon; starts it where there is none. One process does so at a time."""
        with self._alone():
            if self._find():
                _log.info("private daemon %d is shared; its log is %s", self.pid, self.log_path)
                return
            self._start()
            _log.info("private daemon %d writes its log to %s", self.pid, self.log_path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other process of the run starts the daemon."""
        # Opened here: the daemon inherits `_log`, and would keep a lock on it.
        with self.log_path.open("rb") as log:
            locked(log.fileno(), self.log_path, fcntl.LOCK_EX)
            yield

    def _find(self) -> bool:
        """Returns whether a daemon listens, and notes its process."""
        if self._process >= 0:
            os.close(self._process)
            self._process = -1
        try:
            pid = check_listener(self.address)
            if not pid:
                return pid is not None  # 0: in a container whose processes are not seen here
            self._process, self.pid = os.pidfd_open(pid), pid
        except (DaemonUnavailable, ProcessLookupError):
            return False
        return True

    def _is_alive(self) -> bool:
        if self._process < 0:
            return self._find()
        return not self._has_ended(0.0)

    def _has_ended(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process >= 0 and not self._has_ended(0.0):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, number)
                self._has_ended(STOP_TIMEOUT_S)

    def _start(self) -> None:
        """Starts a daemon that answers; a start that fails by chance is tried once more."""
        failure = self._start_once()
        if failure and failure[0] != BAD_CONFIGURATION:
            _log.warning("%s; starting it once more", failure[1])
            failure = self._start_once()
        if failure:
            raise DaemonUnavailable(failure[1])

    def _start_once(self) -> tuple[int, str] | None:
        """Returns the exit status and the words of a daemon that ended before it answered."""
        command = [sys.executable, "-m", "gyre_daemon", "serve"]
        # It forks the daemon, and ends with status 0 when that answers.
        starter = subprocess.Popen(
            [*command, "--socket-dir", str(self._folder.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the script to handle
        )
        if launched_as()[1] > 1:  # it works for all ranks: not only on this one's processors
            with contextlib.suppress(OSError):
                both = os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())
                os.sched_setaffinity(starter.pid, both)
        try:
            status = starter.wait(START_TIMEOUT_S)
        except BaseException as failure:
            os.killpg(starter.pid, signal.SIGKILL)  # the daemon is in its session
            starter.wait()
            if isinstance(failure, subprocess.TimeoutExpired):
                raise DaemonUnavailable(
                    f"the private daemon did not answer within {START_TIMEOUT_S:.0f} s: "
                    f"{self._said()}"
                ) from None
            raise
        if status == 0 and self._find():
            return None
        return status, f"the private daemon ended with status {status}: {self._said()}"

    def _end_of_log(self, max_bytes: int) -> bytes:
        num_bytes = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, num_bytes - max_bytes))
        return self._log.read()

    def _said(self) -> str:
        said = self._end_of_log(MAX_QUOTED_BYTES).decode(errors="replace").strip()
        return f"{said} (its log is {self.log_path})" if said else "it said nothing"


class _SharedDaemon:
    """The private daemon that this process is a client of, with the number of its users here.

    A forked child starts with none: its parent's daemon is not its own.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        # Reentrant: an interrupt on the way out must not lock out the thread that it interrupted.
        self._lock = threading.RLock()
        self._daemon: PrivateDaemon | None = None
        self._num_users = 0

    def _forget(self) -> None:
        if self._daemon is not None:
            self._daemon.forget()
        self._reset()

    def acquire(self, name: str = "") -> PrivateDaemon:
        """Returns the private daemon of this run on this machine, and starts it if there is none.

        Each call needs one `release` in the same process.

        `name` is that of another run's daemon, for a process that has none yet.

        Raises:
            NotInstalled: The extra `daemon` is missing.
            DaemonUnavailable: The daemon does not start.
        """
        with self._lock:
            if self._daemon is None:
                self._daemon = PrivateDaemon(name or this_run().on_node)
            self._num_users += 1
            return self._daemon

    def release(self) -> None:
        """Ends one use of the private daemon; it stops with its last user in any process."""
        with self._lock:
            self._num_users -= 1
            if self._num_users or self._daemon is None:
                return
            daemon, self._daemon = self._daemon, None
        daemon.leave()


_shared = _SharedDaemon()
acquire_private, release_private = _shared.acquire, _shared.release


@dataclass(frozen=True, slots=True)
class Target:
    """A daemon, and the means of this process to keep it running.

    Attributes:
        address: Where the daemon listens; it stays the same when the daemon is restarted.
        private: The private daemon, or None for a daemon that this process has not started.
    """

    address: Address
    private: PrivateDaemon | None = None

    def ensure(self) -> None:
        """Starts the private daemon again if it died; does nothing for any other daemon.

        Raises:
            DaemonUnavailable: The private daemon does not start.
        """
        if self.private is not None:
            self.private.ensure()

    def with_log(self, error: GyreError) -> GyreError:
        """Returns the error; where the private daemon is at fault, one that names its log."""
        if self.private is None or not isinstance(error, DaemonUnavailable | DaemonFault):
            return error
        return error.told(f"{error}. Its log is {self.private.log_path}")

    def release(self) -> None:
        """Ends this use of the daemon; a private daemon stops with its last user."""
        if self.private is not None:
            release_private()


def given_address(address: str | None) -> str | None:
    """Returns `address`, or the address in the environment, or None if there is neither."""
    return address or os.environ.get(ENVIRONMENT_VARIABLE) or None


def find_target(address: str | None, daemon_user: int | str | None = None) -> Target:
    """Returns the daemon at `address`; for None, the private daemon of this run.

    It may belong to `daemon_user`, as it may to root or this process's own user.

    Raises:
        InvalidRequest: The address has no known form, or there is no such user.
        DaemonUnavailable: The private daemon cannot be started.
    """
    if address is not None:
        return Target(parse_address(address, daemon_user))
    daemon = acquire_private()
    return Target(daemon.address, daemon)


def resolve_dataset(
    dataset: str | os.PathLike[str],
    data_format: str | None,
    address: str | None,
    daemon_user: int | str | None = None,
    reattach_timeout_s: float = 60.0,
) -> tuple[str | os.PathLike[str], str | None]:
    """Returns how a daemon knows a dataset, and the daemon's address; None for the private one.

    The daemon at `address` serves a path or URI or, without an address, a private daemon, whatever
    the environment says. Otherwise `dataset` is a name that the daemon at `address` or in the
    environment knows. Without `address`, it is `./DATASET` for a folder or file if that daemon has
    no dataset of this name.

    Raises:
        InvalidRequest: `dataset` is a name and there is no address; or the address is no text.
        GyreError: The daemon at the address in the environment does not answer for
            `reattach_timeout_s`.
    """
    if address is not None:
        address = text("address", address)
    if is_location(dataset, data_format):
        return dataset, address or None
    where = given_address(address)
    if not address and _exists(dataset):
        if where and _serves(find_target(where, daemon_user), dataset, reattach_timeout_s):
            _log.info(
                "%s is the dataset of that name at %s; ./%s is not read", dataset, where, dataset
            )
            return dataset, where
        path = Path(dataset).absolute()
        instead = f"; {where} has no dataset of that name" if where else ""
        _log.info("%s is the data at %s%s", dataset, path, instead)
        return f"./{dataset}", None
    if where is None:
        raise InvalidRequest(
            "no address was given, and a private daemon knows no dataset by the name "
            f"{os.fspath(dataset)!r}, and there is no folder of that name. Give the address of a "
            f"daemon (or set {ENVIRONMENT_VARIABLE})"
        )
    return dataset, where


def _exists(dataset: str | os.PathLike[str]) -> bool:
    try:
        return Path(dataset).exists()
    except (OSError, ValueError):  # a name too long for a path, or with a NUL
        return False


def _serves(target: Target, name: str | os.PathLike[str], reattach_timeout_s: float) -> bool:
    with Connection(target.address) as connection:
        served = Outage(reattach_timeout_s).retry(lambda _: connection.list_datasets())
    return any(each.name == name for each in served.datasets)
