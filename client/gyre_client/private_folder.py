"""The folder of a private daemon's socket: this user's alone, held while its owner lives, cleared away when nobody does.

The owner holds a lock on the folder, the daemon one on a file in it, and the kernel drops both however a process ends. So a
folder with neither lock is one whose owner and daemon were killed, and the next private daemon removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from gyre_client.errors import DaemonUnavailable

SOCKET = "gyre.sock"
_LOCK = f"{SOCKET}.lock"  # that the daemon holds
_FILES = (SOCKET, f"{SOCKET}.side", _LOCK)  # whatever else is there, the folder is none of ours
_PREFIX = "gyred-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """A new folder in the system's folder for temporary files, with mode 0700.

    Attributes:
        path: of it.
    """

    def __init__(self) -> None:
        """Make and hold it; those that killed processes left behind are gone."""
        _clear_abandoned(Path(tempfile.gettempdir()))
        self._held = -1
        while self._held < 0:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._held = _hold(self.path)

    def ensure(self) -> None:
        """It is there, although the daemon may have removed it at its end.

        Raises:
            DaemonUnavailable: another user's folder is in its place.
        """
        while not _is_at(self._held, self.path):
            if self._held >= 0:
                os.close(self._held)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._held = _hold(self.path)

    def remove(self) -> None:
        """It is gone, with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._held)


def _hold(path: Path) -> int:
    """Returns the folder's descriptor, locked; -1 where it was cleared away before it was locked."""
    try:
        folder = os.open(path, _FLAGS)
    except FileNotFoundError:
        return -1
    with contextlib.suppress(OSError):  # a file system without locks, where nothing is cleared away either
        fcntl.flock(folder, fcntl.LOCK_SH)
    if os.fstat(folder).st_uid != os.geteuid():
        os.close(folder)
        raise DaemonUnavailable(f"the folder of the private daemon, {path}, belongs to another user now")
    if _is_at(folder, path):
        return folder
    os.close(folder)
    return -1


def _is_at(folder: int, path: Path) -> bool:
    try:
        return folder >= 0 and os.path.samestat(os.fstat(folder), path.lstat())
    except FileNotFoundError:
        return False


def _clear_abandoned(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just gone
            _clear(path)


def _clear(path: Path) -> None:
    """Remove a folder that is this user's, that nobody holds, and that has nothing in it but what a daemon leaves.

    Raises:
        OSError: it is not so.
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
    """Raises BlockingIOError where a daemon holds its lock file."""
    try:
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:  # none had started yet
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
