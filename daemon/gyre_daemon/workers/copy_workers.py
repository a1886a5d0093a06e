"""Copy workers: processes that copy ranges of mapped files into arenas, and the pool of them.

The first half runs in the processes: it maps arenas and files, and copies ranges between them.
Threads of the daemon borrow the processes, and those that die are replaced. In: ranges of files,
and their places in one arena. Out: whether the ranges were copied. If they were not, the caller has
the kernel copy them.
"""

import contextlib
import errno
import gc
import itertools
import logging
import math
import mmap
import operator
import os
import resource
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.runtime.events import log_event
from gyre_daemon.workers.supervisor import ForkServer, Kind, Message, Process, send

_MADV_POPULATE_READ = 22  # since Linux 5.14; the standard library does not name it
Integers = npt.NDArray[np.int64]

_LENGTHS = struct.Struct("<4q")  # of the columns


class Ranges(Struct, frozen=True):
    """n ranges, none empty.

    `[start[i], start[i] + size[i])` of file `file[i]` goes to `target[i]` in an arena.

    Attributes:
        file: int64 [n], keys, or [1] where all ranges lie in one file.
        start: int64 [n], in bytes.
        size: int64 [n], in bytes, or [1] where all have the same size.
        target: int64 [n], in bytes from the beginning of the arena.
    """

    file: Integers
    start: Integers
    size: Integers
    target: Integers

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self.start)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> "Ranges":
        """The ranges that `to_bytes` wrote; they refer to the memory of `data`."""
        ends = np.cumsum(_LENGTHS.unpack_from(data))
        columns = np.frombuffer(data, np.int64, offset=_LENGTHS.size)
        return cls(*np.split(columns, ends[:-1]))

    def to_bytes(self) -> bytes:
        """The body of a `COPY` request: the lengths of the columns, and the columns."""
        columns = self.file, self.start, self.size, self.target
        lengths = _LENGTHS.pack(*map(len, columns))
        return b"".join((lengths, *(column.tobytes() for column in columns)))

    @property
    def are_alike(self) -> bool:
        """Whether all have one size and lie in one file, as rows of a matrix do."""
        return len(self.file) == len(self.size) == 1

    def copy(self, files: Mapping[int, memoryview], arena: memoryview) -> None:
        """Copy all ranges.

        Raises:
            ValueError: a file is shorter than a range of it.
        """
        if not self._copy_rows(files, arena):
            self._copy_each(files, arena)

    def _copy_rows(self, files: Mapping[int, memoryview], arena: memoryview) -> bool:
        """Copy rows of a matrix, in one call for those whose targets follow each other.

        Returns:
            False where the ranges are no rows of a matrix, and nothing was copied.
        """
        if not self.are_alike or len(self) < 2:
            return False
        file, size = files[int(self.file[0])], int(self.size[0])
        first = int(self.start[0]) % size
        row, rest = np.divmod(self.start - first, size)
        ends = [*(np.flatnonzero(np.diff(self.target) != size) + 1).tolist(), len(self)]
        if rest.any() or int(row.min()) < 0 or 2 * len(ends) > len(self):
            return False
        num_rows = (len(file) - first) // size
        if int(row.max()) >= num_rows:
            raise ValueError("a row is beyond the end of the file")
        rows = np.frombuffer(file, np.uint8, num_rows * size, first).reshape(-1, size)
        memory = np.frombuffer(arena, np.uint8)
        begin = 0
        for end in ends:
            target = int(self.target[begin])
            into = memory[target : target + (end - begin) * size].reshape(-1, size)
            # the mode "raise" would copy into a buffer first
            rows.take(row[begin:end], 0, into, "clip")
            begin = end
        return True

    def _copy_each(self, files: Mapping[int, memoryview], arena: memoryview) -> None:
        columns = (
            np.broadcast_to(column, len(self)).tolist()
            for column in (self.file, self.start, self.size, self.target)
        )
        for file, start, size, target in zip(*columns, strict=True):
            arena[target : target + size] = files[file][start : start + size]


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


class CopyWork:
    """The arenas and files that one process has mapped, by key; see `supervisor.Work`.

    The fork server maps every arena and copies nothing. So a worker that replaces a dead one has
    all arenas, although those are sealed by then and could not be mapped for writing any more.
    """

    def __init__(self) -> None:
        """Have nothing mapped yet."""
        self.name = "gyre-copy"
        self._arenas: dict[int, _Arena] = {}
        self._files: dict[int, memoryview] = {}

    def prepare(self, body: bytes | bytearray) -> None:
        """A process needs nothing but the mappings."""

    def begin(self, body: bytes | bytearray) -> None:
        """Copies make no garbage that must be looked for."""
        gc.disable()

    def answer(self, request: Message) -> Message | None:
        """Map, unmap or copy."""
        try:
            num_waits = self._do(request)
        except (OSError, ValueError):
            return Message(Kind.FAILED)
        return None if num_waits is None else Message(Kind.DONE, num_waits)

    def _do(self, request: Message) -> int | None:
        """Do one thing.

        Returns:
            How often it waited for a disk, or None for no reply.

        Raises:
            OSError, ValueError: it cannot be done.
        """
        match request.kind:
            case Kind.COPY:
                before = _num_disk_waits()
                ranges = Ranges.from_bytes(request.body)
                ranges.copy(self._files, self._arenas[request.number].memory_for(ranges))
                return _num_disk_waits() - before
            case Kind.OPEN:
                self._files[request.number] = _map_file(request.descriptors[0])
                return None
            case Kind.CLOSE:
                self._files.pop(request.number).release()
                return None
            case Kind.MAP:
                with _owned(request.descriptors[0]):
                    self._arenas[request.number] = _Arena(request.descriptors[0])
            case Kind.UNMAP:
                del self._arenas[request.number]
        return 0


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


