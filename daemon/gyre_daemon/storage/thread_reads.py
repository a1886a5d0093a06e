"""Reads of local files in threads, and datasets whose samples are files.

While the mount is fast, a thread reads a whole part of a plan. A part that finds out that the mount
is slow leaves the rest to a thread for each read, behind the request engine. So these have what
requests to object storage have: a limit of how many are in flight, the fair queue of all jobs,
deadlines, hedges, and shared reads of what several jobs want. A thread that waits for the kernel
cannot be stopped: a read whose hedge was faster gives its turn back and keeps its thread, so there
are twice as many threads as turns. A hedge helps where the file system asks its server again; where
the kernel keeps the pages locked, it waits for the first read.

Each thread of a slow mount reads into memory of its own, not into the slot: one that never returns
would keep the slot for ever.

Of single files nothing stays open between samples, so that millions of files take no descriptors.
Nothing is mapped, because a mapping costs more than reading a file that is wanted whole.
"""

import asyncio
import ctypes
import errno
import itertools
import os
import resource
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.threads import DaemonThreads, FairExecutor, LoopThreads
from gyre_daemon.storage.base import ArenaClosed, ReadPlan, Reads, ShardBounds, stream_by_reads
from gyre_daemon.storage.beneath import READ_FLAGS, LocalFile, NotRegular, Root, unknown
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.listing import file_error
from gyre_daemon.storage.mounts import MOUNTS, Mount
from gyre_daemon.storage.response import OnResponse, Response, SentRequest
from gyre_daemon.storage.shard import FileShards, FileTable, Shard, changed

# Work for less than this is not split among threads: copying it takes 4 ms, and a second job costs
# about one. Larger jobs leave threads idle while a batch is awaited.
_MIN_JOB_BYTES = 16 << 20

# Reads in this thread; returns how many reads it did, the first ones, and for how many seconds it
# waited for the disk. It does not do all only if the mount is slow.
ReadAll = Callable[[Reads], tuple[int, float]]

# Reads the bytes [start, stop) of a shard by its number. Raises `GyreError`, and an `OSError` of
# which the next attempt may be free.
ReadRange = Callable[[int, int, int], bytes]

# Errors of a mount whose server is away for a while; lasting ones are not repeated.
TRANSIENT = frozenset(
    (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
     errno.ENETUNREACH, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN,
     errno.EAGAIN)
)  # fmt: skip


class SlowReads:
    """How the files of one dataset are read while one of their mounts is slow."""

    def __init__(self, mounts: Sequence[Mount], endpoint_of: Callable[[Mount], Endpoint]) -> None:
        """Read nothing yet.

        Args:
            mounts: of the files.
            endpoint_of: returns the request engine of a mount.
        """
        self._mounts = mounts
        self._endpoint_of = endpoint_of
        self._storage: RemoteStorage | None = None

    @property
    def is_slow(self) -> bool:
        """Whether one of the mounts is slow."""
        return any(mount.latency.is_slow for mount in self._mounts)

    async def read(self, plan: ReadPlan, shards: Sequence[Shard], read: ReadRange) -> None:
        """See `Storage.read`."""
        if self._storage is None:
            mount = next((each for each in self._mounts if each.latency.is_slow), self._mounts[0])
            self._storage = RemoteStorage(
                MountSource(read, mount.readers),
                self._endpoint_of(mount),
                _Numbers(shards),
                shards,
                is_compared=True,
            )
        await self._storage.read(plan)


