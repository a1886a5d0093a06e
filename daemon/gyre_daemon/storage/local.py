"""Local files: no task per sample. The reads of a batch are grouped by file into a few thread jobs of `preadv`."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import aiofiles

from gyre_daemon.errors import CorruptSample, GyreError, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.storage.base import Read, Shard

_STREAM_CHUNK_BYTES = 8 << 20
_MAX_OPEN_FILES = 1024
_MIN_JOB_READS = 16  # a thread hop costs about as much as so many small reads


class LocalStorage:
    """Shards in the local file system.

    Files stay open from their first read on, up to a limit, so a file that is replaced or deleted underneath goes on to be
    read as it was indexed.
    """

    def __init__(
        self, paths: Sequence[Path], shards: Sequence[Shard], executor: Executor, num_threads: int, metrics: Metrics
    ) -> None:
        self.shards = shards
        self._paths = paths
        self._executor = executor
        self._num_threads = num_threads
        self._metrics = metrics
        self._descriptors: dict[int, int] = {}

    async def read(self, reads: Sequence[Read], arrived: Callable[[Sequence[int]], None]) -> None:
        """See `Storage.read`; the reads of one file stay in one job, in the order of their offsets."""
        async with asyncio.TaskGroup() as group:
            for job in _jobs(reads, self._num_threads):
                group.create_task(self._run(reads, job, arrived))

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        try:
            async with aiofiles.open(self._paths[shard], "rb", executor=self._executor) as file:
                while chunk := await file.read(_STREAM_CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise file_error(self.shards[shard].name, error) from error

    def local_path(self, shard: int) -> Path | None:
        """See `Storage.local_path`."""
        return self._paths[shard]

    async def close(self) -> None:
        """Close the files; no read may be under way."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    async def _run(self, reads: Sequence[Read], job: Sequence[int], arrived: Callable[[Sequence[int]], None]) -> None:
        num_bytes = sum(reads[index].num_bytes for index in job)
        outcome: Outcome = "error"
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._read_all, [reads[index] for index in job])
            outcome = "ok"
        finally:
            self._metrics.count_requests(RequestLabels("file", "read", outcome), len(job), num_bytes)
        arrived(job)

    def _read_all(self, reads: Iterable[Read]) -> None:
        for read in reads:
            shard = self.shards[read.shard]
            try:
                num_bytes = self._read_one(read)
            except OSError as error:
                raise file_error(shard.name, error) from error
            if num_bytes != read.num_bytes:
                raise truncated(shard.name, read, num_bytes)

    def _read_one(self, read: Read) -> int:
        descriptor = self._descriptors.get(read.shard)
        if descriptor is not None:
            return _preadv(descriptor, read)
        descriptor = self._open(read.shard)
        if len(self._descriptors) < _MAX_OPEN_FILES:
            kept = self._descriptors.setdefault(read.shard, descriptor)  # atomic: another thread may have opened it too
            if kept == descriptor:
                return _preadv(descriptor, read)
        try:
            return _preadv(descriptor, read)
        finally:
            os.close(descriptor)

    def _open(self, index: int) -> int:
        descriptor = os.open(self._paths[index], os.O_RDONLY | os.O_CLOEXEC)
        shard, stat = self.shards[index], os.fstat(descriptor)
        if (stat.st_size, str(stat.st_mtime_ns)) == (shard.size_bytes, shard.version):
            return descriptor
        os.close(descriptor)
        raise CorruptSample(
            f"shard {shard.name} has changed since the dataset was opened; restore it, or open the dataset anew",
            {"shard": shard.name},
        )


def list_files(path: Path, pattern: str) -> list[Path]:
    """The regular files that a path, a folder or a glob stands for, sorted by name.

    Args:
        path: as written by the operator; symbolic links are followed.
        pattern: which files count in a folder, such as `*.tar`.

    Raises:
        ShardMissing: there is none.
        NotAllowed: it is neither a regular file nor a folder.
    """
    if any(letter in str(path) for letter in "*?["):
        anchor = Path(path.anchor or ".")
        found = sorted(anchor.glob(str(path.relative_to(path.anchor) if path.anchor else path)))
    elif path.is_dir():
        found = sorted(path.glob(pattern))
    else:
        if path.exists() and not path.is_file():
            raise NotAllowed(f"{path} is neither a regular file nor a folder", {"path": path})
        found = [path]
    files = [file for file in found if file.is_file()]
    if not files:
        raise ShardMissing(f"no shard at {path}: check the dataset's URI and that it matches {pattern}", {"path": path})
    return files


def stat_shard(path: Path, name: str) -> Shard:
    """Size and version of a local file.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be looked at.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise file_error(name, error) from error
    return Shard(name, stat.st_size, str(stat.st_mtime_ns))


def file_error(name: str, error: OSError) -> GyreError:
    """What an operating system's error about a shard means."""
    facts = {"shard": name}
    if isinstance(error, FileNotFoundError):
        return ShardMissing(f"shard {name} does not exist; restore it or correct the dataset's URI", facts)
    if isinstance(error, PermissionError):
        return NotAllowed(f"the daemon may not read shard {name}; grant its user read access", facts)
    return StorageUnavailable(f"shard {name} cannot be read: {error.strerror or error}", facts)


def truncated(name: str, read: Read, num_bytes: int) -> CorruptSample:
    """The error for a read that ran past the end of a shard."""
    wanted = f"[{read.start}, {read.start + read.num_bytes})"
    return CorruptSample(
        f"shard {name} is shorter than its index says: bytes {wanted} were asked for and {num_bytes} came; restore the shard, "
        "or index the dataset again",
        {"shard": name, "offset": read.start, "reason": "truncated"},
    )


def _preadv(descriptor: int, read: Read) -> int:
    """Fill the targets; the number of bytes read, less than wanted only at the end of the file."""
    targets, done = list(read.targets), 0
    while targets:
        count = os.preadv(descriptor, targets, read.start + done)
        if count == 0:
            break
        done += count
        while targets and count >= targets[0].nbytes:
            count -= targets.pop(0).nbytes
        if count:
            targets[0] = targets[0][count:]
    return done


def _jobs(reads: Sequence[Read], max_jobs: int) -> list[list[int]]:
    """Indices of the reads sorted by shard and offset, cut into at most `max_jobs` runs of similar length."""
    order = sorted(range(len(reads)), key=lambda index: (reads[index].shard, reads[index].start))
    length = max(_MIN_JOB_READS, -(-len(order) // max_jobs))
    return [order[begin : begin + length] for begin in range(0, len(order), length)]
