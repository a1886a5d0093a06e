"""Local files: no task and no object per sample, but a few thread jobs per batch.

Each job works out its reads and copies them out of mapped files.

[Note: Cold files]

A job tells the kernel which pages it is about to copy. A cold file is then read many blocks at
once, instead of one after the other as the copy reaches them. Files in memory need no announcement:
a few reads of each job are looked up, and the job is announced only if one of them is missing.
Before a cold job is announced, one of its reads is measured, and more if that takes long: see
`storage.mounts`. This is done only while no other cold job is under way, because what waits behind
the announcements of others says nothing about the disk.

[Note: Slow mounts]

While the mount is fast, a thread reads a whole part of a plan. A part that finds out that the mount
is slow leaves the rest to a thread for each read, behind the request engine. So these have what
requests to object storage have: a limit of how many are in flight, the fair queue of all jobs,
deadlines, hedges, and shared reads of what several jobs want. A thread that waits for the kernel
cannot be stopped: a read whose hedge was faster gives its turn back and keeps its thread, so there
are twice as many threads as turns. A hedge helps where the file system asks its server again; where
the kernel keeps the pages locked, it waits for the first read.

Each thread of a slow mount reads into memory of its own, not into the slot: one that never returns
would keep the slot for ever.

[Note: Samples that are files]

Where each sample is a file, nothing stays open between samples, so that millions of files take no
descriptors. Nothing is mapped, because a mapping costs more than reading a file that is wanted
whole. One thread goes through the files of a batch while their mount is fast, and each file has one
while it is slow.
"""

import asyncio
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import resource
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.threads import DaemonThreads, FairExecutor, LoopThreads
from gyre_daemon.storage.beneath import (
    READ_FLAGS,
    LocalFile,
    NotRegular,
    Root,
    SharedRoot,
    file_error,
)
from gyre_daemon.storage.engine.endpoint import Endpoint, RemoteStorage
from gyre_daemon.storage.mounts import MOUNTS, Latency, Mount, MountIsSlow
from gyre_daemon.storage.open_shards import (
    OpenFiles,
    OpenShard,
    OpenShards,
    ShardChecksums,
    unknown,
)
from gyre_daemon.storage.reads import (
    ArenaClosed,
    ReadPlan,
    Reads,
    ShardBounds,
    Storage,
    WritableArena,
    gather,
    is_allowed,
    read_each,
)
from gyre_daemon.storage.response import (
    OnResponse,
    Response,
    SentRequest,
    Source,
    response_from_error,
)
from gyre_daemon.storage.shard import Computed, FileShards, FileTable, Shard, changed
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers, Ranges

# Work for less than this is not split among threads: copying it takes 4 ms, and a second job costs
# about one. Larger jobs leave threads idle while a batch is awaited.
_MIN_JOB_BYTES = 16 << 20

# Errors of a mount whose server is away for a while; lasting ones are not repeated.
TRANSIENT = frozenset(
    (errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
     errno.ENETUNREACH, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN,
     errno.EAGAIN)
)  # fmt: skip


class SlowMounts(Struct, frozen=True):
    """How the files of one dataset are read while one of their mounts is slow.

    Attributes:
        mounts: of the files.
        endpoint_of: returns the request engine of a mount.
    """

    mounts: Sequence[Mount]
    endpoint_of: Callable[[Mount], Endpoint]

    @property
    def are_slow(self) -> bool:
        """Whether one of the mounts is slow."""
        return any(mount.latency.is_slow for mount in self.mounts)


