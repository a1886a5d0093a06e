"""Memory files: other processes may map and read them, but neither write nor resize them.

Python's `mmap` duplicates the descriptor and keeps the memory as long as a view of it exists. Here
`close` ends both, even if a frame, a traceback or a reference cycle still has a view.

A client that was handed an arena's descriptor may keep it, duplicate it, pass it on or map it, and
need not say so. The kernel knows: when the last reference to a file without a name goes, in
whichever process, inotify reports that the file was deleted.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Callable, Iterator

from gyre_daemon.errors import Overloaded

_IN_DELETE_SELF, _IN_IGNORED = 0x400, 0x8000
_EVENT = struct.Struct("iIII")  # the watch, the kind of event, a cookie, the length of a name
_READ_BYTES = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """Watches memory files of this process. Used from one event loop."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._inotify = -1
        self._when_gone: dict[int, Callable[[], None]] = {}

    def add(self, descriptor: int, gone: Callable[[], None]) -> None:
        """Call `gone` once no process has the file open or mapped.

        Args:
            descriptor: of a file not watched yet; the caller goes on to own it.
            gone: called on the event loop, by `look` or soon after the file is gone.

        Raises:
            OSError: the kernel cannot tell, as a rule because this user watches too many files
                (`fs.inotify.max_user_watches`).
        """
        if self._inotify < 0:
            self._inotify = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            asyncio.get_running_loop().add_reader(self._inotify, self.look)
        path = f"/proc/self/fd/{descriptor}".encode()
        self._when_gone[_checked(_libc.inotify_add_watch(self._inotify, path, _IN_DELETE_SELF))] = (
            gone
        )

    def look(self) -> None:
        """Call the callbacks of files that are gone by now."""
        if self._inotify < 0:
            return
        while True:
            try:
                events = os.read(self._inotify, _READ_BYTES)
            except BlockingIOError:
                return
            for watch, what, _, _ in _EVENT.iter_unpack(events):
                if what & _IN_IGNORED and watch in self._when_gone:
                    self._when_gone.pop(watch)()

    def close(self) -> None:
        """Watch no more."""
        if self._inotify >= 0:
            asyncio.get_running_loop().remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = -1
            self._when_gone.clear()


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# constants that the standard library does not name
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_F_SEAL_FUTURE_WRITE = 0x0010  # since Linux 5.1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value

_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise  # `mmap.madvise` keeps the interpreter's lock for as long as it takes
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MemoryFile:
    """One memory file, mapped for writing.

    Attributes:
        num_bytes: its size.
        descriptor: of the file; -1 once it is closed.
        address: of its first byte.
        memory: all of it, writable. Touching it after `close` ends the process.
    """

    def __init__(self, num_bytes: int) -> None:
        """Map an empty file; `allocate` gives it memory.

        Args:
            num_bytes: whole pages.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.num_bytes = num_bytes
        with self._refusal():
            self.descriptor = os.memfd_create("gyre-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.descriptor, num_bytes)
                os.fchmod(self.descriptor, stat.S_IRUSR)  # no other user can open it
                self.address = _map(
                    None,
                    num_bytes,
                    mmap.PROT_READ | mmap.PROT_WRITE,
                    mmap.MAP_SHARED,
                    self.descriptor,
                )
            except OSError:
                os.close(self.descriptor)
                raise
        array = (ctypes.c_char * num_bytes).from_address(self.address)
        self.memory = memoryview(array).cast("B")
        # the addresses stay reserved as long as a view exists, so that nothing else is mapped there
        weakref.finalize(array, _munmap, self.address, num_bytes).atexit = False

    def allocate(self, begin: int, end: int) -> None:
        """Allocate and touch the whole pages `[begin, end)`; takes some ms per 10 MiB.

        Several threads may allocate different parts at once.

        Raises:
            Overloaded: the machine has no such memory.
        """
        with self._refusal():
            os.posix_fallocate(self.descriptor, begin, end - begin)
        # an older kernel does it when a page is first written
        _madvise(self.address + begin, end - begin, _MADV_POPULATE_WRITE)

    def seal(self) -> None:
        """Allow no further mapping for writing, and no change of the size."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)

    def open_for_reading(self) -> int:
        """A descriptor that only reads, with a new file description; the caller closes it.

        Raises:
            OSError: this process or the machine has no descriptor left.
        """
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap the memory and close the descriptor.

        The kernel frees the memory as soon as no other process has it open or maps it.
        """
        descriptor, self.descriptor = self.descriptor, -1
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        _map(self.address, self.num_bytes, _PROT_NONE, flags, -1)
        os.close(descriptor)

    @contextlib.contextmanager
    def _refusal(self) -> Iterator[None]:
        """Turn an error of the operating system inside the block into Overloaded."""
        try:
            yield
        except OSError as error:
            raise Overloaded(
                f"this machine has no {self.num_bytes} bytes of memory for a session: "
                f"{error.strerror}"
            ) from error


def _map(address: int | None, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _mmap(address, num_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped
