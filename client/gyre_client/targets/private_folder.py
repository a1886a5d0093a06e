"""The folder of a private daemon's socket and log: only this user can enter it.

The owner holds a lock on the folder, and the daemon holds one on a file in it. The kernel drops
both locks however a process ends. So a folder with neither lock belonged to an owner and a daemon
that were killed, and the next private daemon removes it.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from gyre_client.errors import DaemonUnavailable
from gyre_client.transport.address import MAX_SOCKET_PATH_BYTES

SOCKET = "gyre.sock"
LOG = "gyred.log"
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
    """A new folder in the system's folder for temporary files, with mode 0700.

    Where the path of a socket there is too long for the system, it is in `/tmp`.

    Attributes:
        path: Where the folder is.
    """

    def __init__(self) -> None:
        """Makes and locks the folder, and removes folders that killed processes left behind."""
        root = _root()
        _clear_abandoned(root)
        self._descriptor = -1
        while self._descriptor < 0:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._descriptor = _lock(self.path)

    def ensure(self) -> None:
        """Makes the folder again if the daemon removed it when it ended.

        Raises:
            DaemonUnavailable: Another user's folder is in its place.
        """
        while not _is_at(self._descriptor, self.path):
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = _lock(self.path)

    def remove(self) -> None:
        """Removes the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """Leaves the folder to the next private daemon of this user, which removes it."""
        os.close(self._descriptor)


def _root() -> Path:
    root = Path(tempfile.gettempdir())
    socket = root / f"{_PREFIX}12345678" / SOCKET  # `mkdtemp` chooses eight letters
    is_short = len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES
    return root if is_short else Path("/tmp")


def _lock(path: Path) -> int:
    """Returns a descriptor of the folder, locked; -1 if another process removed it meanwhile."""
    try:
        folder = os.open(path, _FLAGS)
    except FileNotFoundError:
        return -1
    # Some file systems have no locks; nothing is cleared away there either.
    with contextlib.suppress(OSError):
        fcntl.flock(folder, fcntl.LOCK_SH)
    if os.fstat(folder).st_uid != os.geteuid():
        os.close(folder)
        raise DaemonUnavailable(
            f"the folder of the private daemon, {path}, belongs to another user now"
        )
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