class FileStorage(Storage):
    """Local files, whose reads are done by threads.

    A subclass reads a part of a plan in one thread (`_read_all`), and single ranges while the mount
    is slow (`_read_range`).

    Attributes:
        shards: as listed.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        workers: FairExecutor,
        metrics: Metrics,
        slow: SlowMounts | None,
    ) -> None:
        """Open no file yet.

        Args:
            shards: as listed; no read may leave them.
            workers: threads that read.
            metrics: counts the reads.
            slow: how files are read while a mount is slow; None where none ever is.
        """
        self.shards = shards
        self._bounds = ShardBounds(shards)
        self._workers = workers
        self._metrics = metrics
        self._slow = slow
        self._slow_storage: RemoteStorage | None = None

    def _read_all(self, reads: Reads) -> tuple[int, float]:
        """Read in this thread.

        Returns:
            The number of reads that it did, the first ones; fewer than all only if the mount is
            slow. And for how many seconds it waited for the disk.
        """
        raise NotImplementedError

    def _read_range(self, shard: int, start: int, stop: int) -> bytes:
        """Read the bytes `[start, stop)` of a shard.

        Raises:
            GyreError: they cannot be read.
            OSError: the next attempt may succeed.
        """
        raise NotImplementedError

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`."""
        return not self._is_slow

    @property
    def _is_slow(self) -> bool:
        """Whether each read has a thread."""
        return self._slow is not None and self._slow.are_slow

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

    async def _run(self, plan: ReadPlan, cost: int) -> float:
        """Work out each part of a plan in the thread that reads it.

        Returns:
            The longest time that a thread waited for the disk, in seconds.
        """
        if self._is_slow:
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
        """Read a part; returns the rest of it, and the time that the disk was waited for."""
        with plan.lease():
            reads = plan.part(part)
            self._bounds.check(reads)
            reads = reads.nonempty()
            if not len(reads):
                return None, 0.0
            if self._is_slow:
                return reads, 0.0
            worked_out.append(reads)
            num_read, waited_s = self._read_all(reads)
            if num_read == len(reads):
                return None, waited_s
            worked_out[:] = [reads.part(slice(num_read))]
            return reads.part(slice(num_read, None)), waited_s

    async def _read_slowly(self, plan: ReadPlan) -> None:
        assert self._slow
        if self._slow_storage is None:
            mounts = self._slow.mounts
            mount = next((each for each in mounts if each.latency.is_slow), mounts[0])
            self._slow_storage = RemoteStorage(
                MountSource(self._read_range, mount.readers),
                self._slow.endpoint_of(mount),
                Computed(len(self.shards), str),
                self.shards,
                is_compared=True,
            )
        await self._slow_storage.read(plan)


class MountSource(Source):
    """Reads files in threads. A path is the number of a shard."""

    def __init__(self, read: Callable[[int, int, int], bytes], threads: DaemonThreads) -> None:
        self._read = read
        self._threads = LoopThreads(threads)  # which the mount bounds

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""

        def respond() -> Response:
            try:
                return Response(206, self._read(int(path), start, stop))
            except (GyreError, OSError) as error:
                return response_from_error(error)

        return self._threads.send(respond, on_response)


# When copy workers copy instead of the kernel. They pay for each call and the kernel for each page.
# Samples of different sizes gain below this mean size only if the sizes are alike, since a worker
# needs a call for each. Above the second mean size memory is the limit either way, and handing the
# job over would only add a round trip.
_MIN_COPIED_BYTES = 32 << 10
_MAX_COPIED_BYTES = 1 << 20
# A shard written to while its bytes are compared is looked at this often. More looks keep a
# thread busy with a file that a slow writer changes; fewer refuse one that was just restored.
_MAX_LOOKS = 3

# Reads looked up in a job. More cost time in every job, some 0.03 ms for these; fewer notice later
# that files have become cold.
_NUM_PROBES = 16
# Bytes read around a sample of a dataset that fits into memory. It is read whole sooner or later,
# so larger requests bring it there sooner.
_WHOLE_GRAIN_BYTES = 128 << 10

_Ranges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]

_mincore = ctypes.PyDLL(None).mincore  # it never waits, so the interpreter's lock is kept
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


