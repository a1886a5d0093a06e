"""Local files: opened beneath their root, and recognised by size, times and checksums.

[Note: Links out of a root]

Other users may write into a shared data folder, and a link of theirs could lead to a file that only
the daemon may read. A link that stays beneath the root is followed. The kernel checks that while it
opens the file (`openat2`, Linux 5.6), so nobody can exchange a folder for a link in between. Where
the kernel cannot, or has refused, the path is walked folder by folder with the same rules; that
also follows absolute links that lead back below the root, and finds the link to name in an error.

[Note: When a local shard is served]

A shard is served while its size and times are those that were listed (see `Stamp`). If only its
change time moved, its bytes decide: a new mode or link, a backup restored with `cp -p`, and an
overwritten file whose modification time was set back all look alike. Where an operator had
checksums taken (`gyre index --checksums`), every read compares the blocks that it touches. Equal
blocks are served; any other block is a `CorruptSample`. Once all blocks have been compared, the
shard is trusted again under its new times. Without checksums the shard is refused, and the error
names that command. The reasons are in `docs/adr/0026`.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import CorruptSample
from gyre_daemon.storage.shard import Shard, changed

_OPENAT2 = 437  # the same number on every architecture
_NO_MAGIC_LINKS, _BENEATH = 0x02, 0x08
_HOW = struct.Struct("QQQ")  # flags, mode, resolve
# ELOOP is also the answer to a magic link, and EAGAIN to a rename meanwhile. Some sandboxes answer
# EPERM to calls that they do not know.
_WALK_AFTER = frozenset(
    (errno.EXDEV, errno.ELOOP, errno.EAGAIN, errno.ENOSYS, errno.EPERM, errno.EINVAL)
)
_MAX_LINKS = 40  # as the kernel's
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would wait for its writer.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

_syscall = ctypes.CDLL(None, use_errno=True).syscall


class LeavesRoot(PermissionError):
    """A link leads out of a dataset's root.

    Attributes:
        link: the path of the link.
        target: where it leads, as it is written in the link; empty for a `..` of the path itself.
        root: the folder that must not be left.
    """

    def __init__(self, link: str, target: str, root: Path) -> None:
        super().__init__(errno.EXDEV, os.strerror(errno.EXDEV))
        self.link, self.target, self.root = link, target, root


class NotRegular(PermissionError):
    """It is a folder, a pipe, a socket or a device, and no regular file."""

    def __init__(self) -> None:
        super().__init__(errno.EINVAL, "it is no regular file")


@dataclass(frozen=True, slots=True)
class Root:
    """A folder that the operator named; links on the way to it are followed.

    Attributes:
        folder: its path. It may be exchanged; each call goes to the folder that is there then.
        follow_links: whether links may leave it.
    """

    folder: Path
    follow_links: bool = False

    def open(self, name: str, flags: int) -> int:
        """Open the file at a relative path; the caller owns the descriptor.

        Raises:
            LeavesRoot: a link, or a `..`, leads out of the root.
            OSError: it cannot be opened.
        """
        with self.held() as open_beneath:
            return open_beneath(name, flags)

    @contextlib.contextmanager
    def held(self) -> Iterator[Callable[[str | bytes, int], int]]:
        """What opens relative paths as `open` does; the folder is looked up once, for all of them.

        Raises:
            OSError: the folder cannot be opened.
        """
        if self.follow_links:
            yield lambda name, flags: os.open(self.folder / os.fsdecode(name), flags)
            return
        root = os.open(self.folder, _FOLDER)
        try:
            yield functools.partial(self._open_beneath, root)
        finally:
            os.close(root)

    def _open_beneath(self, root: int, name: str | bytes, flags: int) -> int:
        if has_openat2():
            descriptor = _openat2(root, name or ".", flags)
            if descriptor >= 0:
                return descriptor
            number = ctypes.get_errno()
            if number not in _WALK_AFTER:
                raise OSError(number, os.strerror(number), str(self.folder / os.fsdecode(name)))
        with contextlib.closing(_Walk(root, self.folder)) as walk:
            return walk.open(os.fsdecode(name), flags)

    def stat(self, name: str) -> os.stat_result:
        """The file at a relative path, not opened for reading.

        Raises:
            LeavesRoot, OSError: as `open`.
        """
        with _closing(self.open(name, os.O_PATH | os.O_CLOEXEC)) as descriptor:
            return os.fstat(descriptor)

    @contextlib.contextmanager
    def scan(self, folder: str) -> Iterator[Iterator["os.DirEntry[str]"]]:
        """The entries of a folder beneath the root.

        Raises:
            LeavesRoot, OSError: as `open`.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with _closing(self.open(folder, flags)) as descriptor, os.scandir(descriptor) as entries:
            yield entries


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file beneath a root.

    Attributes:
        root: the folder.
        name: relative to it.
    """

    root: Root
    name: str

    @classmethod
    def of(cls, path: Path, *, follow_links: bool = False) -> "LocalFile":
        """The file at a path; its own folder is its root."""
        return cls(Root(path.parent, follow_links), path.name)

    @property
    def path(self) -> Path:
        """The whole path, for messages and for comparing."""
        return self.root.folder / self.name

    def __str__(self) -> str:
        """The whole path."""
        return os.path.join(self.root.folder, self.name)  # noqa: PTH118  (a fifth of the time)

    def sibling(self, name: str) -> "LocalFile":
        """A file of another name in the same folder."""
        folder, slash, _ = self.name.rpartition("/")
        return LocalFile(self.root, folder + slash + name)

    def open(self) -> int:
        """Open the file for reading; the caller owns the descriptor.

        Raises:
            LeavesRoot: a link leads out of the root.
            NotRegular: it is no regular file.
            OSError: it cannot be opened.
        """
        try:
            descriptor = self.root.open(self.name, READ_FLAGS)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket, or a device without a driver
                raise NotRegular from error
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise NotRegular
        return descriptor

    def open_folder(self) -> int:
        """Open the folder of the file, for use as `dir_fd`; the caller owns the descriptor.

        Raises:
            LeavesRoot, OSError: as `Root.open`.
        """
        return self.root.open(self.name.rpartition("/")[0] or ".", _FOLDER)

    def stat(self) -> os.stat_result:
        """The file at the path now.

        Raises:
            LeavesRoot, OSError: as `Root.open`.
        """
        return self.root.stat(self.name)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The file, open for reading inside the context.

        Raises:
            LeavesRoot, NotRegular, OSError: as `open`.
        """
        with _closing(self.open()) as descriptor:
            yield descriptor


