"""Local datasets of which each sample is a file: opened, read and closed.

Nothing stays open between samples, so that millions of files take no descriptors. Nothing is
mapped, because a mapping costs more than reading a file that is wanted whole. One thread goes
through the files of a batch while their mount is fast, and each file has one while it is slow.
"""

import ctypes
import errno
import os
import resource
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gyre_daemon.errors import GyreError, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.base import ReadPlan, Reads, Storage
from gyre_daemon.storage.beneath import (
    READ_FLAGS,
    LocalFile,
    NotRegular,
    Root,
    file_error,
)
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.open_shards import unknown
from gyre_daemon.storage.shard import FileShards, FileTable, Shard, changed
from gyre_daemon.storage.sources.local import TRANSIENT, SlowReads, ThreadReads

# The cost of opening a file, in bytes that could be copied meanwhile. It weighs jobs that share the
# threads, and decides when work is split: a job has a fixed cost of about a millisecond.
_OPENING_BYTES = 64 << 10

# How long a thread lets others go first that seem to read from the page cache. Each of them takes
# some milliseconds for a batch; where a file system does not say that it waits, this is lost.
_TURN_S = 0.1
# Files of each job that are measured: more cost time in every job, fewer notice later that the
# mount is slow. While files take long, all are measured.
_NUM_MEASURED = 4


_libc = ctypes.CDLL(None, use_errno=True)
_libc.pread.restype = ctypes.c_ssize_t
_libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]


class SingleFiles(Storage):
    """A storage whose shards are the files of a table; each read is of one file.

    Attributes:
        shards: as listed.
    """

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
        self._turn = threading.Lock()
        self._from_page_cache = True  # where the last reads came from

    @property
    def is_node_local(self) -> bool:
        """See `Storage.is_node_local`."""
        return not self._reads.is_slow

    async def read(self, plan: ReadPlan) -> None:
        """See `Storage.read`; each part of the plan is worked out in the thread that reads it."""
        await self._reads.run(plan, plan.num_bytes + _OPENING_BYTES * len(plan))

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
            with self._root.held() as open_beneath:
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


def _blocks_from_disk() -> int:
    """How many blocks this thread has had read from disks."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
