"""The worker's side: a process without threads that answers requests until the daemon ends."""

import contextlib
import gc
import mmap
import os
import resource
import signal
import socket
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from gyre_daemon.copy_workers.protocol import (
    CopyRequest,
    Kind,
    Reply,
    receive_request,
    send_reply,
)
from gyre_daemon.copy_workers.ranges import Ranges

_MADV_POPULATE_READ = 22  # since Linux 5.14; the standard library does not name it
# Ctrl-C and a service manager signal the whole group; the workers end when the daemon does.
_SIGNALS_FOR_THE_DAEMON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(connection: socket.socket) -> NoReturn:
    """Turn a process that was just forked into a copy worker, until the daemon hangs up."""
    status = 1
    try:
        _prepare(connection.fileno())
        with contextlib.suppress(ConnectionError):
            _CopyWorker(connection).serve()
        with contextlib.suppress(ChildProcessError):
            os.wait()  # returns when all children have ended, as SIGCHLD is ignored
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _prepare(connection: int) -> None:
    """Drop all that came from the daemon but its memory, standard error and the connection."""
    for number in _SIGNALS_FOR_THE_DAEMON:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a worker that ends leaves no zombie
    os.closerange(3, connection)
    os.closerange(connection + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    gc.disable()
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        # a core dump after SIGBUS would hold whole arenas
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("gyre-copy")


class _Arena:
    """An arena, mapped for writing."""

    def __init__(self, descriptor: int) -> None:
        """Map all of it.

        Raises:
            OSError: it cannot be mapped for writing, since it is sealed already.
        """
        self._mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED)
        self._is_populated = np.zeros(len(self._mapping) // mmap.PAGESIZE, np.bool_)  # [pages]

    def memory_for(self, ranges: Ranges) -> memoryview:
        """All its memory, with page table entries where the ranges go.

        The kernel makes them in one call: a page fault for each page takes six times as long.
        """
        first = int(ranges.target.min()) // mmap.PAGESIZE
        stop = -(-int((ranges.target + ranges.size).max()) // mmap.PAGESIZE)
        if not self._is_populated[first:stop].all():
            self._is_populated[first:stop] = True
            with contextlib.suppress(OSError):  # an older kernel makes them one by one
                self._mapping.madvise(
                    _MADV_POPULATE_READ, first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
                )
        return memoryview(self._mapping)


class _CopyWorker:
    """The arenas and files that one worker has mapped, by key."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._arenas: dict[int, _Arena] = {}
        self._files: dict[int, memoryview] = {}

    def serve(self) -> None:
        """Answer requests until the daemon hangs up."""
        while request := receive_request(self._connection):
            try:
                value = self._do(request)
            except (OSError, ValueError):
                send_reply(self._connection, Reply(is_done=False))
            else:
                if value is not None:
                    send_reply(self._connection, Reply(is_done=True, value=value))

    def _do(self, request: CopyRequest) -> int | None:
        """Do one thing.

        Returns:
            The reply's value, or None for no reply.

        Raises:
            OSError, ValueError: it cannot be done.
        """
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
                with _owned(request.descriptor):
                    self._arenas[request.key] = _Arena(request.descriptor)
            case Kind.UNMAP:
                del self._arenas[request.key]
            case Kind.FORK:
                return self._fork(request.descriptor)
        return 0

    def _copy(self, request: CopyRequest) -> int:
        ranges = Ranges.from_bytes(request.body)
        before = _num_disk_waits()
        ranges.copy(self._files, self._arenas[request.key].memory_for(ranges))
        return _num_disk_waits() - before

    def _fork(self, connection: int) -> int | None:
        """Fork; both processes serve on, each its own connection, with the same mappings."""
        with _owned(connection):
            pid = os.fork()
            if pid:
                return pid
            self._connection.close()
            self._connection = socket.socket(fileno=os.dup(connection))
        return None


@contextlib.contextmanager
def _owned(descriptor: int) -> Iterator[None]:
    """Close a descriptor at the end."""
    try:
        yield
    finally:
        os.close(descriptor)


def _map_file(descriptor: int) -> memoryview:
    """The file's bytes; none where it cannot be mapped, so that every range of it is too long."""
    with _owned(descriptor):
        try:
            mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            mapping.madvise(mmap.MADV_RANDOM)
        except (OSError, ValueError):
            return memoryview(b"")
    return memoryview(mapping)


def _num_disk_waits() -> int:
    """How often this process has waited for a disk: its major page faults."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
