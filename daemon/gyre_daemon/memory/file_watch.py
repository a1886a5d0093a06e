"""Tells when memory files are gone: when no process has them open or mapped any more.

A client that was handed an arena's descriptor may keep it, duplicate it, pass it on or map it, and
need not say so. The kernel knows: when the last reference to a file without a name goes, in
whichever process, inotify reports that the file was deleted.
"""

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

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