# Dead workers are replaced at most once in this time. A process forks in some 5 ms; files that kill
# every worker that reads them must not keep a core busy with that.
_MIN_REFILL_S = 1.0
# How long a thread waits for a worker. A copy takes some 10 ms; with all workers busy for longer,
# they wait for a mount that hangs, and the kernel copies instead.
_PATIENCE_S = 1.0

_keys = itertools.count(1)


def new_key() -> int:
    """A key for an arena or a file that nothing else in this process has."""
    return next(_keys)


class File(Protocol):
    """An open file."""

    @property
    def key(self) -> int:
        """The file's name in requests."""

    @property
    def descriptor(self) -> int:
        """Stays open while a copy from the file is under way."""


class _Mapper:
    """A process that maps arenas: a copy worker, or their fork server.

    Every request raises OSError where the process is gone or hangs.

    Attributes:
        arenas: keys of the arenas that it has mapped.
    """

    def __init__(self, process: Process, arenas: Collection[int]) -> None:
        self.process, self.arenas = process, set(arenas)

    def map(self, arena: int, descriptor: int) -> None:
        """Map one more arena; where that fails, `arenas` does not have it."""
        request = Message(Kind.MAP, arena, descriptors=[descriptor])
        if self.process.ask(request).kind == Kind.DONE:
            self.arenas.add(arena)

    def unmap(self, arena: int) -> None:
        """Unmap an arena, if it is mapped."""
        if arena in self.arenas:
            self.arenas.remove(arena)
            self.process.ask(Message(Kind.UNMAP, arena))


class _CopyWorker(_Mapper):
    """A process that copies, used by one thread at a time.

    Attributes:
        unneeded: keys of files that nobody reads any more; any thread may append to it.
        unneeded_arenas: keys of arenas that were closed while it was busy; the same.
    """

    def __init__(self, process: Process, arenas: Collection[int]) -> None:
        super().__init__(process, arenas)
        self.unneeded: deque[int] = deque()
        self.unneeded_arenas: deque[int] = deque()
        self._files: set[int] = set()

    def copy(self, arena: int, files: Iterable[File], ranges: Ranges) -> Message:
        """Copy ranges of these files into an arena."""
        connection = self.process.connection
        while self.unneeded:
            key = self.unneeded.popleft()
            if key in self._files:
                self._files.remove(key)
                send(connection, Message(Kind.CLOSE, key))
        for file in files:
            if file.key not in self._files:
                self._files.add(file.key)
                send(connection, Message(Kind.OPEN, file.key, descriptors=[file.descriptor]))
        return self.process.ask(Message(Kind.COPY, arena, ranges.to_bytes()))


