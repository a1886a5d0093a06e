"""Which local files a location stands for, and the file system's facts of each."""

import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from gyre_daemon.errors import (
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.beneath import LeavesRoot, LocalFile, NotRegular, Root
from gyre_daemon.storage.location import relative_names
from gyre_daemon.storage.patterns import checked_glob, patterns_of, without_beside
from gyre_daemon.storage.shard import Shard, changed
from gyre_daemon.storage.splits import check_one_set, no_match
from gyre_daemon.storage.stamps import Stamp

_MAGIC = frozenset("*?[")

_Kind = Literal["file", "folder", "link", "other"]
_MAX_LOOKED_AT = 10_000  # entries of folders, for a message
_MAX_NAMED = 5  # of the entries that a listing passed over


def list_files(path: Path, pattern: str, *, follow_links: bool = False) -> list[LocalFile]:
    """The regular files that a path, a folder or a glob stands for, sorted by name.

    Their root is the folder that the path names: the folder itself, that of a file, or the part of
    a glob before its first wildcard. A link out of it counts as a file here, and is refused when it
    is opened. Pipes, sockets, devices and links that lead to nothing are passed over; one line of
    the log names them.

    Args:
        path: as written by the operator.
        pattern: which files of a folder count, such as `*.tar`.
        follow_links: whether links may lead out of the root.

    Raises:
        ShardMissing: there is none.
        NotAllowed: it is neither a regular file nor a folder, or the daemon may not read it.
        InvalidRequest: it is no valid glob, or a folder's files are several datasets.
        StorageUnavailable: the file system fails.
    """
    odd: set[str] = set()
    try:
        is_folder = path.is_dir()
        files = _matches(path, pattern, odd, follow_links=follow_links)
        exists = bool(files) or path.exists()
        if is_folder:
            files = without_beside(str(path), files, pattern, lambda file: file.path.name)
            # a folder means all of its files, so they must be one dataset; see `splits`
            check_one_set(str(path), [file.path.name for file in files], pattern)
        if is_folder and not files and not odd:
            names = [
                name
                for name, kind in _entries(Root(path, follow_links), "", "*")
                if kind != "folder"
            ]
            raise no_match(str(path), pattern, names, _below(Root(path, follow_links)))
    except OSError as error:
        raise file_error(str(path), error) from error
    except GyreError:
        raise
    except ValueError as error:
        raise InvalidRequest(f"{path} is no valid glob: {error}") from error
    if files:
        if odd:
            facts = {"path": path, "num_entries": len(odd), "names": _first(odd)}
            log_event("odd files among the shards are passed over", facts, logging.WARNING)
        return files
    if exists and not is_folder:
        raise NotAllowed(f"{path} is neither a regular file nor a folder", {"path": path})
    if odd:
        raise ShardMissing(
            f"no shard at {path}: what matches is no regular file but a pipe, a socket, a device "
            f"or a link that leads to nothing: {_first(odd)}",
            {"path": path},
        )
    raise ShardMissing(
        f"no shard at {path}: nothing is there; correct the dataset's URI", {"path": path}
    )


def list_shards(
    paths: Sequence[str], pattern: str, *, follow_links: bool
) -> tuple[list[LocalFile], list[Shard]]:
    """The files of all paths, and the same as shards; see `list_files` for arguments and errors."""
    files = list_all_files(paths, pattern, follow_links=follow_links)
    return files, stat_shards(files)


def list_all_files(paths: Sequence[str], pattern: str, *, follow_links: bool) -> list[LocalFile]:
    """The files of all paths; see `list_files` for arguments and errors."""
    return [
        file
        for path in paths
        for file in list_files(Path(path), pattern, follow_links=follow_links)
    ]


def names_in_folder(root: Root) -> list[str]:
    """The names in a folder, sorted; those of folders end with a slash. Nothing if it is none."""
    try:
        with root.scan("") as entries:
            return sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    except OSError:
        return []


def stat_shards(files: Sequence[LocalFile]) -> list[Shard]:
    """The files as shards, whose names are relative to the deepest folder with all of them."""
    return stat_named(files, relative_names([str(file) for file in files]))


def stat_named(files: Sequence[LocalFile], names: Sequence[str]) -> list[Shard]:
    """The files as shards of these names; see `stat_shard` for errors."""
    return [stat_shard(file, name) for file, name in zip(files, names, strict=True)]


def stat_shard(file: LocalFile, name: str) -> Shard:
    """A local file as a shard, with its size and version.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it does not exist, or cannot be read.
    """
    try:
        descriptor = file.open()
        try:
            stamp = Stamp.of(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise file_error(name, error) from error
    return Shard(name, stamp.size_bytes, stamp.version)


def check_listed(file: LocalFile, listed: Shard) -> None:
    """Check that a local file is as it was listed.

    Raises:
        CorruptSample: it has changed.
        ShardMissing, NotAllowed, StorageUnavailable: it does not exist, or cannot be read.
    """
    now = stat_shard(file, listed.name)
    if (now.size_bytes, now.version) != (listed.size_bytes, listed.version):
        raise changed(listed.name)


def file_error(name: str, error: OSError) -> GyreError:
    """The error for an operating system's error about a shard."""
    facts = {"shard": name}
    if isinstance(error, FileNotFoundError):
        return ShardMissing(
            f"shard {name} does not exist; restore it or correct the dataset's URI", facts
        )
    if isinstance(error, LeavesRoot):
        leads = f"the link {error.link} leads to {error.target}, which is"
        if not error.target:
            leads = f"{error.link} is"
        return NotAllowed(
            f"shard {name} is refused: {leads} outside of the dataset's folder {error.root}; if "
            "that is meant, set follow_links = true for the dataset",
            facts | {"link": error.link, "target": error.target, "root": error.root},
        )
    if isinstance(error, NotRegular):
        return NotAllowed(
            f"shard {name} is no regular file but a folder, a pipe, a socket or a device; remove "
            "it, or correct the dataset's URI",
            facts,
        )
    if isinstance(error, PermissionError):
        return NotAllowed(
            f"the daemon may not read shard {name}; grant its user read access", facts
        )
    return StorageUnavailable(f"shard {name} cannot be read: {error.strerror or error}", facts)


def _below(root: Root) -> list[str]:
    """Files in the folders of a folder, at any depth, for a message; not all of many."""
    found: list[str] = []
    folders = deque([""])
    num_left = _MAX_LOOKED_AT
    while folders and num_left > 0:
        folder = folders.popleft()
        for name, kind in _entries(root, folder, "*"):
            num_left -= 1
            if kind == "folder":
                folders.append(f"{name}/")
            elif kind == "file" and folder:
                found.append(name)
    return found


def _first(names: Collection[str]) -> str:
    """Some of the names, for a message."""
    more = ", ..." if len(names) > _MAX_NAMED else ""
    return ", ".join(sorted(names)[:_MAX_NAMED]) + more


def _matches(path: Path, pattern: str, odd: set[str], *, follow_links: bool) -> list[LocalFile]:
    """The matching files, sorted as object storages list them: by the whole path as text.

    Matches that can be no shards go to ``odd``.
    """
    if path.is_dir():
        root, globs = Root(path, follow_links), list(patterns_of(pattern))
    elif os.path.lexists(path) or not _MAGIC & set(str(path)):
        root, globs = Root(path.parent, follow_links), []
        return [LocalFile(root, path.name)] if _is_file(root, path.name) else []
    else:
        parts = path.parts
        first = next(number for number, part in enumerate(parts) if _MAGIC & set(part))
        root = Root(Path(*parts[:first]), follow_links)
        globs = [checked_glob("/".join(parts[first:]))]
    found = {name for glob in globs for name in _glob(root, "", glob.split("/"), odd)}
    return sorted((LocalFile(root, name) for name in found), key=str)


def _glob(root: Root, folder: str, parts: Sequence[str], odd: set[str]) -> Iterator[str]:
    """The files below a folder of the root that match; `**` goes through no link."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _glob(root, folder, rest, odd)
        for name, kind in _entries(root, folder, "*"):
            if kind == "folder":
                yield from _glob(root, f"{name}/", parts, odd)
        return
    # a name without a wildcard may be anything
    literal: list[tuple[str, _Kind]] = [(folder + part, "link")]
    found = _entries(root, folder, part) if _MAGIC & set(part) else literal
    for name, kind in found:
        if rest and kind != "file":
            yield from _glob(root, f"{name}/", rest, odd)
        elif not rest and (kind == "file" or (kind == "link" and _is_file(root, name))):
            yield name
        elif not rest and (kind == "other" or (kind == "link" and _is_odd(root, name))):
            odd.add(name)


def _entries(root: Root, folder: str, pattern: str) -> list[tuple[str, _Kind]]:
    """The matching entries of a folder, which has none if it is missing or no folder."""
    try:
        with root.scan(folder) as entries:
            return [
                (folder + each.name, _kind(each))
                for each in entries
                if fnmatchcase(each.name, pattern)
            ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except LeavesRoot:
        raise
    except PermissionError:
        if not folder:
            raise
        return []


def _kind(entry: "os.DirEntry[str]") -> _Kind:
    if entry.is_symlink():
        return "link"
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    return "file" if entry.is_file(follow_symlinks=False) else "other"


def _is_file(root: Root, name: str) -> bool:
    """Whether it is a regular file, or a link that may lead to one outside of the root."""
    try:
        return stat.S_ISREG(root.stat(name).st_mode)
    except LeavesRoot:
        return True
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def _is_odd(root: Root, name: str) -> bool:
    """Whether this, no regular file, is no folder either; a name without an entry is not odd."""
    try:
        return not stat.S_ISDIR(root.stat(name).st_mode)
    except OSError:
        return (root.folder / name).is_symlink()
