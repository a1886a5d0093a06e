"""Files with secrets: read only where nobody else could have read or written them."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.errors import ConfigError

MAX_BYTES = 256 << 10  # a chain of certificates has some KiB


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Metadata that changes when a file is written or replaced."""

    device: int
    inode: int
    size: int
    mode: int
    modified_ns: int
    changed_ns: int


def stamp_of(path: Path) -> FileStamp | None:
    """The file's stamp; None where there is no file, or none that may be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileStamp(
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mode,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def read_file(path: Path, setting: str, *, is_secret: bool) -> bytes:
    """The contents of a file of the operator.

    A secret must belong to root or to this process's user, and nobody else may read or write it.
    The group may read it if root owns it: so an orchestrator hands secrets to a user.

    Args:
        path: the file.
        setting: the setting that names it, for the error: "tls_key".
        is_secret: whether others must not read it.

    Raises:
        ConfigError: it cannot be read, is no regular file, is too large, or others may use it.
    """
    try:
        # A FIFO without a writer would block the call.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting}: cannot read {path}: {reason}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{setting}: {path} is no regular file")
        if is_secret:
            _check_private(found, path, setting)
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{setting}: {path} has more than {MAX_BYTES} bytes")
    return data


def _check_private(found: os.stat_result, path: Path, setting: str) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{setting}: {path} belongs to uid {found.st_uid}, who can change it; "
            f"it must belong to root or to uid {os.geteuid()}: chown it"
        )
    if mode & (0o037 if found.st_uid == 0 else 0o077):
        raise ConfigError(f"{setting}: others may use {path} (mode {mode:04o}): chmod 600 {path}")
