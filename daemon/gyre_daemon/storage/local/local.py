"""Local files: no task and no object per sample. A batch's reads are copied out of mapped files in a few thread jobs."""

import asyncio
import errno
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import aiofiles
import numpy as np

from gyre_daemon.copiers import NO_COPIERS, Copiers, Ranges
from gyre_daemon.errors import GyreError, InvalidRequest, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.fair import FairExecutor, Flow
from gyre_daemon.storage.base import Bounds, Reads, Region
from gyre_daemon.storage.local.checksums import ShardChecksums
from gyre_daemon.storage.local.gather import gather, is_allowed, memory_at
from gyre_daemon.storage.local.openfiles import OpenFiles, OpenShard, OpenShards, file_error
from gyre_daemon.storage.local.readahead import ReadAhead, Wait, fits_into_memory
from gyre_daemon.storage.local.stamps import Stamp
from gyre_daemon.storage.patterns import patterns_of
from gyre_daemon.storage.shard import Shard, changed
from gyre_daemon.storage.splits import check_one_set, check_subfolders

Lease = Callable[[], AbstractContextManager[None]]

_STREAM_CHUNK_BYTES = 8 << 20
_MIN_COPIED_BYTES = 32 << 10  # mean of what differs in size: a copier takes a call for each, the kernel a thousandth
_MAX_COPIED_BYTES = 1 << 20  # mean of all: beyond it the memory is the limit either way, and the kernel is here already
_MAX_LOOKS = 3  # at a shard that is being written to
_MIN_JOB_BYTES = 16 << 20  # less is not worth a second thread: it takes 4 ms


