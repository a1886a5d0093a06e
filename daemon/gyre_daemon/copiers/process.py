"""A copier's side: a process without threads that does what it is asked until the daemon is gone."""

import contextlib
import gc
import mmap
import os
import resource
import signal
import socket
import traceback
from pathlib import Path
from typing import NoReturn

import numpy as np

from gyre_daemon.copiers.ranges import Ranges
from gyre_daemon.copiers.wire import Kind, Reply, Request, receive_request, send_reply

_MADV_POPULATE_READ = 22  # since Linux 5.14; not named in the standard library
_SIGNALS_FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # which ends, and its copiers with it


def run(connection: socket.socket) -> NoReturn:
    """Become a copier, in a process that was just forked and has no other use; end with the daemon."""
    status = 1
    try:
        _prepare(connection.fileno())
        with contextlib.suppress(ConnectionError):
            _Copier(connection).serve()
        _await_children()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _prepare(connection: int) -> None:
    """Keep nothing of the process that this was but its memory, its errors' way out, and the connection."""
    for number in _SIGNALS_FOR_THE_DAEMON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends leaves nothing to look after
    os.closerange(3, connection)
    os.closerange(connection + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    gc.disable()
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of a SIGBUS: it would hold whole arenas
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("gyre-copier")


def _await_children() -> None:
    with contextlib.suppress(ChildProcessError):
        os.wait()


class _Arena:
    """An arena, writable. Pages are mapped in rows before they are first written to: one by one they take six times as long."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        """Map it and close the descriptor.

        Raises:
            OSError: it cannot be mapped so.
        """
        try:
            self._mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._is_mapped = np.zeros(num_bytes // mmap.PAGESIZE, np.bool_)  # each page

    def memory_for(self, ranges: Ranges) -> memoryview:
        """All its memory; where the ranges go, its pages are mapped."""
        first = int(ranges.target.min()) // mmap.PAGESIZE
        stop = -(-int((ranges.target + ranges.size).max()) // mmap.PAGESIZE)
        if not self._is_mapped[first:stop].all():
            self._is_mapped[first:stop] = True
            with contextlib.suppress(OSError):  # an older kernel, which maps them one by one
                self._mapping.madvise(_MADV_POPULATE_READ, first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE)
        return memoryview(self._mapping)


class _Copier:
    """What one copier has mapped."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arenas: dict[int, _Arena] = {}
        self._files: dict[int, memoryview] = {}

    def serve(self) -> None:
        """Do what is asked until nobody can ask any more."""
        while request := receive_request(self._connection):
            reply = self._do(request)
            if reply:
                send_reply(self._connection, reply)

    def _do(self, request: Request) -> Reply | None:
        match request.kind:
            case Kind.COPY:
                return self._copy(request)
            case Kind.OPEN:
                self._files[request.key] = _map_file(request.descriptor)
                return None
            case Kind.CLOSE:
                self._files.pop(request.key).release()
                return None
            case Kind.MAP:
                return self._map(request)
            case Kind.UNMAP:
                del self._arenas[request.key]
            case Kind.FORK:
                return self._fork(request.descriptor)
        return Reply(is_done=True, value=0)

    def _map(self, request: Request) -> Reply:
        try:
            self._arenas[request.key] = _Arena(request.descriptor, request.num_bytes)
        except OSError:
            return Reply(is_done=False, value=0)
        return Reply(is_done=True, value=0)

    def _copy(self, request: Request) -> Reply:
        before = _num_waits()
        try:
            request.ranges.copy(self._files, self._arenas[request.key].memory_for(request.ranges))
        except ValueError:
            return Reply(is_done=False, value=0)
        return Reply(is_done=True, value=_num_waits() - before)

    def _fork(self, connection: int) -> Reply | None:
        """Both processes go on with what they have mapped; the new one, to which nobody spoke yet, answers nothing."""
        pid = os.fork()
        if pid:
            os.close(connection)
            return Reply(is_done=True, value=pid)
        self._connection.close()
        self._connection = socket.socket(fileno=connection)
        return None


def _map_file(descriptor: int) -> memoryview:
    """Its bytes, or none where it cannot be mapped: then every range of it is too long."""
    try:
        mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        mapping.madvise(mmap.MADV_RANDOM)
    except (OSError, ValueError):
        return memoryview(b"")
    finally:
        os.close(descriptor)
    return memoryview(mapping)


def _num_waits() -> int:
    """How often this process has waited for a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