class LocalStorage(FileStorage):
    """Shards in the local file system."""

    def __init__(
        self,
        files: Sequence[LocalFile],
        shards: Sequence[Shard],
        workers: FairExecutor,
        metrics: Metrics,
        copy_workers: CopyWorkers = NO_COPY_WORKERS,
        open_files: OpenFiles | None = None,
        owner: object = None,
        slow: SlowMounts | None = None,
    ) -> None:
        """Open no file yet.

        Args:
            files: the shards.
            shards: as listed.
            workers: threads that read.
            metrics: counts the reads.
            copy_workers: processes that may copy for the threads.
            open_files: divides open files among the daemon's datasets; None for a single dataset.
            owner: keeps the files alive as long as the storage refers to it; None if nobody does.
            slow: see `FileStorage`.
        """
        super().__init__(shards, workers, metrics, slow)
        self._owner = owner
        self._files = files
        self._open = OpenShards(files, shards, copy_workers, open_files)
        self._checksums = ShardChecksums(shards, files)
        self._make_unmapped = partial(OpenShards, files, shards, open_files=open_files, maps=False)
        self._unmapped: OpenShards | None = None  # those of a slow mount, once there are some
        self._making_unmapped = threading.Lock()
        self._copy_workers = copy_workers
        self._ahead = ReadAhead(shards, measures=slow is not None)
        self._may_gather = is_allowed()

    @property
    def checksums(self) -> ShardChecksums:
        """See `Storage.checksums`."""
        return self._checksums

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; each part of the plan is worked out in the thread that reads it."""
        waited_s = await self._run(plan, plan.num_bytes)
        if plan.delays:
            plan.delays.storage_s += waited_s

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return str(self._files[shard])

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""
        return self._files[shard]

    def _read_all(self, reads: Reads) -> tuple[int, float]:
        """Read from as many shards at a time as this thread may have open; see `FileStorage`."""
        is_touched = np.zeros(len(self.shards), np.bool_)
        is_touched[reads.shard] = True
        touched = np.flatnonzero(is_touched)
        num_at_once = max(1, self._open.max_open // self._workers.num_threads)
        waited_s = 0.0
        try:
            if len(touched) <= num_at_once:
                return len(reads), self._read_shards(reads, touched.tolist())
            for begin in range(0, len(touched), num_at_once):
                shards = touched[begin : begin + num_at_once]
                waited_s += self._read_shards(reads.of_shards(shards), shards.tolist())
        except MountIsSlow:
            if not self._is_slow:
                raise _unreadable(self.shards[int(reads.shard[0])].name) from None
            return 0, waited_s
        return len(reads), waited_s

    def _read_range(self, shard: int, start: int, stop: int) -> bytes:
        """Read a range, with one call where nothing is wrong; see `FileStorage`."""
        with self._making_unmapped:
            unmapped = self._unmapped = self._unmapped or self._make_unmapped()
        opened = unmapped.get(shard)
        trusted = opened.trusted  # another thread may change it at any time
        try:
            data = _pread(opened.descriptor, opened.mount.latency, start, stop)
        except OSError as error:
            if error.errno in TRANSIENT:
                unmapped.drop(opened, shard)
                raise
            raise file_error(opened.listed.name, error) from error
        if trusted is not None and opened.stamp == trusted:
            if len(data) == stop - start:
                return data
            raise _unreadable(opened.listed.name)

        def read_moved(moved: OpenShard) -> bool:
            nonlocal data
            data = _pread(moved.descriptor, moved.mount.latency, start, stop)
            return len(data) == stop - start

        opened.trusted = None
        bounds = np.array([start]), np.array([stop])
        self._read_compared(shard, *bounds, unmapped, read_moved)
        return data

    def _read_shards(self, reads: Reads, shards: Sequence[int]) -> float:
        """Copy, then check that the files have not changed.

        The check comes last because a page beyond a file's new end reads as zeros.
        """
        opened = self._open.get_all(shards)
        # Another thread may begin to trust a shard at any time.
        trusted = {shard: its.trusted for shard, its in opened.items()}
        doubtful = [shard for shard, stamp in trusted.items() if stamp is None]
        waited_s = 0.0
        if not doubtful:
            failed, waited_s = self._copy_trusted(reads, opened)
            doubtful = [shard for shard, its in opened.items() if its.stamp != trusted[shard]]
            if not doubtful and failed is None:
                return waited_s
            for shard in doubtful or shards:
                opened[shard].is_sound = False
            if not doubtful:
                raise _unreadable(self.shards[int(reads.shard[failed])].name)
            for shard in doubtful:
                opened[shard].trusted = None
        for shard in doubtful:
            its = reads.of_shards(np.array([shard]))

            def copy(moved: OpenShard, its: Reads = its, shard: int = shard) -> bool:
                return self._copy(its, {shard: moved}) is None

            self._read_compared(shard, its.start, its.start + its.size, self._open, copy)
        others = [shard for shard in shards if shard not in doubtful]
        if others:
            waited_s += self._read_shards(reads.of_shards(np.array(others)), others)
        return waited_s

    def _copy_trusted(
        self, reads: Reads, opened: Mapping[int, OpenShard]
    ) -> tuple[int | None, float]:
        """Copy; returns the first read that failed, and for how long the disk was waited for."""
        began = time.monotonic()
        with self._ahead.around(reads, opened) as is_cold:
            # Cold files are read by a thread: a copy worker would wait instead of copying.
            num_waits = None if is_cold else self._copy_by_worker(reads, opened)
            failed = self._copy(reads, opened) if num_waits is None else None
        return failed, time.monotonic() - began if is_cold or num_waits else 0.0

    def _read_compared(
        self,
        shard: int,
        start: npt.NDArray[np.int64],
        stop: npt.NDArray[np.int64],
        open_shards: OpenShards,
        read: Callable[[OpenShard], bool],
    ) -> None:
        """Read from a shard whose times moved, and compare it with its checksums.

        The shard's stamp is compared before and after, so that no write goes unnoticed.

        Args:
            shard: its number.
            start: int64 [n], where ranges begin.
            stop: int64 [n], where they end.
            open_shards: opens it.
            read: reads the ranges, and returns whether they are whole.
        """
        for _ in range(_MAX_LOOKS):
            opened = open_shards.get_moved(shard)
            stamp = opened.stamp
            stamp.settle()
            try:
                is_read = read(opened)
                is_whole = self._checksums.compare(shard, opened.descriptor, stamp, start, stop)
            except OSError as error:
                raise file_error(opened.listed.name, error) from error
            if is_read and opened.is_at_its_path and opened.stamp == stamp:
                if is_whole:
                    opened.trusted, opened.is_sound = stamp, True
                return
        raise _restless(self.shards[shard].name)

    def _copy_by_worker(self, reads: Reads, opened: Mapping[int, OpenShard]) -> int | None:
        """Let a copy worker copy where that is faster.

        After a failure the files are unsound, so that no second worker dies of them.

        Returns:
            How often it waited for the disk; None if it did not copy.
        """
        arena = reads.arena
        if arena is None or reads.memory or not all(shard.is_sound for shard in opened.values()):
            return None
        mean_bytes = reads.num_bytes / len(reads)
        is_small = mean_bytes < _MIN_COPIED_BYTES
        if mean_bytes >= _MAX_COPIED_BYTES or (is_small and len(opened) > 1):
            return None
        ranges = _ranges(reads, arena, opened)
        if is_small and not ranges.are_alike:
            return None
        return self._copy_workers.copy(arena.key, opened.values(), ranges)

    def _copy(self, reads: Reads, opened: Mapping[int, OpenShard]) -> int | None:
        """Copy in this thread; returns the index of the first read that failed, if any."""
        if not self._may_gather:
            descriptors = [opened[shard].descriptor for shard in reads.shard.tolist()]
            return read_each(descriptors, reads.start, reads.size, reads.target)
        base = np.zeros(max(opened) + 1, np.uint64)
        base[list(opened)] = [shard.address for shard in opened.values()]
        return gather(base[reads.shard] + reads.start.astype(np.uint64), reads.size, reads.target)


def _pread(descriptor: int, latency: Latency, start: int, stop: int) -> bytes:
    """The bytes of a range, or those before the end of the file."""
    began_s = time.perf_counter()
    data = os.pread(descriptor, stop - start, start)
    latency.add_since(began_s)
    while len(data) < stop - start:
        more = os.pread(descriptor, stop - start - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _ranges(reads: Reads, arena: WritableArena, opened: Mapping[int, OpenShard]) -> Ranges:
    """The reads as copy workers take them."""
    if len(opened) == 1:
        file = np.array([shard.key for shard in opened.values()], np.int64)
    else:
        keys = np.zeros(max(opened) + 1, np.int64)
        keys[list(opened)] = [shard.key for shard in opened.values()]
        file = keys[reads.shard]
    size = reads.size[:1] if (reads.size == reads.size[0]).all() else reads.size
    return Ranges(file, reads.start, size, reads.target.view(np.int64) - arena.address)


def _restless(name: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"shard {name} is being changed while it is read; it is served again once its bytes are "
        "what was listed",
        {"shard": name},
    )


def _unreadable(name: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"shard {name} has not changed and yet cannot be read: its disk or file system fails; see "
        "the system's log",
        {"shard": name},
    )


# The cost of opening a file, in bytes that could be copied meanwhile. It weighs jobs that share the
# threads, and decides when work is split: a job has a fixed cost of about a millisecond.
_OPENING_BYTES = 64 << 10

# How long a thread lets others go first that seem to read from the page cache. Each of them takes
# some milliseconds for a batch; where a file system does not say that it waits, this is lost.
_TURN_S = 0.1
# Files measured in each job: more cost time in every job, fewer notice later that the
# mount is slow. While files take long, all are measured.
_NUM_MEASURED = 4


_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]


class SingleFiles(FileStorage):
    """A storage whose shards are the files of a table; see [Note: Samples that are files]."""

    def __init__(
        self,
        root: Root,
        table: FileTable,
        workers: FairExecutor,
        metrics: Metrics,
        slow: SlowMounts | None = None,
    ) -> None:
        """Open no file yet; see `FileStorage`.

        Args:
            root: the files lie beneath it.
            table: of local files.
            workers: threads that read.
            metrics: counts the reads.
            slow: see `FileStorage`.
        """
        assert table.stamps is not None
        super().__init__(FileShards(table), workers, metrics, slow)
        self._root = root
        self._shared_root = SharedRoot(root)  # an eighth less processor time for each read
        self._table = table
        self._stamps = table.stamps
        self._latency = MOUNTS.at(root.folder).latency
        self._turn = threading.Lock()
        self._from_page_cache = True  # where the last reads came from

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; each part of the plan is worked out in the thread that reads it."""
        await self._run(plan, plan.num_bytes + _OPENING_BYTES * len(plan))

    def path(self, shard: int) -> str:
        """See `Storage.path`."""
        return str(self._root.folder / self._table.name(shard))

    def local_file(self, shard: int) -> LocalFile | None:
        """See `Storage.local_file`."""
        return LocalFile(self._root, self._table.name(shard))

    def _read_all(self, reads: Reads) -> tuple[int, float]:
        """Read, then check that each file is as it was listed; see `FileStorage`.

        The check comes last, so that a write while a file is read does not go unnoticed.
        """
        latency, num_to_measure, num_read = self._latency, _NUM_MEASURED, 0
        names, which, number = self._table.names, reads.shard, -1
        listed = np.column_stack((self._table.sizes[which], self._stamps[which]))
        columns = which, listed, reads.start, reads.size, reads.target
        rows = zip(*(column.tolist() for column in columns), strict=True)
        try:
            with self._taking_turns(), self._root.held() as open_beneath:
                for number, stamp, start, size, target in rows:
                    descriptor = open_beneath(names[number], READ_FLAGS)
                    try:
                        began_s = time.perf_counter()
                        count = _pread_to(descriptor, target, size, start)
                        if num_to_measure > 0:
                            num_to_measure -= not latency.add_since(began_s)
                        now = os.stat(descriptor)  # noqa: PTH116  # `Path` takes no descriptor
                    finally:
                        os.close(descriptor)
                    if count != size or stamp != [now.st_size, now.st_mtime_ns, now.st_ctime_ns]:
                        raise self._difference(number, now)
                    num_read += 1
                    if latency.is_slow and self._is_slow:
                        break
        except OSError as error:
            name = self._table.name(number) if number >= 0 else str(self._root.folder)
            raise file_error(name, error) from error
        return num_read, 0.0  # how long it waited for the disk is not known

    def _read_range(self, shard: int, start: int, stop: int) -> bytes:
        """Read a range of one file, with one call where nothing is wrong; see `FileStorage`."""
        table = self._table
        stamp = [int(table.sizes[shard]), *self._stamps[shard].tolist()]
        try:
            try:
                data, now = self._read_file(self._shared_root, shard, start, stop)
            except FileNotFoundError:  # maybe in the folder of a second ago alone
                data, now = self._read_file(self._root, shard, start, stop)
            is_whole = len(data) == stop - start
            if not is_whole or stamp != [now.st_size, now.st_mtime_ns, now.st_ctime_ns]:
                raise self._difference(shard, now)
        except OSError as error:
            if error.errno in TRANSIENT:
                raise
            is_odd = error.errno in (errno.ESPIPE, errno.EISDIR)
            raise file_error(table.name(shard), NotRegular() if is_odd else error) from error
        return data

    def _read_file(
        self, root: Root | SharedRoot, shard: int, start: int, stop: int
    ) -> tuple[bytes, os.stat_result]:
        """The bytes of a range, and the file as it is afterwards."""
        with root.held() as open_beneath:
            descriptor = open_beneath(self._table.names[shard], READ_FLAGS)
            try:
                data = _pread(descriptor, self._latency, start, stop)
                return data, os.stat(descriptor)  # noqa: PTH116  # `Path` takes no descriptor
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
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
        return _unreadable(name)