class ThreadReads:
    """The reads of one local storage."""

    def __init__(
        self,
        shards: Sequence[Shard],
        workers: FairExecutor,
        metrics: Metrics,
        read_all: ReadAll,
        read_range: ReadRange,
        slow: SlowReads | None,
    ) -> None:
        """Nothing is read yet.

        Args:
            shards: as listed; no read may leave them.
            workers: threads that read.
            metrics: counts the reads.
            read_all: reads a part of a plan in one thread.
            read_range: reads one range, while the mount is slow.
            slow: reads while the mount is slow; None where it is never slow.
        """
        self._shards = shards
        self._bounds = ShardBounds(shards)
        self._workers = workers
        self._metrics = metrics
        self._read_all = read_all
        self._read_range = read_range
        self._slow = slow

    @property
    def is_slow(self) -> bool:
        """Whether each read has a thread."""
        return self._slow is not None and self._slow.is_slow

    def cuts(self, num_items: int, cost: int) -> list[int]:
        """Where to cut a plan into jobs for several threads: positions from 0 to `num_items`.

        It stays whole while threads have other things to do, because each job has a fixed cost of
        about a millisecond.

        Args:
            num_items: of the plan.
            cost: of all of them, in bytes that could be copied meanwhile.
        """
        max_jobs = self._workers.num_threads if self._workers.is_idle else 1
        num_jobs = max(1, min(max_jobs, 1 + cost // _MIN_JOB_BYTES, num_items))
        return [num_items * job // num_jobs for job in range(num_jobs + 1)]

    async def run(self, plan: ReadPlan, cost: int) -> float:
        """Work out each part of a plan in the thread that reads it.

        Returns:
            The longest time that a thread waited for the disk, in seconds.
        """
        if self.is_slow:
            await self._read_slowly(plan)
            return 0.0
        cuts = self.cuts(len(plan), cost)
        share = cost / (len(cuts) - 1)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._run_part(plan, slice(*cut), share))
                for cut in itertools.pairwise(cuts)
            ]
        return max(each.result() for each in running)

    async def _run_part(self, plan: ReadPlan, part: slice, cost: float) -> float:
        outcome: Outcome = "error"
        worked_out: list[Reads] = []
        work = partial(self._read_part, plan, part, worked_out)
        try:
            unread, waited_s = await self._workers.run(plan.flow, cost, plan.urgency, work)
            outcome = "ok"
        except (asyncio.CancelledError, ArenaClosed):  # the session ended
            outcome = "abandoned"
            raise
        finally:
            labels = RequestLabels("file", "read", outcome)
            for reads in worked_out:
                self._metrics.count_requests(labels, len(reads), reads.num_bytes)
        if unread is not None:
            await self._read_slowly(unread)
        return waited_s

    def _read_part(
        self, plan: ReadPlan, part: slice, worked_out: list[Reads]
    ) -> tuple[Reads | None, float]:
        """Read a part; returns what is left of it, and the time that the disk was waited for."""
        with plan.lease():
            reads = plan.part(part)
            self._bounds.check(reads)
            reads = reads.nonempty()
            if not len(reads):
                return None, 0.0
            if self.is_slow:
                return reads, 0.0
            worked_out.append(reads)
            num_read, waited_s = self._read_all(reads)
            if num_read == len(reads):
                return None, waited_s
            worked_out[:] = [reads.part(slice(num_read))]
            return reads.part(slice(num_read, None)), waited_s

    async def _read_slowly(self, plan: ReadPlan) -> None:
        assert self._slow
        await self._slow.read(plan, self._shards, self._read_range)


class MountSource:
    """Reads files in threads; see `Source`. A path is the number of a shard."""

    def __init__(self, read: ReadRange, threads: DaemonThreads) -> None:
        self._read = read
        self._threads = LoopThreads(threads)  # which the mount bounds

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        return self._threads.send(
            partial(_response, self._read, int(path), start, stop), on_response
        )

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: files need no credentials."""

    def close(self) -> None:
        """See `Source.close`: nothing is open."""


class _Numbers(Sequence[str]):
    """The numbers of shards as paths."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._num = len(shards)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: Any) -> Any:
        return str(number)


def _response(read: ReadRange, shard: int, start: int, stop: int) -> Response:
    try:
        return Response(206, read(shard, start, stop))
    except GyreError as error:
        return Response(0, error=error)
    except OSError as error:
        return Response(0, detail=f"{type(error).__name__}: {error.strerror or error}")


# The cost of opening a file, in bytes that could be copied meanwhile. It weighs jobs that share the
# threads, and decides when work is split: a job has a fixed cost of about a millisecond.
_OPENING_BYTES = 64 << 10

# How long a thread lets others go first that seem to read from the page cache. Each of them takes
# some milliseconds for a batch; where a file system does not say that it waits, this is lost.
_TURN_S = 0.1
# Files of each job that are measured: more cost time in every job, fewer notice later that the
# mount is slow. While files take long, all are measured.
_NUM_MEASURED = 4

OpenBeneath = Callable[[str | bytes, int], int]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]