@functools.cache
def has_openat2() -> bool:
    """Whether the kernel opens files beneath a folder by itself."""
    with _closing(os.open("/", _FOLDER)) as folder:
        descriptor = _openat2(folder, ".", _FOLDER)
    if descriptor < 0:
        return False
    os.close(descriptor)
    return True


@functools.cache
def _how(flags: int) -> bytes:
    return _HOW.pack(flags, 0, _BENEATH | _NO_MAGIC_LINKS)


def _openat2(root: int, name: str | bytes, flags: int) -> int:
    """The descriptor, or -1 where `ctypes.get_errno` says why not."""
    descriptor: int = _syscall(_OPENAT2, root, os.fsencode(name), _how(flags), _HOW.size)
    return descriptor


class _Walk:
    """The way to a file beneath a root, folder by folder, with the links on it."""

    def __init__(self, root: int, folder: Path) -> None:
        """Begin at the root.

        Args:
            root: its descriptor, which stays open.
            folder: its path.
        """
        self._folder = folder
        self._open = [root]  # each in the one before
        self._names: list[str] = []  # of all but the root
        self._num_links, self._link, self._target = 0, "", ""  # the last link

    def close(self) -> None:
        """Close all folders but the root."""
        while len(self._open) > 1:
            self._leave()

    def open(self, name: str, flags: int) -> int:
        """Open a relative path; see `Root.open`."""
        self._link = str(self._folder / name)
        missing = _parts(name)
        while missing:
            part = missing.popleft()
            if part == "..":
                if not self._names:
                    raise LeavesRoot(self._link, self._target, self._folder)
                self._leave()
                continue
            found = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._open[-1])
            mode = os.fstat(found).st_mode
            if stat.S_ISLNK(mode):
                with _closing(found):
                    missing.extendleft(reversed(self._follow(part, found)))
            elif missing:
                self._open.append(found)
                self._names.append(part)
            else:
                os.close(found)
                return os.open(part, flags | os.O_NOFOLLOW, dir_fd=self._open[-1])
        return os.open(".", flags, dir_fd=self._open[-1])

    def _leave(self) -> None:
        self._names.pop()
        os.close(self._open.pop())

    def _follow(self, name: str, link: int) -> deque[str]:
        """The steps that a link in the present folder stands for."""
        self._link = str(self._folder.joinpath(*self._names, name))
        self._target = os.readlink("", dir_fd=link)
        self._num_links += 1
        if self._num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), self._link)
        if not self._target.startswith("/"):
            return _parts(self._target)
        self.close()
        for root in (str(self._folder), os.path.realpath(self._folder)):
            if f"{self._target}/".startswith(root.rstrip("/") + "/"):
                return _parts(self._target[len(root) :])
        raise LeavesRoot(self._link, self._target, self._folder)