def _pread_to(descriptor: int, address: int, size: int, start: int) -> int:
    """Read a range into memory; returns how many bytes came, or -1."""
    count: int = _libc.pread(descriptor, address, size, start)
    while 0 < count < size:
        more = _libc.pread(descriptor, address + count, size - count, start + count)
        if more <= 0:
            break
        count += more
    return count


def _blocks_from_disk() -> int:
    """How many blocks this thread has had read from disks."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


class ReadAhead:
    """Announces the reads of one dataset. Used from threads that may wait."""

    def __init__(self, shards: Sequence[Shard], *, measures: bool = False) -> None:
        """Choose how much is read around a sample.

        In a dataset that does not fit into memory, the bytes around a sample would be evicted
        before they are used.

        Args:
            shards: of the dataset.
            measures: whether a slow mount may be read in another way.
        """
        self._measures = measures
        self.grain_bytes = _WHOLE_GRAIN_BYTES if fits_into_memory(shards) else mmap.PAGESIZE

    @contextlib.contextmanager
    def around(self, reads: Reads, opened: Mapping[int, OpenShard]) -> Iterator[bool]:
        """Announce reads; the caller copies them inside the context.

        Yields:
            Whether some of them are not in memory.

        Raises:
            MountIsSlow: one of the mounts of the shards.
        """
        is_cold = self.announce(reads, opened) > 0
        latency = next(iter(opened.values())).mount.latency
        with latency.cold_job() if is_cold else contextlib.nullcontext():
            yield is_cold

    def announce(self, reads: Reads, opened: Mapping[int, OpenShard]) -> int:
        """Have the kernel begin to read the pages not in memory.

        Args:
            reads: not empty, of opened shards.
            opened: by shard number.

        Returns:
            The number of announced ranges; 0 if everything that was looked up is in memory.

        Raises:
            MountIsSlow: see `around`.
        """
        probes = iter(_probes(reads))
        cold = next(
            (probe for probe in probes if not _is_resident(opened[probe[0]], probe[1])), None
        )
        if cold is None:
            return 0
        if self._measures and _are_slow([cold, *probes], opened):
            raise MountIsSlow
        ranges = blocks(reads.shard, reads.start, reads.start + reads.size, self.grain_bytes)
        with contextlib.suppress(OSError):  # without the advice, the copy waits
            for shard, start, stop in zip(*(column.tolist() for column in ranges), strict=True):
                descriptor = opened[shard].descriptor
                os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
        return len(ranges[0])


def fits_into_memory(shards: Sequence[Shard]) -> bool:
    """Whether a dataset takes at most half of the machine's memory as page cache."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return sum(shard.size_bytes for shard in shards) <= memory_bytes // 2


