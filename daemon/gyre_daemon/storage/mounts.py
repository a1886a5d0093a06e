"""The mounts of this machine: the threads that wait for each, and how long its reads take.

A file system that does not answer (an NFS server that is down, a FUSE process that has stopped)
holds every thread that asks it, and the kernel may never let go of them. So whatever touches a path
runs in a thread of the mount of this path, and only callers of that mount wait.

Which mount that is says `/proc/self/mountinfo`, by the longest prefix: asking for the path itself
could already hang. Links on the way are followed one by one, each by a thread of its own mount.

A slow mount is read by many threads, a request each; a fast one is mapped, and copied in large
jobs. A mount's file system tells which it is until its reads have been measured. The estimate
decides only that. Order and bytes are the same either way.
"""

import asyncio
import contextlib
import errno
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from gyre_daemon.errors import StorageUnavailable
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import DaemonThreads

# File systems whose reads may have to wait for a server or another process. Others are disks or
# memory of this machine, or are not known; these are fast until they are measured.
_REMOTE = frozenset(
    ("9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "cvmfs", "dvs", "glusterfs", "gpfs",
     "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs",
     "wekafs")
)  # fmt: skip
# A page read from a disk of flash takes 0.1 to 1 ms, a request over a network that is worth
# hiding more than that. Between the two bounds a mount stays what it was, so that few change often.
SLOW_S, FAST_S = 2e-3, 0.5e-3
# The median of the last reads decides: one in a hundred that takes a second does not. With fewer
# reads chance decides, with more a job begins later to read many at once.
_NUM_RECENT, _MIN_KNOWN = 16, 8


class MountIsSlow(Exception):
    """These samples are better read by a thread for each read; it has copied nothing."""


Speed = Literal["fast", "slow"]