class LocalStorage:
    """Shards in the local file system.

    Attributes:
        checksums: of the shards, as far as they were taken.
    """

    reads_in_bulk = True

    def __init__(
        self,
        paths: Sequence[Path],
        shards: Sequence[Shard],
        workers: FairExecutor,
        metrics: Metrics,
        copiers: Copiers = NO_COPIERS,
        open_files: OpenFiles | None = None,
        owner: object = None,
    ) -> None:
        """Open no file yet.

        Args:
            paths: of the shards.
            shards: as listed.
            workers: threads that read.
            metrics: count the reads.
            copiers: may copy for the threads.
            open_files: shares open files among the daemon's datasets; None where there is one.
            owner: keeps the files for as long as the storage refers to it; None where nobody does.
        """
        self.shards = shards
        self._owner = owner
        self._paths = paths
        self._bounds = Bounds(shards)
        self._workers = workers
        self._metrics = metrics
        self._open = OpenShards(paths, shards, copiers, open_files)
        self.checksums = ShardChecksums(shards)
        self._copiers = copiers
        self._ahead = ReadAhead(shards)
        self._copies = is_allowed()

    async def read(self, reads: Reads) -> None:
        """See `Storage.read`."""
        num_bytes = int(reads.size.sum())
        cuts = self.cuts(len(reads), num_bytes)
        parts = [partial(reads.part, slice(*cut)) for cut in itertools.pairwise(cuts)]
        await self.read_made(parts, reads.flow, num_bytes, reads.urgency, reads.lease)

    def cuts(self, num_reads: int, num_bytes: int) -> list[int]:
        """Where so many reads are best cut into jobs for several threads: from 0 to the end.

        They are left in one where threads have other things to do: a job costs a millisecond or so beside what it copies.
        """
        most = self._workers.num_threads if self._workers.is_idle else 1
        num_jobs = max(1, min(most, 1 + num_bytes // _MIN_JOB_BYTES, num_reads))
        return [num_reads * job // num_jobs for job in range(num_jobs + 1)]

    async def read_made(
        self, makes: Sequence[Callable[[], Reads]], flow: Flow, num_bytes: int, urgency: int, lease: Lease
    ) -> float:
        """Do reads that are worked out in the threads that do them: the event loop has other things to do.

        Args:
            makes: each gives some of the reads, from which `flow` and `urgency` need not tell anything.
            flow: see `Reads`.
            num_bytes: about how much it is.
            urgency: see `Reads`.
            lease: of the memory that all of them write to; each thread holds one.

        Returns:
            For how many seconds a thread waited for the disk; 0.0 where all was in memory.
        """
        cost = num_bytes / len(makes)
        if len(makes) == 1:
            return await self._run(makes[0], flow, cost, urgency, lease)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(make, flow, cost, urgency, lease)) for make in makes]
        return max(each.result() for each in running)

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        listed, num_bytes = self.shards[shard], 0
        try:
            async with aiofiles.open(self._paths[shard], "rb", executor=self._workers.executor) as file:
                while chunk := await file.read(_STREAM_CHUNK_BYTES):
                    num_bytes += len(chunk)
                    yield chunk
        except OSError as error:
            raise file_error(listed.name, error) from error
        if num_bytes != listed.size_bytes:
            raise changed(listed.name)

    def local_path(self, shard: int) -> Path | None:
        """See `Storage.local_path`."""
        return self._paths[shard]

    @property
    def is_idle(self) -> bool:
        """No job of any dataset is being read or waits for it."""
        return self._workers.is_idle

    @property
    def fits_into_memory(self) -> bool:
        """Whether all of it may stay in the page cache."""
        return fits_into_memory(self.shards)

    def path(self, shard: int) -> Path:
        """Where the shard lies."""
        return self._paths[shard]

    async def _run(self, make: Callable[[], Reads], flow: Flow, cost: float, urgency: int, lease: Lease) -> float:
        outcome: Outcome = "error"
        made: list[tuple[int, int]] = []  # reads and bytes, once they are known
        try:
            waited_s = await self._workers.run(flow, cost, urgency, partial(self._make_and_read, make, made, lease))
            outcome = "ok"
            return waited_s
        finally:
            for num_reads, num_bytes in made:
                self._metrics.count_requests(RequestLabels("file", "read", outcome), num_reads, num_bytes)

    def _make_and_read(self, make: Callable[[], Reads], made: list[tuple[int, int]], lease: Lease) -> float:
        with lease():
            reads = make()
            self._bounds.check(reads)
            reads = reads.nonempty()
            if not len(reads):
                return 0.0
            made.append((len(reads), int(reads.size.sum())))
            return self._read_all(reads)

    def _read_all(self, reads: Reads) -> float:
        """Gives for how many seconds the disk was waited for."""
        is_touched = np.zeros(len(self.shards), np.bool_)
        is_touched[reads.shard] = True
        touched = np.flatnonzero(is_touched)
        limit, waited_s = max(1, self._open.max_open // self._workers.num_threads), 0.0  # others read at the same time
        for begin in range(0, len(touched), limit):
            group = touched[begin : begin + limit]
            waited_s += self._read_group(reads if len(touched) <= limit else reads.of_shards(group), group.tolist())
        return waited_s

    def _read_group(self, reads: Reads, touched: Sequence[int]) -> float:
        """Copy, then look whether the files are still what they were: a page cut off in its middle reads as zeros."""
        opened = {shard: self._open.get(shard) for shard in touched}
        trusted = {shard: its.trusted for shard, its in opened.items()}  # another thread may trust it anew meanwhile
        doubtful = [shard for shard, stamp in trusted.items() if stamp is None]
        waited_s = 0.0
        if not doubtful:
            began = time.monotonic()
            with self._ahead.around(reads, opened) as wait:  # in a thread: copiers have work that can be done at once
                failed = None if not wait.is_sure and self._have_copied(reads, opened, wait) else self._copy(reads, opened)
            waited_s = time.monotonic() - began if wait.was_seen else 0.0
            doubtful = [shard for shard, its in opened.items() if its.stamp != trusted[shard]]
            if not doubtful and failed is None:
                return waited_s
            for shard in doubtful or touched:
                opened[shard].is_sound = False
            if not doubtful:
                raise _unreadable(self.shards[int(reads.shard[failed])].name)
            for shard in doubtful:
                opened[shard].trusted = None
        return waited_s + self._read_doubtful(reads, doubtful, [shard for shard in touched if shard not in doubtful])

    def _read_doubtful(self, reads: Reads, doubtful: Sequence[int], others: Sequence[int]) -> float:
        """See `checksums`: the bytes of some shards must be compared, those of the others can be read at once."""
        for shard in doubtful:
            self._read_compared(reads.of_shards(np.array([shard])), shard)
        return self._read_group(reads.of_shards(np.array(others)), others) if others else 0.0

    def _read_compared(self, reads: Reads, shard: int) -> None:
        """Copy from a shard whose times moved, and compare what was copied; nobody writes to it meanwhile."""
        for _ in range(_MAX_LOOKS):
            opened = self._open.get_moved(shard)
            stamp = opened.stamp
            stamp.settle()
            is_copied = self._copy(reads, {shard: opened}) is None
            try:
                is_whole = self.checksums.compare(shard, opened.descriptor, stamp, reads.start, reads.start + reads.size)
            except OSError as error:
                raise file_error(opened.listed.name, error) from error
            if is_copied and opened.is_at_its_path and opened.stamp == stamp:
                if is_whole:
                    opened.trusted, opened.is_sound = stamp, True
                return
        raise _restless(self.shards[shard].name)

    def _have_copied(self, reads: Reads, opened: Mapping[int, OpenShard], wait: Wait) -> bool:
        """Whether copiers did it, where they are faster; no second one dies of the same file."""
        if reads.arena is None or not reads.are_in_arena or not all(shard.is_sound for shard in opened.values()):
            return False
        mean_bytes = int(reads.size.sum()) / len(reads)
        if mean_bytes >= _MAX_COPIED_BYTES or (mean_bytes < _MIN_COPIED_BYTES and len(opened) > 1):
            return False
        ranges = _ranges(reads, reads.arena, opened)
        if mean_bytes < _MIN_COPIED_BYTES and not ranges.are_alike:
            return False
        num_waits = self._copiers.copy(reads.arena.key, opened.values(), ranges)
        wait.was_seen |= bool(num_waits)
        return num_waits is not None

    def _copy(self, reads: Reads, opened: Mapping[int, OpenShard]) -> int | None:
        """The index of the first read that failed, if any."""
        if not self._copies:
            return _copy_one_by_one(reads, opened)
        base = np.zeros(max(opened) + 1, np.uint64)
        base[list(opened)] = [shard.address for shard in opened.values()]
        return gather(base[reads.shard] + reads.start.astype(np.uint64), reads.size, reads.target)


def _ranges(reads: Reads, arena: Region, opened: Mapping[int, OpenShard]) -> Ranges:
    """The reads as copiers take them."""
    if len(opened) == 1:
        file = np.array([shard.key for shard in opened.values()], np.int64)
    else:
        keys = np.zeros(max(opened) + 1, np.int64)
        keys[list(opened)] = [shard.key for shard in opened.values()]
        file = keys[reads.shard]
    size = reads.size[:1] if (reads.size == reads.size[0]).all() else reads.size
    return Ranges(file, reads.start, size, reads.target.view(np.int64) - arena.address)


def _copy_one_by_one(reads: Reads, opened: Mapping[int, OpenShard]) -> int | None:
    """The same by one `preadv` a sample, where `gather` is not allowed."""
    for index, (shard, start, size, target) in enumerate(
        zip(reads.shard.tolist(), reads.start.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True)
    ):
        memory = memory_at(target, size)
        done = 0
        try:
            while done < size and (count := os.preadv(opened[shard].descriptor, [memory[done:]], start + done)):
                done += count
        except OSError:
            return index
        if done < size:
            return index
    return None


def _restless(name: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"shard {name} is being changed while it is read; it is served again once it is what it was", {"shard": name}
    )


def _unreadable(name: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"shard {name} is what it was and yet cannot be read: its disk or file system fails; see the system's log",
        {"shard": name},
    )


def list_files(path: Path, pattern: str) -> list[Path]:
    """The regular files that a path, a folder or a glob stands for, sorted by name.

    Args:
        path: as written by the operator; symbolic links are followed.
        pattern: which files count in a folder, such as `*.tar`.

    Raises:
        ShardMissing: there is none.
        NotAllowed: it is neither a regular file nor a folder, or the daemon may not look.
        InvalidRequest: no glob can be written so, or a folder's files are several sets.
        StorageUnavailable: the file system fails.
    """
    try:
        files = [file for file in _matches(path, pattern) if file.is_file()]
        exists = bool(files) or path.exists()
        if path.is_dir():
            _check_folder(path, files, pattern)
    except OSError as error:
        raise file_error(str(path), error) from error
    except GyreError:
        raise
    except ValueError as error:
        raise InvalidRequest(f"{path} is no glob: {error}") from error
    if files:
        return files
    if exists and not path.is_dir():
        raise NotAllowed(f"{path} is neither a regular file nor a folder", {"path": path})
    raise ShardMissing(f"no shard at {path}: check the dataset's URI and that it matches {pattern}", {"path": path})


def _check_folder(path: Path, files: Sequence[Path], pattern: str) -> None:
    """Whoever names a folder means all its files; see `splits`."""
    check_one_set(str(path), [file.name for file in files], pattern)
    if not files:
        check_subfolders(str(path), [entry.name for entry in path.iterdir() if entry.is_dir()], pattern)


def _matches(path: Path, pattern: str) -> list[Path]:
    """In the order in which object storages list: by the whole path as text."""
    if path.is_dir():
        return sorted({file for each in patterns_of(pattern) for file in path.glob(each)}, key=str)
    if path.exists() or not any(letter in str(path) for letter in "*?["):
        return [path]
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))), key=str)


def stat_shard(path: Path, name: str) -> Shard:
    """Size and version of a local file.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be looked at, or not be read.
    """
    try:
        stamp = Stamp.of(path)
        if not os.access(path, os.R_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise file_error(name, error) from error
    return Shard(name, stamp.size_bytes, stamp.version)


def check_listed(path: Path, listed: Shard) -> None:
    """See that a local file is still what was listed.

    Raises:
        CorruptSample: it is not.
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be looked at.
    """
    if stat_shard(path, listed.name) != listed:
        raise changed(listed.name)