def blocks(
    shard: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    grain_bytes: int,
) -> _Ranges:
    """The fewest ranges of whole blocks that cover n non-empty ranges `[start, stop)`.

    Returns:
        shard, start, stop: int64 [m], sorted. Ranges of one shard neither overlap nor touch. Starts
            and stops are multiples of `grain_bytes`, so a stop may lie beyond its shard's end.
    """
    known, place = np.unique(shard, return_inverse=True)
    begin = start // grain_bytes
    end = -(-stop // grain_bytes)
    stride = int(end.max()) + 1  # lays the shards one after the other, with a gap between them
    begin, end = begin + place * stride, end + place * stride
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.concatenate(([True], begin[1:] > reach[:-1])))
    last = np.append(first[1:], len(begin)) - 1
    of = begin[first] // stride
    starts, stops = begin[first] - of * stride, reach[last] - of * stride
    return known[of], starts * grain_bytes, stops * grain_bytes


def _probes(reads: Reads) -> list[tuple[int, int]]:
    """Shard and start of a few reads, spread over the job."""
    which = slice(None, None, -(-len(reads) // _NUM_PROBES))
    return list(zip(reads.shard[which].tolist(), reads.start[which].tolist(), strict=True))


def _are_slow(probes: Sequence[tuple[int, int]], opened: Mapping[int, OpenShard]) -> bool:
    """Whether the mount of some reads is slow; measures the first, and the others if it is late."""
    for shard, start in probes:
        file = opened[shard]
        if file.mount.latency.num_cold_jobs:
            return False
        began_s = time.perf_counter()
        with contextlib.suppress(OSError):  # the copy finds the error
            os.pread(file.descriptor, 1, start)
        is_late = file.mount.latency.add_since(began_s)
        if file.mount.latency.is_slow or not is_late:
            return file.mount.latency.is_slow
    return False


def _is_resident(shard: OpenShard, offset: int) -> bool:
    """Whether a byte of a shard can be read without a disk.

    The kernel reports every page of another user's file as resident, so a read that refuses to wait
    follows there. That read alone would not do: it starts readahead, and a disk that answers
    quickly would look like memory. It also releases the interpreter's lock, which a busy event loop
    gives back late.
    """
    if not is_mapped_in_memory(shard.address + offset):
        return False
    if shard.is_own:
        return True
    try:
        return os.preadv(shard.descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # the file system has no such reads
        return True


def is_mapped_in_memory(address: int) -> bool:
    """Whether the page at an address of a mapped file is in memory.

    True for every page of a file that this process neither owns nor may write.
    """
    resident = ctypes.create_string_buffer(1)
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    return _mincore(page, 1, resident) != 0 or bool(resident.raw[0] & 1)