class SingleFiles:
    """A `Storage` whose shards are the files of a table; each read is of one file.

    Attributes:
        shards: as listed.
    """

    checksums = None
    block_cache = None

    def __init__(
        self,
        root: Root,
        table: FileTable,
        workers: FairExecutor,
        metrics: Metrics,
        slow: SlowReads | None = None,
    ) -> None:
        """Open no file yet.

        Args:
            root: the files lie beneath it.
            table: of local files.
            workers: threads that read.
            metrics: counts the reads.
            slow: reads while the mount is slow; None where it is never slow.
        """
        assert table.stamps is not None
        self.shards: Sequence[Shard] = FileShards(table)
        self._root = root
        self._table = table
        self._stamps = table.stamps
        self._reads = ThreadReads(
            self.shards, workers, metrics, self._read_files, self._read_file, slow
        )
        self._latency = MOUNTS.at(root.folder).latency
        self._shared_root = _SharedRoot(root)
        self._turn = threading.Lock()
        self._from_page_cache = True  # where the last reads came from

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`."""
        return not self._reads.is_slow

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; each part of the plan is worked out in the thread that reads it."""
        await self._reads.run(plan, plan.num_bytes + _OPENING_BYTES * len(plan))

    def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        return stream_by_reads(self, shard)

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return str(self._root.folder / self._table.name(shard))

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""
        return LocalFile(self._root, self._table.name(shard))

    def _read_files(self, reads: Reads) -> tuple[int, float]:
        """Read, then check that each file is as it was listed; see `ReadAll`.

        The check comes last, so that a write while a file is read does not go unnoticed.
        """
        latency, num_to_measure, num_read = self._latency, _NUM_MEASURED, 0
        names, pread = self._table.names, _libc.pread
        listed = zip(
            reads.shard.tolist(),
            self._table.sizes[reads.shard].tolist(),
            self._stamps[reads.shard].tolist(),
            strict=True,
        )
        ranges = zip(reads.start.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True)
        number = -1
        try:
            with self._taking_turns(), self._root.held() as open_beneath:
                for (number, file_bytes, stamp), (start, size, target) in zip(
                    listed, ranges, strict=True
                ):
                    descriptor = open_beneath(names[number], READ_FLAGS)
                    try:
                        began_s = time.perf_counter()
                        count = pread(descriptor, target, size, start)
                        while (
                            0 < count < size
                            and (
                                more := pread(
                                    descriptor, target + count, size - count, start + count
                                )
                            )
                            > 0
                        ):
                            count += more
                        if num_to_measure > 0:
                            num_to_measure -= not latency.add_since(began_s)
                        now = os.stat(descriptor)  # noqa: PTH116  # `Path` takes no descriptor
                    finally:
                        os.close(descriptor)
                    is_listed = now.st_size == file_bytes and stamp == [
                        now.st_mtime_ns,
                        now.st_ctime_ns,
                    ]
                    if not is_listed or count != size:
                        raise self._difference(number, now)
                    num_read += 1
                    if latency.is_slow and self._reads.is_slow:
                        break
        except OSError as error:
            name = self._table.name(number) if number >= 0 else str(self._root.folder)
            raise file_error(name, error) from error
        return num_read, 0.0  # how long it waited for the disk is not known

    def _read_file(self, number: int, start: int, stop: int) -> bytes:
        """Read a range of one file, with one call where nothing is wrong; see `ReadRange`."""
        table, size = self._table, stop - start
        listed = [int(table.sizes[number]), *self._stamps[number].tolist()]
        try:
            with self._shared_root.held() as open_beneath:
                descriptor = open_beneath(table.names[number], READ_FLAGS)
                try:
                    began_s = time.perf_counter()
                    try:
                        data = os.pread(descriptor, size, start)
                        while 0 < len(data) < size and (
                            more := os.pread(descriptor, size - len(data), start + len(data))
                        ):
                            data += more
                    except OSError as error:
                        if error.errno not in (errno.ESPIPE, errno.EISDIR):
                            raise
                        data = b""
                    self._latency.add_since(began_s)
                    now = os.stat(descriptor)  # noqa: PTH116  # `Path` takes no descriptor
                finally:
                    os.close(descriptor)
            if len(data) != size or listed != [now.st_size, now.st_mtime_ns, now.st_ctime_ns]:
                raise self._difference(number, now)
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            raise file_error(table.name(number), error) from error
        return data

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """One thread after the other, while files come from the page cache.

        Threads that read there do not wait for a disk but for the interpreter's lock, which each
        system call gives up: four threads take half the rate of one, and twice its CPU time. A
        thread that waits for a disk holds nobody up for longer than `_TURN_S`, and then
        all read at once, until one finds its files in the page cache again.
        """
        has_turn = self._from_page_cache and self._turn.acquire(timeout=_TURN_S)
        blocks_before = _blocks_from_disk()
        try:
            yield
            self._from_page_cache = _blocks_from_disk() == blocks_before
        finally:
            if has_turn:
                self._turn.release()

    def _difference(self, number: int, now: os.stat_result) -> OSError | GyreError:
        """The error for a file that is not as it was listed, or of which not all can be read."""
        name = self._table.name(number)
        modified_ns, changed_ns = self._stamps[number].tolist()
        if not stat.S_ISREG(now.st_mode):
            return NotRegular()
        if now.st_size != self._table.sizes[number] or now.st_mtime_ns != modified_ns:
            return changed(name)
        if now.st_ctime_ns != changed_ns:
            return unknown(name, "gyre index")
        return StorageUnavailable(
            f"file {name} has not changed and yet cannot be read: its disk or file system fails; "
            "see the system's log",
            {"shard": name},
        )


class _SharedRoot:
    """A root whose folder stays open while any thread reads beneath it.

    It is closed in between, so that it keeps nobody from unmounting.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._num_users = 0
        self._held = ExitStack()
        self._open: OpenBeneath

    @contextmanager
    def held(self) -> Iterator[OpenBeneath]:
        """A function that opens files, inside the context; see `Root.held`."""
        with self._lock:
            if not self._num_users:
                self._open = self._held.enter_context(self._root.held())
            self._num_users += 1
            open_beneath = self._open

        def open_file(name: str | bytes, flags: int) -> int:
            try:
                return open_beneath(name, flags)
            except FileNotFoundError:  # or another folder lies at the root's path by now
                return self._root.open(os.fsdecode(name), flags)

        try:
            yield open_file
        finally:
            with self._lock:
                self._num_users -= 1
                if not self._num_users:
                    self._held.close()


def _blocks_from_disk() -> int:
    """How many blocks this thread has had read from disks."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
