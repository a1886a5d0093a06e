"""Opens the files of a dataset beneath its root, without following links out of it.

Other users may write into a shared data folder, and a link of theirs could lead to a file that only
the daemon may read. A link that stays beneath the root is followed. The kernel checks that while it
opens the file (`openat2`, Linux 5.6). Where it cannot, or has refused, the file is found without
opening it (`O_PATH`), the kernel says where it is (`/proc/self/fd`), and the same file is opened;
that also follows absolute links that lead back beneath the root. Either way no folder can be
exchanged for a link in between.
"""

import contextlib
import ctypes
import errno
import functools
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from gyre_daemon.errors import (
    GyreError,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)

_OPENAT2 = 437  # the same number on every architecture
_NO_MAGIC_LINKS, _BENEATH = 0x02, 0x08
_HOW = struct.Struct("QQQ")  # flags, mode, resolve
# ELOOP is also the answer to a magic link, and EAGAIN to a rename meanwhile. Some sandboxes answer
# EPERM to calls that they do not know.
_LOOK_AFTER = frozenset(
    (errno.EXDEV, errno.ELOOP, errno.EAGAIN, errno.ENOSYS, errno.EPERM, errno.EINVAL)
)
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe would wait for its writer.
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY

OpenBeneath = Callable[[str | bytes, int], int]  # opens a relative path with flags

_syscall = ctypes.CDLL(None, use_errno=True).syscall
# Closing what was opened with O_PATH never waits, and `os.close` gives up the interpreter's lock.
_close = ctypes.PyDLL(None).close


class LeavesRoot(PermissionError):
    """A link, or a `..`, leads out of a dataset's root.

    Attributes:
        root: the folder that must not be left.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(errno.EXDEV, os.strerror(errno.EXDEV))
        self.root = root


class NotRegular(PermissionError):
    """It is a folder, a pipe, a socket or a device, and no regular file."""

    def __init__(self) -> None:
        super().__init__(errno.EINVAL, "it is no regular file")


def file_error(name: str, error: OSError) -> GyreError:
    """The error for an operating system's error about a shard."""
    facts = {"shard": name}
    if isinstance(error, FileNotFoundError):
        return ShardMissing(
            f"shard {name} does not exist; restore it or correct the dataset's URI", facts
        )
    if isinstance(error, LeavesRoot):
        return NotAllowed(
            f"shard {name} is refused: a link leads out of the dataset's folder {error.root}; if "
            "that is meant, set follow_links = true for the dataset",
            facts | {"root": error.root},
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


class Root(Struct, frozen=True):
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
    def held(self) -> Iterator[OpenBeneath]:
        """What opens relative paths as `open` does; the folder is looked up once, for all of them.

        Raises:
            OSError: the folder cannot be opened.
        """
        if self.follow_links:
            # a Path for each of thousands of files takes twice the time of opening them
            yield lambda name, flags: os.open(f"{self.folder}/{os.fsdecode(name)}", flags)
            return
        root = os.open(self.folder, _FOLDER)
        try:
            yield functools.partial(self._open_beneath, root)
        finally:
            _close(root)

    def _open_beneath(self, root: int, name: str | bytes, flags: int) -> int:
        if has_openat2():
            descriptor = _openat2(root, name or ".", flags)
            if descriptor >= 0:
                return descriptor
            number = ctypes.get_errno()
            if number not in _LOOK_AFTER:
                raise OSError(number, os.strerror(number), str(self.folder / os.fsdecode(name)))
        with _closing(os.open(name or ".", os.O_PATH | os.O_CLOEXEC, dir_fd=root)) as found:
            if not _lies_beneath(found, root):
                raise LeavesRoot(self.folder)
            return os.open(f"/proc/self/fd/{found}", flags)

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


# How long reads that overlap share an open folder. With more, they notice late that the folder is
# another one, such as after a remount; a tenth of it would already bring most of what it saves.
_SHARED_S = 1.0


class _Opened(Struct, eq=False):
    """An open folder, which its last holder closes; shared until a time."""

    folder: contextlib.ExitStack
    open_beneath: OpenBeneath
    until_s: float
    num_holders: int = 1


class SharedRoot:
    """A root that reads which overlap open once. Safe for several threads.

    One that hangs keeps its folder to itself: the others open the folder that is there then.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._opened: _Opened | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[OpenBeneath]:
        """See `Root.held`; what is opened may be the folder of a second ago."""
        now = time.monotonic()
        with self._lock:
            opened = self._opened if self._opened and now < self._opened.until_s else None
            if opened:
                opened.num_holders += 1
        if opened is None:  # without the lock, as it may hang
            folder = contextlib.ExitStack()
            opened = _Opened(folder, folder.enter_context(self._root.held()), now + _SHARED_S)
            with self._lock:
                self._opened = opened
        try:
            yield opened.open_beneath
        finally:
            with self._lock:
                opened.num_holders -= 1
                is_last = not opened.num_holders
                if is_last and self._opened is opened:
                    self._opened = None
            if is_last:
                opened.folder.close()


class LocalFile(Struct, frozen=True):
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

    @property
    def base_name(self) -> str:
        """The name in its own folder."""
        return self.name.rpartition("/")[2]

    def __str__(self) -> str:
        """The whole path."""
        return os.path.join(self.root.folder, self.name)  # noqa: PTH118  (a fifth of the time)

    def sibling(self, name: str) -> "LocalFile":
        """A file of another name in the same folder."""
        folder, slash, _ = self.name.rpartition("/")
        return LocalFile(self.root, folder + slash + name)

    def open(self, open_beneath: OpenBeneath | None = None) -> int:
        """Open the file for reading; the caller owns the descriptor.

        Args:
            open_beneath: from `held` of its root, if that is held.

        Raises:
            LeavesRoot: a link leads out of the root.
            NotRegular: it is no regular file.
            OSError: it cannot be opened.
        """
        try:
            descriptor = (open_beneath or self.root.open)(self.name, READ_FLAGS)
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


def _lies_beneath(found: int, root: int) -> bool:
    """Whether an open file is a folder, or is in it.

    `/proc/PID/root` leads to files of other mount namespaces, whose owners choose their paths.
    """
    if not _path_of(found).is_relative_to(_path_of(root)):
        return False
    mount = _mount_of(found)
    return mount == _mount_of(root) or mount in _own_mounts()


def _path_of(descriptor: int) -> Path:
    """The path of an open file, behind all links."""
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def _mount_of(descriptor: int) -> str:
    """The number of the mount of an open file; no two namespaces have the same one."""
    fields = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    return fields[fields.index("mnt_id:") + 1]


def _own_mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return {line.split(maxsplit=1)[0].decode() for line in lines}


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