class _CopyServer(_Mapper):
    """The process that copy workers are forked from."""

    def __init__(self, server: ForkServer) -> None:
        super().__init__(server, ())
        self.server = server

    def fork(self) -> _CopyWorker | None:
        """A copy worker that has all arenas; None where no further process can be forked."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.server.fork(theirs)
            return _CopyWorker(Process.met(ours), self.arenas)
        except OSError as error:
            ours.close()
            if error.errno in (errno.EAGAIN, errno.ENOMEM):
                return None
            raise


class CopyWorkers:
    """A pool of copy workers, for all threads of a daemon.

    A worker that dies or hangs is killed and replaced, and the request that it had is not done.
    Workers end with the daemon, even if that is killed.
    """

    def __init__(self, num: int) -> None:
        """Fork the workers; this process has no threads yet and no descriptors that matter.

        Args:
            num: of workers; 0 for none.
        """
        self._num = num
        self._all: list[_CopyWorker] = []
        self._idle: list[_CopyWorker] = []
        self._changed = threading.Condition()  # guards the two lists
        # guards the fork server; may be held while `_changed` is taken, never the other way round
        self._keeping = threading.Lock()
        self._fork_server: _CopyServer | None = None
        self._refilled_s = -math.inf
        if num:
            try:
                self._fork_server = _CopyServer(ForkServer.forked(CopyWork()))
            except OSError as error:
                log_event("no copy workers", {"reason": str(error)}, logging.WARNING)
        self._refill()

    def __enter__(self) -> "CopyWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The workers that are not known to have died."""
        return [worker.process.pid for worker in tuple(self._all)]

    def map(self, arena: int, descriptor: int) -> None:
        """Have all workers map an arena that is not sealed yet.

        One that stays busy does not get it, and copies nothing into it.
        """
        with self._keeping:
            self._refill()
            self._tell_all(lambda worker: worker.map(arena, descriptor))

    def unmap(self, arena: int) -> None:
        """Have all workers unmap an arena; one that stays busy does so when it has copied."""
        with self._keeping:
            self._tell_all(lambda worker: worker.unmap(arena))
            for worker in tuple(self._all):
                if arena in worker.arenas:  # it is busy
                    worker.unneeded_arenas.append(arena)

    def forget(self, file: int) -> None:
        """Have each worker unmap a file without readers, before it next copies.

        In any thread, without waiting.
        """
        for worker in tuple(self._all):
            worker.unneeded.append(file)

    def copy(self, arena: int, files: Iterable[File], ranges: Ranges) -> int | None:
        """Copy ranges of files into an arena; waits for an idle worker.

        Args:
            arena: its key.
            files: those that the ranges lie in; the caller keeps them open.
            ranges: within the arena.

        Returns:
            How often the copy waited for a disk; None where it was not done, or not all of it: no
            worker has the arena, a file is shorter than a range, or the worker died or hung.
        """
        if len(self._all) < self._num:
            with self._keeping:
                self._refill()
        worker = self._acquire(lambda worker: arena in worker.arenas)
        if worker is None:
            return None
        try:
            reply = worker.copy(arena, files, ranges)
            while worker.unneeded_arenas:
                worker.unmap(worker.unneeded_arenas.popleft())
        except OSError as error:
            self._discard(worker, error)
            return None
        self._release(worker)
        return reply.number if reply.kind == Kind.DONE else None

    def close(self) -> None:
        """End all workers; copies under way are not done."""
        with self._keeping:
            fork_server, self._fork_server, self._num = self._fork_server, None, 0
            with self._changed:
                for worker in self._all:
                    worker.process.hang_up()
                idle, self._all, self._idle = self._idle, [], []
                self._changed.notify_all()
        if fork_server:
            fork_server.server.close()
        for worker in idle:
            worker.process.kill(waits=True)

    def _refill(self) -> None:
        """Fork missing workers, unless that was done a moment ago."""
        now = time.monotonic()
        num_missing = self._num - len(self._all)
        if not self._fork_server or not num_missing or now - self._refilled_s < _MIN_REFILL_S:
            return
        self._refilled_s = now
        try:
            for _ in range(num_missing):
                worker = self._fork_server.fork()
                if worker is None:
                    return
                with self._changed:
                    self._all.append(worker)
                    self._idle.append(worker)
        except OSError as error:
            self._lose_fork_server(error)

    def _lose_fork_server(self, error: OSError) -> None:
        """Go on with the remaining workers; for those that die from now on, the kernel copies."""
        if self._fork_server:
            facts = {
                "pid": self._fork_server.server.pid,
                "reason": str(error),
                "instead": "the kernel copies for those that die, until the daemon is restarted",
            }
            log_event("copy workers are not replaced any more", facts, logging.ERROR)
            self._fork_server.server.kill(waits=True)
            self._fork_server = None

    def _tell_all(self, tell: Callable[[_Mapper], None]) -> None:
        try:
            if self._fork_server:
                tell(self._fork_server)
        except OSError as error:
            self._lose_fork_server(error)
        for worker in tuple(self._all):
            if self._acquire(partial(operator.is_, worker)):
                try:
                    tell(worker)
                except OSError as error:
                    self._discard(worker, error)
                else:
                    self._release(worker)

    def _acquire(self, suits: Callable[[_CopyWorker], bool]) -> _CopyWorker | None:
        """Wait for a worker that suits; of several, take the one that was used last.

        Returns:
            None where no worker suits, or those that do stay busy.
        """
        with self._changed:
            while any(map(suits, self._all)):
                for worker in filter(suits, reversed(self._idle)):
                    self._idle.remove(worker)
                    return worker
                if not self._changed.wait(_PATIENCE_S):
                    return None
        return None

    def _release(self, worker: _CopyWorker) -> None:
        with self._changed:
            if worker in self._all:
                self._idle.append(worker)
            else:
                worker.process.close()  # the pool was closed meanwhile
            self._changed.notify_all()

    def _discard(self, worker: _CopyWorker, error: OSError) -> None:
        """Kill a worker that died or hangs, so that it never writes to an arena again."""
        worker.process.kill(waits=True)
        with self._changed:
            if worker in self._all:
                self._all.remove(worker)
                facts = {"pid": worker.process.pid, "reason": error.strerror or str(error)}
                log_event("copy worker died", facts, logging.WARNING)
            self._changed.notify_all()


NO_COPY_WORKERS = CopyWorkers(0)
