"""Which local files a location stands for, the file system's facts of each, and shards as files.

Shards are listed by pattern. Single files below a folder, at any depth, become one table, with a
few system calls for each folder, and one for each file: that of its size and times.

Threads read a shard as a file, whole or by position, and a few byte ranges of shards at once.
"""

import asyncio
import contextlib
import errno
import io
import logging
import os
import stat
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePath
from typing import BinaryIO, Literal, cast

import numpy as np
from msgspec import Struct, field

from gyre_daemon.errors import (
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    first_error,
)
from gyre_daemon.runtime.events import log_event
from gyre_daemon.storage.beneath import (
    LeavesRoot,
    LocalFile,
    NotRegular,
    OpenBeneath,
    Root,
    file_error,
)
from gyre_daemon.storage.location import (
    check_one_set,
    checked_glob,
    encoded_name,
    no_match,
    patterns_of,
    without_beside,
)
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.open_shards import Stamp
from gyre_daemon.storage.reads import Reads, Storage
from gyre_daemon.storage.shard import FileTable, PositionedFile, Shard, Texts, changed

_MAGIC = frozenset("*?[")

_Kind = Literal["file", "folder", "link", "other"]
_MAX_LOOKED_AT = 10_000  # entries of folders, for a message
_MAX_NAMED = 5  # of the entries that a listing passed over

_Entry = tuple[bytes, os.stat_result | None]  # a name, with a slash if it is a folder


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
            files = without_beside(str(path), files, pattern, lambda file: file.base_name)
            # a folder means all of its files, so they must be one dataset; see `check_one_set`
            check_one_set(str(path), [file.base_name for file in files], pattern)
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


def stat_named(files: Sequence[LocalFile], names: Sequence[str]) -> list[Shard]:
    """The files as shards of these names; see `stat_shard` for errors."""
    found: list[Shard] = []
    for root, some in groupby(zip(files, names, strict=True), lambda each: each[0].root):
        try:
            with root.held() as open_beneath:
                found += [stat_shard(file, name, open_beneath) for file, name in some]
        except OSError as error:  # of the root itself
            raise file_error(names[len(found)], error) from error
    return found


def stat_shard(file: LocalFile, name: str, open_beneath: OpenBeneath | None = None) -> Shard:
    """A local file as a shard, with its size and version.

    Args:
        file: the file.
        name: the shard's.
        open_beneath: from `Root.held` of the file's root, if it is held.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it does not exist, or cannot be read.
    """
    try:
        descriptor = file.open(open_beneath)
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


class _Found(Struct):
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
    waiting: list[tuple[bytes, Iterator[_Entry]]] = [
        (b"", _sorted_entries(root, b"", is_wanted, found))
    ]
    while waiting:
        folder, entries = waiting[-1]
        for name, status in entries:
            if status is None:
                inner = folder + name
                waiting.append((inner, _sorted_entries(root, inner, is_wanted, found)))
                break
            yield folder + name, status
        else:
            waiting.pop()


def _sorted_entries(
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
    entries.sort(key=itemgetter(0))
    return iter(entries)


def _followed(root: Root, folder: bytes, name: str) -> os.stat_result | None:
    """The target of a link: a regular file or a folder; None for nothing or anything else.

    Raises:
        NotAllowed: it leads out of the root, or to a folder where links are not followed, or to one
            around it.
        OSError: it cannot be looked at.
    """
    path = folder.decode() + name
    try:
        status = root.stat(path)
    except FileNotFoundError:
        return None
    except LeavesRoot as error:
        raise file_error(path, error) from error
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


class StorageFile(PositionedFile):
    """The only shard of a storage as a file for another thread; each read asks for a range."""

    def __init__(self, storage: Storage, loop: asyncio.AbstractEventLoop) -> None:
        """At the beginning of the shard.

        Args:
            storage: of one shard.
            loop: the event loop that it is used from.
        """
        super().__init__(storage.shards[0].size_bytes)
        self._storage = storage
        self._loop = loop

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read a range into the buffer.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """
        start, stop = self._position, min(self._position + len(buffer), self._num_bytes)
        if start >= stop:
            return 0
        piece = np.frombuffer(buffer, np.uint8)[: stop - start]
        reading = self._storage.read(Reads.into([piece], [0], [start]))
        try:
            asyncio.run_coroutine_threadsafe(reading, self._loop).result()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        self._position = stop
        return stop - start


class _StreamFile(io.RawIOBase):
    """A stream of the event loop as a file that another thread reads once."""

    def __init__(self, chunks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._chunks = chunks
        self._loop = loop
        self._rest = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(
                asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
            )
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._position += count
        return count

    async def _next(self) -> bytes:
        return await anext(self._chunks, b"")


class _StoppableFile(io.RawIOBase):
    """A file that cannot be read any more once an event is set."""

    def __init__(self, file: BinaryIO, stopped: threading.Event) -> None:
        self._file = file
        self._stopped = stopped

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._stopped.is_set():
            raise InterruptedError(errno.ECANCELED, "no caller waits for it any more")
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def until(file: BinaryIO, stopped: threading.Event) -> BinaryIO:
    """The same file for one pass, which fails with an OSError once the event is set."""
    return cast("BinaryIO", _StoppableFile(file, stopped))


@contextlib.asynccontextmanager
async def opened_file(file: LocalFile, name: str) -> AsyncIterator[int]:
    """The descriptor of a local file; errors say that it is the shard `name`.

    Waits in threads of its mount.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    try:
        mount = await MOUNTS.of(file.root.folder)
        async with mount.opened(file.open) as descriptor:
            yield descriptor
    except OSError as error:
        raise file_error(name, error) from error


@contextlib.contextmanager
def open_shard(storage: Storage, shard: int, loop: asyncio.AbstractEventLoop) -> Iterator[BinaryIO]:
    """A shard as a file for one pass, in a thread that may wait.

    Args:
        storage: has the shard.
        shard: its number.
        loop: the event loop that the storage's streams belong to.

    Raises:
        CorruptSample: a local shard changed between its listing and the end of its read.
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    listed, local = storage.shards[shard], storage.local_file(shard)
    if local is None:
        yield cast("BinaryIO", _StreamFile(storage.stream(shard), loop))
        return
    try:
        with os.fdopen(local.open(), "rb") as file:
            yield file
    except OSError as error:
        raise file_error(listed.name, error) from error
    check_listed(local, listed)
