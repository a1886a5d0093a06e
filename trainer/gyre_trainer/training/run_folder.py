"""Checks that a run's files can be written, before any rank starts."""

import os
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
