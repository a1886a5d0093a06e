"""The folder of a private daemon's socket and log: only this user can enter it.

Every client holds a shared lock on the folder, and the daemon holds a lock on a file in it. The
kernel drops both locks however a process ends. The daemon ends when no client is left; it, or the
last client, removes the folder under an exclusive lock. A folder without any lock belonged to
processes that were killed, and the next private daemon removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from gyre_client.errors import DaemonUnavailable
from gyre_client.transport.address import MAX_SOCKET_PATH_BYTES

SOCKET = "gyre.sock"
LOG = "gyred.log"
NUM_LETTERS = 12  # of the name of a run on this machine
# A lock is held for so long where a daemon starts, or where it ends and the folder is removed.
LOCK_TIMEOUT_S = 90.0
_POLL_S = 0.02
_LOCK = f"{SOCKET}.lock"  # the daemon holds a lock on this file
_FILES = (
    SOCKET,
    f"{SOCKET}.side",
    _LOCK,
    LOG,
)  # a folder with any other file is not ours to remove
_PREFIX = "gyred-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A folder in the system's folder for temporary files, with mode 0700; clients share it.

    Where the path of a socket there is too long for the system, it is in `/tmp`.

    Attributes:
        path: Where the folder is.
    """

    def __init__(self, name: str) -> None:
        """Makes the folder of this name, or joins its clients; removes abandoned folders.

        Raises:
            DaemonUnavailable: Another user's folder is in its place, or it cannot be locked.
        """
        root = temporary_folder()
        _clear_abandoned(root)
        self.path = root / f"{_PREFIX}{name}"
        self._descriptor = -1
        while self._descriptor < 0:
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = _share(self.path)

    def is_last(self) -> bool:
        """Gives the lock up, unless no other client has one: then no further client can enter."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def remove(self) -> None:
        """Removes the folder with everything in it; for the last client."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """Leaves the folder to other clients, or to the next private daemon that removes it."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for forks that still have it open
        self.forget()

    def forget(self) -> None:
        """Closes the folder in a forked process, whose parent goes on with it."""
        os.close(self._descriptor)


def temporary_folder() -> Path:
    """Returns where private daemons of this machine have their folders."""
    root = Path(tempfile.gettempdir())
    socket = root / f"{_PREFIX}{'x' * NUM_LETTERS}" / SOCKET
    is_short = len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES
    return root if is_short else Path("/tmp")


def locked(descriptor: int, path: Path, kind: int) -> bool:
    """Locks the open file of a descriptor; false if it is not at the path any more.

    Raises:
        DaemonUnavailable: A process holds the lock for too long, or there are no locks.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while is_at(descriptor, path):
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return is_at(descriptor, path)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise DaemonUnavailable(
                    f"{path} was locked by another process for {LOCK_TIMEOUT_S:.0f} s. End what is "
                    "left of this run, or remove it"
                ) from None
            time.sleep(_POLL_S)
        except OSError as error:
            raise DaemonUnavailable(
                f"{path} cannot be locked: {error.strerror}. Set TMPDIR to a folder of a local disk"
            ) from error
    return False


def is_at(descriptor: int, path: Path) -> bool:
    """Returns whether the path still leads to the open file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _share(path: Path) -> int:
    """Returns a descriptor of the folder, locked; -1 if another process removed it meanwhile."""
    try:
        folder = os.open(path, _FLAGS)
    except FileNotFoundError:
        return -1
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise DaemonUnavailable(
                f"the folder of the private daemon, {path}, belongs to another user. Remove it"
            )
        if locked(folder, path, fcntl.LOCK_SH):
            return folder
    except BaseException:
        os.close(folder)
        raise
    os.close(folder)
    return -1


def _clear_abandoned(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        # The folder belongs to another user, is in use, or has just gone.
        with contextlib.suppress(OSError):
            _clear(path)


def _clear(path: Path) -> None:
    """Removes an abandoned folder of this user that holds only the files of a daemon.

    Raises:
        OSError: The folder is in use, or it cannot be opened.
    """
    folder = os.open(path, _FLAGS)
    try:
        with os.scandir(folder) as entries:
            is_ours = {entry.name for entry in entries} <= set(_FILES)
        if not is_ours or os.fstat(folder).st_uid != os.geteuid():
            return
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_daemon_is_gone(folder)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        path.rmdir()
    finally:
        os.close(folder)


def _check_daemon_is_gone(folder: int) -> None:
    """Raises BlockingIOError if a daemon holds its lock file."""
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
