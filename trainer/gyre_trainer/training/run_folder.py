"""Checks that a run's files can be written and read, before anything is opened."""

import os
import stat
from pathlib import Path

from gyre_trainer.errors import ConfigError


def require_writable(folder: Path, key: str) -> None:
    """Check that ``folder`` is a folder that this process may write to, or can be made as one.

    Nothing is made.

    Args:
        folder: where files will be written.
        key: the configuration key or flag that names it, for the message.

    Raises:
        ConfigError: it is no folder, or may not be written to.
    """
    try:
        existing = next(each for each in (folder, *folder.absolute().parents) if _exists(each))
    except (OSError, ValueError) as error:
        raise ConfigError(f"`{key}` is {str(folder)!r}: {_reason(error)}") from error
    if not existing.is_dir():
        raise ConfigError(f"`{key}` is {folder}, but {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"`{key}` is {folder}, but {existing} cannot be written to; "
            "choose another folder, or change its permissions"
        )


def require_regular(path: Path) -> None:
    """Check that a regular file is at ``path``, or nothing: to open a pipe could take for ever.

    Raises:
        ConfigError: something else is there.
        OSError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"{path} is no regular file but a folder, a pipe, a socket or a device; remove it, "
            "or choose another `run.out`"
        )


def _exists(path: Path) -> bool:
    """Whether there is something under this name, a dangling link too."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except NotADirectoryError:  # a file is in the way further up
        return False
    return True


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
