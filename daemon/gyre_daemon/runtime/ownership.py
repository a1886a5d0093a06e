"""The daemon's own folders and files: only its user writes them.

Whoever may write into the folder of a socket, a lock, a cache or an index could exchange the
files in it. So a folder must belong to the daemon's user or to root, must not be writable
for others, and must not be a link, which might be led elsewhere. The same holds for files. New
files and folders are for the daemon's user alone, whatever the umask.
"""

import errno
import os
import stat
from pathlib import Path

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(PermissionError):
    """A folder or file that others control; `strerror` has the reason and the fix."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Have a folder that nobody else controls; missing ones are made with this mode.

    Raises:
        NotOurs: it is there, and others control it.
        OSError: it cannot be made.
    """
    if _make(path, mode):
        return
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a folder that others control.

    Raises:
        NotOurs: it belongs to another user, is writable for others, or is no folder but a link.
        OSError: it cannot be looked at.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise NotOurs(f"{path} is a link to {path.readlink()}; name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not is_ours(found):
        raise NotOurs(
            f"the folder {path} belongs to user {found.st_uid}, who could exchange its files; "
            f"`chown {os.geteuid()} {path}` or name another folder"
        )
    if found.st_mode & _OTHERS:
        raise NotOurs(
            f"the folder {path} has mode {stat.S_IMODE(found.st_mode):04o}, so other users could "
            f"exchange its files; `chmod go-w {path}` or name another folder"
        )


def open_ours(path: Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a regular file that nobody else made; the caller owns the descriptor.

    With `O_CREAT`, a missing file is made for this user alone. A file that is to be written must
    have no second name, by which it might be a file of another folder. So `O_TRUNC` is not allowed:
    it would act before the checks.

    Raises:
        NotOurs: it is a link, belongs to another user, is writable for others, or is no regular
            file.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | safe, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(f"{path} is a link; remove it") from error
        raise
    try:
        _check_file(path, os.fstat(descriptor), is_written=bool(flags & (os.O_RDWR | os.O_WRONLY)))
        if flags & os.O_EXCL:
            os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_ours(found: os.stat_result) -> bool:
    """Whether something belongs to this user or to root."""
    return found.st_uid in (0, os.geteuid())


def _check_file(path: Path, found: os.stat_result, *, is_written: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(f"{path} is no regular file; remove it")
    if not is_ours(found):
        raise NotOurs(f"{path} belongs to user {found.st_uid}; remove it")
    if found.st_mode & stat.S_IWOTH:
        raise NotOurs(f"{path} is writable for other users; remove it")
    if is_written and found.st_nlink > 1:
        raise NotOurs(f"{path} has another name elsewhere (a hard link); remove it")


def _make(path: Path, mode: int) -> bool:
    """Whether the folder was made, with its parents where they are missing too."""
    try:
        path.mkdir(mode)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if path.parent.is_dir():  # such as /proc, where nothing can be made
            raise
        _make(path.parent, mode)
        return _make(path, mode)
    path.chmod(mode)
    return True
