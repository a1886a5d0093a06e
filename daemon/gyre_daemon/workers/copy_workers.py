"""All copy workers of a daemon: threads borrow them, and those that die are replaced.

In: ranges of files, and their places in one arena. Out: whether the ranges were copied. If they
were not, the caller has the kernel copy them.
"""

import errno
import itertools
import logging
import math
import operator
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from gyre_daemon.runtime.events import log_event
from gyre_daemon.workers.copying import CopyWork, Ranges
from gyre_daemon.workers.protocol import Kind, Message, send
from gyre_daemon.workers.supervisor import ForkServer, Process

# Dead workers are replaced at most once in this time. A process forks in some 5 ms; files that kill
# every worker that reads them must not keep a core busy with that.
_MIN_REFILL_S = 1.0
# How long a thread waits for a worker. A copy takes some 10 ms; with all workers busy for longer,
# they wait for a mount that hangs, and the kernel copies instead.
_PATIENCE_S = 1.0
# How long `close` waits for a starting fork server; it ends by itself afterwards.
_MAX_JOIN_S = 10.0

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

    def unmap_unneeded(self) -> None:
        """Unmap the arenas that were closed while it was busy."""
        while self.unneeded_arenas:
            self.unmap(self.unneeded_arenas.popleft())

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
        self._replacing: threading.Thread | None = None
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
            worker.unmap_unneeded()
        except OSError as error:
            self._discard(worker, error)
            return None
        self._release(worker)
        return reply.number if reply.kind == Kind.DONE else None

    def close(self) -> None:
        """End all workers; copies under way are not done."""
        with self._keeping:
            fork_server, self._fork_server, self._num = self._fork_server, None, 0
            replacing = self._replacing
            with self._changed:
                for worker in self._all:
                    worker.process.hang_up()
                idle, self._all, self._idle = self._idle, [], []
                self._changed.notify_all()
        if fork_server:
            fork_server.server.close()
        for worker in idle:
            worker.process.kill(waits=True)
        if replacing:
            replacing.join(_MAX_JOIN_S)

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
        """Go on with the remaining workers, and start another fork server meanwhile.

        The new one forks workers that have the arenas made from then on. Where a batch group lies
        in an older arena and no worker is left that has it, the kernel copies.
        """
        if self._fork_server:
            facts = {"pid": self._fork_server.server.pid, "reason": str(error)}
            log_event("fork server of copy workers died", facts, logging.WARNING)
            self._fork_server.server.kill(waits=True)
            self._fork_server = None
            self._replacing = threading.Thread(
                target=self._replace_fork_server, name="gyre-fork-server", daemon=True
            )
            self._replacing.start()

    def _replace_fork_server(self) -> None:
        """Start a fork server; one that does not start is not tried again."""
        try:
            fork_server = _CopyServer(ForkServer.spawned("copy", os.environ))
        except OSError as error:
            facts = {
                "reason": str(error),
                "instead": "the kernel copies for those that die, which takes more processor time",
            }
            log_event("copy workers are not replaced any more", facts, logging.ERROR)
            return
        with self._keeping:
            if self._num:
                self._fork_server, self._refilled_s = fork_server, -math.inf
                log_event("fork server of copy workers replaced", {"pid": fork_server.server.pid})
                self._refill()
                return
        fork_server.server.close()  # the pool was closed meanwhile

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