class Latency:
    """How long reads of one mount wait for it. Safe for several threads.

    Attributes:
        guess: by the type of the file system.
        is_slow: whether the mount counts as slow now.
        num_cold_jobs: jobs whose samples come from the mount's disk.
    """

    def __init__(self, file_system: str) -> None:
        """Nothing is measured yet.

        Args:
            file_system: as in `/proc/self/mountinfo`.
        """
        kind = file_system.partition(".")[0]
        self.guess: Speed = "slow" if kind in (*_REMOTE, "fuse", "fuseblk") else "fast"
        self.is_slow = self.guess == "slow"
        self._maps = True  # as far as is known
        self.num_cold_jobs = 0
        self._recent_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._lock = threading.Lock()

    @property
    def median_s(self) -> float | None:
        """Of the last reads, in seconds; None while too few are measured."""
        with self._lock:
            return self._median_s()

    def add_since(self, began_s: float) -> bool:
        """Count a read that began at this time of `time.perf_counter` and has just ended.

        Returns:
            Whether it took long, so that the next read should be measured, too.
        """
        took_s = time.perf_counter() - began_s
        if took_s > FAST_S and not self.is_slow:
            # A thread that returns from a system call waits for the interpreter. How long that
            # takes now is seen by a call that does nothing. It is not subtracted where a mount may
            # become fast by it: both times vary.
            began_s = time.perf_counter()
            time.sleep(0)
            took_s -= time.perf_counter() - began_s
        with self._lock:
            self._recent_s.append(took_s)
            bound_s = FAST_S if self.is_slow else SLOW_S
            if (took_s > bound_s) != self.is_slow and self._maps:  # the others change nothing
                median_s = self._median_s()
                if median_s is not None and (median_s > bound_s) != self.is_slow:
                    self.is_slow = not self.is_slow
                    self._recent_s.clear()
        return took_s > SLOW_S

    def cannot_map(self) -> None:
        """Count the mount as slow from now on, as its files cannot be mapped."""
        with self._lock:
            self._maps, self.is_slow = False, True

    @contextlib.contextmanager
    def cold_job(self) -> Iterator[None]:
        """Count a cold job inside the context."""
        with self._lock:
            self.num_cold_jobs += 1
        try:
            yield
        finally:
            with self._lock:
                self.num_cold_jobs -= 1

    def _median_s(self) -> float | None:
        if len(self._recent_s) < _MIN_KNOWN:
            return None
        return sorted(self._recent_s)[len(self._recent_s) // 2]


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Threads for opening, listing, indexes and the like; reading samples has its own. They are started
# when they are needed. With fewer, unpacking some datasets would keep others from opening.
_NUM_THREADS = 64
# A call that a mount has not answered for this long hangs. Less calls a busy disk hung.
HANGS_AFTER_S = 5.0
# After that an opening, listing or indexing that waits for it fails. An NFS server that takes over
# from another needs a minute or two; with more, a job waits longer before it is told.
_GIVEN_UP_AFTER_S = 120.0
# How old the table of mounts may be. A mount that is made or removed is noticed so late.
_RENEW_AFTER_S = 5.0
_LOOK_EVERY_S = 1.0  # while a call is waited for
_MAX_LINKS = 40  # as the kernel's
_MAX_KNOWN = 10_000  # resolved paths; more only take memory
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Mount:
    """One mount, and the threads that wait for it.

    Attributes:
        path: where it is mounted.
        file_system: its type, such as `ext4`, `nfs4` or `fuse.s3fs`.
        threads: for all that touches its paths, except reading samples.
        readers: for reading samples.
        latency: of its reads.
    """

    path: str
    file_system: str
    threads: DaemonThreads = field(init=False)
    readers: DaemonThreads = field(init=False)
    latency: Latency = field(init=False)
    _hangs: bool = False
    _still_since: float = 0.0

    def __post_init__(self) -> None:
        self.threads = DaemonThreads(_NUM_THREADS, f"gyre-fs {self.path}")
        self.readers = DaemonThreads(_NUM_THREADS, f"gyre-read {self.path}")
        self.latency = Latency(self.file_system)

    @property
    def is_used(self) -> bool:
        """Whether it was asked for something in the last half minute."""
        return self.threads.num_threads + self.readers.num_threads > 0

    @property
    def hangs_since_s(self) -> float | None:
        """For how many seconds a call has not been answered; None if the mount does not hang."""
        return time.monotonic() - self._still_since if self._hangs else None

    def look(self) -> None:
        """See whether the mount hangs, and log where that changed; about once a second."""
        pools, hung = (self.threads, self.readers), self._hangs
        still_since = min((each for pool in pools if (each := pool.still_since())), default=None)
        self._hangs = still_since is not None and time.monotonic() - still_since >= HANGS_AFTER_S
        self._still_since = still_since or 0.0
        facts = {"path": self.path, "file_system": self.file_system}
        if self._hangs and not hung:
            log_event("mount hangs", facts, logging.WARNING)
        elif hung and not self._hangs:
            log_event("mount answers again", facts)

    async def run(
        self,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Call `work`, which touches the mount, in one of its threads.

        Raises:
            StorageUnavailable: the mount has hung for minutes.
        """
        return await self._result(self.threads.submit(work, *args, **kwargs))

    async def run_in(self, pid: int, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait as `run` does, for work of a process that reads files of the mount.

        Raises:
            StorageUnavailable: the mount has hung for minutes.
        """
        with self.threads.counting(pid):
            return await self._result(asyncio.create_task(work))

    @contextlib.asynccontextmanager
    async def opened(self, work: Callable[[], int]) -> AsyncIterator[int]:
        """Keep a descriptor open inside the block, which `work` opens in a thread of the mount."""
        opening = self.threads.submit(work)
        try:
            descriptor = await self._result(opening)
        except (asyncio.CancelledError, StorageUnavailable):
            opening.add_done_callback(_close_opened)  # called in the thread
            raise
        try:
            yield descriptor
        finally:
            self.close(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor of a file of the mount, which may wait for the file system.

        On an event loop it is closed soon afterwards, in a thread.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with contextlib.suppress(OSError):  # the mount has gone; the descriptor is closed
                os.close(descriptor)
        else:  # no lock may be taken here: the garbage collector may have called
            loop.call_soon_threadsafe(self.threads.submit, os.close, descriptor)

    async def answered(
        self,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Do as `run`, but do not wait for a mount that hangs.

        Raises:
            TimeoutError: it hangs.
        """
        running = asyncio.wrap_future(self.threads.submit(work, *args, **kwargs))
        if not await self._ends(running, HANGS_AFTER_S):
            text = f"the mount {self.path} ({self.file_system}) does not answer"
            raise TimeoutError(errno.ETIMEDOUT, text)
        return running.result()

    async def _result(self, submitted: "Future[Result] | asyncio.Task[Result]") -> Result:
        """The result of a call; see `run`."""
        running, began_s = asyncio.wrap_future(submitted), time.monotonic()
        if not await self._ends(running, _GIVEN_UP_AFTER_S, began_s):
            raise StorageUnavailable(
                f"the mount {self.path} ({self.file_system}) has not answered for "
                f"{_GIVEN_UP_AFTER_S:g} s. Restore its server, or remount it.",
                {"path": self.path},
            )
        return running.result()

    async def _ends(
        self, running: "asyncio.Future[Result]", limit_s: float, began_s: float = 0.0
    ) -> bool:
        """Wait for a call; False if the mount hangs, and has for this long since `began_s`."""
        try:
            while not (await asyncio.wait((running,), timeout=_LOOK_EVERY_S))[0]:
                still_since = self.threads.still_since()
                if still_since and time.monotonic() - max(still_since, began_s) >= limit_s:
                    return False
        finally:
            running.cancel()  # without effect once it has ended
        return True


class Mounts:
    """All mounts of this process's name space; safe for several threads."""

    def __init__(self, table: Path = Path("/proc/self/mountinfo")) -> None:
        """Read nothing yet.

        Args:
            table: in the kernel's format of `mountinfo` (proc(5)).
        """
        self._table = table
        self._by_path: dict[str, Mount] = {}
        self._by_id: dict[str, Mount] = {}
        self._real: dict[str, tuple[str, float]] = {}  # without links, and when that was found out
        self._renewed_at = -math.inf

    def __iter__(self) -> Iterator[Mount]:
        """The mounts in use."""
        return (mount for mount in list(self._by_id.values()) if mount.is_used)

    def look(self) -> None:
        """See which mounts hang; to be called about once a second."""
        for mount in self:
            mount.look()

    def at(self, path: str | Path) -> Mount:
        """The mount of a path, as far as is known; touches nothing but the table.

        Links count where `of` has followed them.
        """
        asked = _absolute(path)
        return self._below(self._real.get(asked, (asked,))[0])

    async def of(self, path: str | Path) -> Mount:
        """The mount of a path, behind all links; waits for the mounts on the way.

        Raises:
            StorageUnavailable: one of them has hung for minutes.
        """
        return await self._of(path, Mount.run)

    async def run(
        self,
        path: str | Path,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Call `work`, which touches a path, in a thread of its mount.

        Raises:
            StorageUnavailable: the mount has hung for minutes.
        """
        mount = await self._of(path, Mount.run)
        return await mount.run(work, *args, **kwargs)

    async def answered(
        self,
        path: str | Path,
        work: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Do as `run`, but do not wait for a mount that hangs.

        Raises:
            TimeoutError: it hangs.
        """
        mount = await self._of(path, Mount.answered)
        return await mount.answered(work, *args, **kwargs)

    async def _of(self, path: str | Path, run: Callable[..., Awaitable[str]]) -> Mount:
        asked = _absolute(path)
        real, found_at = self._real.get(asked, ("", -math.inf))
        if time.monotonic() - found_at < _RENEW_AFTER_S:
            return self._below(real)
        mount = self._below(real := asked)
        for _ in range(_MAX_LINKS):
            followed = await run(mount, _without_first_link, real)
            if mount.file_system == "autofs":  # that mounted its file system
                self._renew()
            if followed == real and self._below(real) is mount:
                break
            real = followed
            mount = self._below(real)
            self._real[asked] = real, -math.inf  # for `at`, if the next mount hangs
        if len(self._real) >= _MAX_KNOWN:
            self._real.clear()
        self._real[asked] = real, time.monotonic()
        return mount

    def _below(self, path: str) -> Mount:
        """The mount of a path without links."""
        if time.monotonic() - self._renewed_at >= _RENEW_AFTER_S:
            self._renew()
        by_path = self._by_path
        while path not in by_path:
            path = path.rpartition("/")[0] or "/"
        return by_path[path]

    def _renew(self) -> None:
        by_path, by_id = {}, {}
        for number, path, file_system in _parsed(self._table.read_text("utf-8", "surrogateescape")):
            before = self._by_id.get(number)
            if before is None or (before.path, before.file_system) != (path, file_system):
                before = Mount(path, file_system)
            by_path[path] = by_id[number] = before  # the last one hides those below it
        if "/" not in by_path:  # as in a chroot whose root is no mount
            by_path["/"] = by_id[""] = self._by_id.get("") or Mount("/", "unknown")
        self._by_path, self._by_id = by_path, by_id
        self._renewed_at = time.monotonic()


MOUNTS = Mounts()  # the kernel has one table for the whole process


def _parsed(table: str) -> Iterator[tuple[str, str, str]]:
    """Number, path and file-system type of each line of a `mountinfo`."""
    for line in table.splitlines():
        fields = line.split(" ")
        path = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4])
        yield fields[0], path, fields[fields.index("-", 6) + 1]


def _close_opened(opening: "Future[int]") -> None:
    if not opening.cancelled() and not opening.exception():
        os.close(opening.result())


def _absolute(path: str | Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100  (a `Path` takes three times as long)


def _without_first_link(path: str) -> str:
    """A path whose first link is replaced by its target; the same path if it has none."""
    parts = Path(path).parts
    for number in range(2, len(parts) + 1):
        link = Path(*parts[:number])
        try:
            target = link.readlink()
        except OSError:  # no link, or not there
            continue
        return os.path.normpath(Path(link.parent, target, *parts[number:]))
    return path