def _parts(path: str) -> deque[str]:
    return deque(part for part in path.split("/") if part not in ("", "."))


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


Checksums = npt.NDArray[np.uint8]  # [blocks, 16]

# A read from a touched shard hashes every block that it touches. Smaller blocks hash less for a
# small sample, but need more memory (16 bytes each). 1 MiB takes 1 to 2 ms to hash, and a TiB of
# shards needs 16 MiB of checksums. Another block size makes all stored checksums useless.
BLOCK_BYTES = 1 << 20
CHECKSUM_BYTES = 16
# File systems count time in ticks of some milliseconds. A change older than this lies in an earlier
# tick than now; with less, a write in the same tick would go unnoticed, and more only waits longer.
_SETTLED_S = 0.05


class Stamp(NamedTuple):
    """A file's size and times.

    A write changes both times. The modification time can be set back afterwards, the change time
    cannot. A new mode, owner, link or name changes the change time alone.

    Attributes:
        size_bytes: the length of the file.
        modified_ns: when its bytes were last written, as far as its owner says.
        changed_ns: when anything about it last changed.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> "Stamp":
        """The present stamp of a path or a descriptor.

        Raises:
            OSError: it cannot be looked at.
        """
        # `Path.stat` takes no descriptor.
        stat = os.stat(file)  # noqa: PTH116
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def version(self) -> str:
        """The stamp as a `Shard.version`."""
        return f"{self.modified_ns}.{self.changed_ns}"

    def is_restored(self, version: str) -> bool:
        """Whether the modification time is that of a version."""
        return str(self.modified_ns) == version.partition(".")[0]

    def settle(self) -> None:
        """Wait until any later change would get another time."""
        age_s = (time.time_ns() - self.changed_ns) / 1e9
        if age_s < _SETTLED_S:
            time.sleep(min(_SETTLED_S, max(_SETTLED_S - age_s, 0)))


class ShardChecksums:
    """The checksums of one dataset's local shards, and which blocks were compared since.

    Safe for several threads.

    Attributes:
        listed: the shards as listed.
        known: the checksums by shard number, of those shards that have some; `add` adds some.
        load: finds those of a shard that an earlier daemon stored; called in threads that read.
    """

    def __init__(self, shards: Sequence[Shard], files: Sequence[LocalFile]) -> None:
        """Know no checksum yet.

        Args:
            shards: as listed.
            files: where they lie.
        """
        self.listed = shards
        self._files = files
        self.known: dict[int, Checksums] = {}
        self.load: Callable[[int], Checksums | None] = lambda _: None
        self._compared: dict[int, tuple[Stamp, int, npt.NDArray[np.bool_]]] = {}

    def folder(self, shard: int) -> Path:
        """The root of a shard."""
        return self._files[shard].root.folder

    def add(self, shard: int, checksums: Checksums) -> None:
        """Keep checksums that were taken while the shard was as listed.

        Those of another number of blocks are ignored.
        """
        if checksums.shape == (num_blocks(self.listed[shard].size_bytes), CHECKSUM_BYTES):
            self.known[shard] = checksums

    def take(self, shard: int, stopped: threading.Event) -> Checksums | None:
        """Read a shard and keep its checksums.

        Args:
            shard: its number.
            stopped: looked at after every block.

        Returns:
            None if the shard is not as listed, or if `stopped` was set.

        Raises:
            OSError: it cannot be read.
        """
        listed = self.listed[shard]
        with self._files[shard].opened() as descriptor:
            if not _is_as_listed(descriptor, listed):
                return None
            checksums = _hash_blocks(descriptor, listed.size_bytes, stopped)
            if checksums is None or not _is_as_listed(descriptor, listed):
                return None
        self.add(shard, checksums)
        return checksums

    def compare(
        self,
        shard: int,
        descriptor: int,
        stamp: Stamp,
        start: npt.NDArray[np.int64],
        stop: npt.NDArray[np.int64],
    ) -> bool:
        """Compare the blocks of some ranges with their checksums.

        Each block is read once for as long as the stamp stays.

        Args:
            shard: its number.
            descriptor: of the file.
            stamp: of the file now.
            start: int64 [n], the first byte of each range.
            stop: int64 [n], the byte after its last; no range is empty.

        Returns:
            Whether all blocks of the shard have been compared by now.

        Raises:
            CorruptSample: a block differs, or the shard has no checksums.
            OSError: it cannot be read.
        """
        listed = self.listed[shard]
        if shard not in self.known and (stored := self.load(shard)) is not None:
            self.add(shard, stored)
        if (known := self.known.get(shard)) is None:
            raise unknown(listed.name, "gyre index --checksums")
        same = self._same(shard, descriptor, stamp, len(known))
        for block in np.flatnonzero(_touched(start, stop, len(known)) & ~same).tolist():
            data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
            if _checksum(data) != known[block].tobytes():
                raise changed(listed.name)
            same[block] = True
        return bool(same.all())

    def _same(self, shard: int, descriptor: int, stamp: Stamp, count: int) -> npt.NDArray[np.bool_]:
        """Bool [count]: the blocks already found equal in this file under this stamp."""
        inode = os.fstat(descriptor).st_ino
        found = self._compared.get(shard)
        if found is None or found[:2] != (stamp, inode):
            found = self._compared[shard] = (stamp, inode, np.zeros(count, np.bool_))
        return found[2]


def num_blocks(size_bytes: int) -> int:
    """The number of blocks of a shard."""
    return -(-size_bytes // BLOCK_BYTES)


def _hash_blocks(descriptor: int, size_bytes: int, stopped: threading.Event) -> Checksums | None:
    """The checksums of a whole file; blocks beyond its end get that of no bytes."""
    checksums = np.empty((num_blocks(size_bytes), CHECKSUM_BYTES), np.uint8)
    for block in range(len(checksums)):
        if stopped.is_set():
            return None
        data = os.pread(descriptor, BLOCK_BYTES, block * BLOCK_BYTES)
        checksums[block] = np.frombuffer(_checksum(data), np.uint8)
    return checksums


def _is_as_listed(descriptor: int, listed: Shard) -> bool:
    stamp = Stamp.of(descriptor)
    return (stamp.size_bytes, stamp.version) == (listed.size_bytes, listed.version)


def unknown(name: str, command: str) -> CorruptSample:
    """The error for a shard that may have changed since it was listed; `command` lists it again."""
    return CorruptSample(
        f"shard {name} has changed since the dataset was opened, or was only touched: its change "
        "time moved, and there are no checksums of its bytes. If they are the same, index the "
        f"dataset again (`{command}`).",
        {"shard": name, "reason": "changed, or touched before it had checksums"},
    )


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


def _touched(
    start: npt.NDArray[np.int64], stop: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.bool_]:
    """Bool [count]: the blocks that contain bytes of any range."""
    steps = np.zeros(count + 1, np.int64)
    np.add.at(steps, start // BLOCK_BYTES, 1)
    np.add.at(steps, (stop - 1) // BLOCK_BYTES + 1, -1)
    return np.asarray(steps[:-1].cumsum() > 0)
