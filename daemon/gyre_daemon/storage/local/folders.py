"""Lists the single files below a local folder, at any depth, as one table.

A few system calls for each folder, and one for each file: that of its size and times.
"""

import logging
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

import numpy as np

from gyre_daemon.errors import NotAllowed
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.beneath import NotRegular, Root
from gyre_daemon.storage.file_table import FileTable, Texts
from gyre_daemon.storage.local.listing import file_error
from gyre_daemon.storage.location import encoded_name

_Entry = tuple[bytes, os.stat_result | None]  # a name, with a slash if it is a folder


@dataclass(slots=True)
class _Found:
    """The files found so far, in their order."""

    pieces: list[bytes] = field(default_factory=list)
    name_sizes: "array[int]" = field(default_factory=lambda: array("q"))
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    stamps: "array[int]" = field(default_factory=lambda: array("q"))
    num_odd: int = 0

    def add(self, name: bytes, status: os.stat_result) -> None:
        self.pieces.append(name)
        self.name_sizes.append(len(name))
        self.sizes.append(status.st_size)
        self.stamps.append(status.st_mtime_ns)
        self.stamps.append(status.st_ctime_ns)
        if len(self.pieces) >= _MAX_PIECES:
            self.pieces = [b"".join(self.pieces)]

    def table(self) -> FileTable:
        name_sizes = np.frombuffer(self.name_sizes, np.int64)
        names = Texts.joined(self.pieces, name_sizes)
        stamps = np.frombuffer(self.stamps, np.int64).reshape(-1, 2)
        return FileTable(names, np.frombuffer(self.sizes, np.int64), stamps=stamps)


# Names are joined whenever there are this many, since each takes 33 bytes more as an object. They
# are copied once more each time.
_MAX_PIECES = 1 << 20


def list_folder(root: Root, is_wanted: Callable[[str], bool]) -> FileTable:
    """The regular files below a folder, sorted as object storages list them: by path, as bytes.

    Hidden files and folders, and what is neither a file nor a folder, are left out. A link to a
    file beneath the root counts as a file. Only a root that links may leave has links to folders.

    Args:
        root: the folder.
        is_wanted: whether a file of this name, without its folder, counts.

    Raises:
        NotAllowed: a folder cannot be read, or a link leads where none may.
        InvalidRequest: a name is no UTF-8.
        ShardMissing, StorageUnavailable: the folder is not there, or the file system fails.
    """
    found = _Found()
    for name, status in _files(root, is_wanted, found):
        found.add(name, status)
    if found.num_odd:
        facts = {"path": root.folder, "num_entries": found.num_odd}
        log_event("odd files among the shards are passed over", facts, logging.WARNING)
    return found.table()


def has_files(root: Root, is_wanted: Callable[[str], bool]) -> bool:
    """Whether `list_folder` would find a file; looks no further than the first one.

    Raises:
        NotAllowed, InvalidRequest, ShardMissing, StorageUnavailable: see `list_folder`.
    """
    return any(True for _ in _files(root, is_wanted, _Found()))


def stat_files(root: Root, names: Texts) -> FileTable:
    """Some files below a folder, in the order of their names, which are relative to it.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: the first of them that cannot be read.
    """
    found = np.empty((len(names), 3), np.int64)
    number = 0
    try:
        with root.held() as open_beneath:
            for number in range(len(names)):
                descriptor = open_beneath(names[number], os.O_PATH | os.O_CLOEXEC)
                try:
                    status = os.stat(descriptor)  # noqa: PTH116  # `Path` takes no descriptor
                finally:
                    os.close(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise NotRegular
                found[number] = status.st_size, status.st_mtime_ns, status.st_ctime_ns
    except OSError as error:
        name = names[number].decode() if len(names) else str(root.folder)
        raise file_error(name, error) from error
    return FileTable(names, found[:, 0].copy(), stamps=found[:, 1:].copy())


def _files(
    root: Root, is_wanted: Callable[[str], bool], found: _Found
) -> Iterator[tuple[bytes, os.stat_result]]:
    """The files below a folder, sorted by path; what is passed over is counted in ``found``."""
    waiting: list[tuple[bytes, Iterator[_Entry]]] = [(b"", _entries(root, b"", is_wanted, found))]
    while waiting:
        folder, entries = waiting[-1]
        for name, status in entries:
            if status is None:
                inner = folder + name
                waiting.append((inner, _entries(root, inner, is_wanted, found)))
                break
            yield folder + name, status
        else:
            waiting.pop()


def _entries(
    root: Root, folder: bytes, is_wanted: Callable[[str], bool], found: _Found
) -> Iterator[_Entry]:
    """The files and folders of one folder, sorted."""
    entries: list[_Entry] = []
    try:
        with root.scan(folder.decode() or ".") as scanned:
            for entry in scanned:
                name = entry.name
                if name.startswith("."):
                    continue
                if entry.is_file(follow_symlinks=False):
                    if is_wanted(name):
                        entries.append((encoded_name(name), entry.stat(follow_symlinks=False)))
                elif entry.is_dir(follow_symlinks=False):
                    entries.append((encoded_name(name) + b"/", None))
                elif entry.is_symlink() and (status := _followed(root, folder, name)):
                    if stat.S_ISDIR(status.st_mode):
                        entries.append((encoded_name(name) + b"/", None))
                    elif is_wanted(name):
                        entries.append((encoded_name(name), status))
                else:
                    found.num_odd += 1
    except OSError as error:
        raise file_error(folder.decode().rstrip("/") or str(root.folder), error) from error
    entries.sort(key=_name_of)
    return iter(entries)


def _name_of(entry: _Entry) -> bytes:
    return entry[0]


def _followed(root: Root, folder: bytes, name: str) -> os.stat_result | None:
    """The target of a link: a regular file or a folder; None for nothing or anything else.

    Raises:
        NotAllowed: it leads to a folder, and links may not leave the root, or to one around it.
        OSError: it leads out of the root.
    """
    path = folder.decode() + name
    try:
        status = root.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode):
        return status
    if not stat.S_ISDIR(status.st_mode):
        return None
    if not root.follow_links:
        raise NotAllowed(
            f"{root.folder / path} is a link to a folder; links to folders are followed only where "
            "`follow_links` is set. Set it, move the folder, or make it a separate dataset.",
            {"path": root.folder / path},
        )
    around = [root.folder / above for above in PurePath(path).parents]
    if any(os.path.samestat(status, above.stat()) for above in around):
        raise NotAllowed(
            f"{root.folder / path} is a link to a folder around it; remove it",
            {"path": root.folder / path},
        )
    return status
