"""Which local files a location stands for, and what the system says about each."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from gyre_daemon.errors import (
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.storage.patterns import checked_glob, patterns_of
from gyre_daemon.storage.shard import Shard, changed
from gyre_daemon.storage.splits import check_one_set, check_subfolders
from gyre_daemon.storage.stamps import Stamp


def list_files(path: Path, pattern: str) -> list[Path]:
    """The regular files that a path, a folder or a glob stands for, sorted by name.

    Args:
        path: as written by the operator; symbolic links are followed.
        pattern: which files of a folder count, such as `*.tar`.

    Raises:
        ShardMissing: there is none.
        NotAllowed: it is neither a regular file nor a folder, or the daemon may not read it.
        InvalidRequest: it is no valid glob, or a folder's files are several datasets.
        StorageUnavailable: the file system fails.
    """
    try:
        files = [file for file in _matches(path, pattern) if file.is_file()]
        exists = bool(files) or path.exists()
        if path.is_dir():
            _check_folder(path, files, pattern)
    except OSError as error:
        raise file_error(str(path), error) from error
    except GyreError:
        raise
    except ValueError as error:
        raise InvalidRequest(f"{path} is no valid glob: {error}") from error
    if files:
        return files
    if exists and not path.is_dir():
        raise NotAllowed(f"{path} is neither a regular file nor a folder", {"path": path})
    raise ShardMissing(
        f"no shard at {path}: check the dataset's URI and that it matches {pattern}", {"path": path}
    )


def stat_shard(path: Path, name: str) -> Shard:
    """A local file as a shard, with its size and version.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it does not exist, or cannot be read.
    """
    try:
        stamp = Stamp.of(path)
        if not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise file_error(name, error) from error
    return Shard(name, stamp.size_bytes, stamp.version)


def check_listed(path: Path, listed: Shard) -> None:
    """Check that a local file is still what was listed.

    Raises:
        CorruptSample: it has changed.
        ShardMissing, NotAllowed, StorageUnavailable: it does not exist, or cannot be read.
    """
    if stat_shard(path, listed.name) != listed:
        raise changed(listed.name)


def file_error(name: str, error: OSError) -> GyreError:
    """The error for an operating system's error about a shard."""
    facts = {"shard": name}
    if isinstance(error, FileNotFoundError):
        return ShardMissing(
            f"shard {name} does not exist; restore it or correct the dataset's URI", facts
        )
    if isinstance(error, PermissionError):
        return NotAllowed(
            f"the daemon may not read shard {name}; grant its user read access", facts
        )
    return StorageUnavailable(f"shard {name} cannot be read: {error.strerror or error}", facts)


def _check_folder(path: Path, files: Sequence[Path], pattern: str) -> None:
    """A folder means all of its files, so they must be one dataset; see `splits`."""
    check_one_set(str(path), [file.name for file in files], pattern)
    if not files:
        folders = [entry.name for entry in path.iterdir() if entry.is_dir()]
        check_subfolders(str(path), folders, pattern)


def _matches(path: Path, pattern: str) -> list[Path]:
    """The matching paths, sorted as object storages list them: by the whole path as text."""
    if path.is_dir():
        return sorted({file for each in patterns_of(pattern) for file in path.glob(each)}, key=str)
    if path.exists() or not any(letter in str(path) for letter in "*?["):
        return [path]
    glob = checked_glob(str(path.relative_to(path.anchor)))
    return sorted(Path(path.anchor).glob(glob), key=str)
