"""Local files: no task and no object per sample. A batch's reads are copied out of mapped files in a few thread jobs."""

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import aiofiles
import numpy as np

from gyre_daemon.errors import GyreError, InvalidRequest, NotAllowed, ShardMissing, StorageUnavailable
from gyre_daemon.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.storage.base import Bounds, Reads, Shard, changed
from gyre_daemon.storage.gather import gather, is_allowed, memory_at

_STREAM_CHUNK_BYTES = 8 << 20
_MIN_JOB_BYTES = 4 << 20  # less is not worth a second thread


@dataclass(slots=True)
class _OpenShard:
    """A shard that is open and mapped, for as long as its storage lives.

    A file that is replaced or deleted underneath goes on to be read as it was indexed; one that is written to or truncated no
    longer has the version it was listed with.
    """

    descriptor: int
    mapping: mmap.mmap
    address: int

    def __del__(self) -> None:
        """Close the file; the mapping goes with its last reference."""
        os.close(self.descriptor)


class LocalStorage:
    """Shards in the local file system."""

    reads_in_bulk = True

    def __init__(
        self, paths: Sequence[Path], shards: Sequence[Shard], executor: Executor, num_threads: int, metrics: Metrics
    ) -> None:
        self.shards = shards
        self._paths = paths
        self._bounds = Bounds(shards)
        self._executor = executor
        self._num_threads = num_threads
        self._metrics = metrics
        self._open_shards: dict[int, _OpenShard] = {}
        self._copies = is_allowed()

    async def read(self, reads: Reads) -> None:
        """See `Storage.read`."""
        self._bounds.check(reads)
        reads = reads.nonempty()
        num_jobs = min(self._num_threads, 1 + int(reads.size.sum()) // _MIN_JOB_BYTES, len(reads))
        if num_jobs == 0:
            return
        if num_jobs == 1:
            await self._run(reads)
            return
        length = -(-len(reads) // num_jobs)
        async with asyncio.TaskGroup() as group:
            for begin in range(0, len(reads), length):
                group.create_task(self._run(reads.part(slice(begin, begin + length))))

    async def stream(self, shard: int) -> AsyncIterator[bytes]:
        """See `Storage.stream`."""
        listed, num_bytes = self.shards[shard], 0
        try:
            async with aiofiles.open(self._paths[shard], "rb", executor=self._executor) as file:
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

    async def _run(self, reads: Reads) -> None:
        outcome: Outcome = "error"
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._read_all, reads)
            outcome = "ok"
        finally:
            self._metrics.count_requests(RequestLabels("file", "read", outcome), len(reads), int(reads.size.sum()))

    def _read_all(self, reads: Reads) -> None:
        """Copy, then look whether the files are still what they were: a page cut off in its middle reads as zeros."""
        touched = np.unique(reads.shard).tolist()
        for shard in touched:
            if shard not in self._open_shards:
                self._open_shards.setdefault(shard, self._open(shard))
        failed = self._copy(reads, touched)
        for shard in touched:
            self._check_unchanged(shard, self._open_shards[shard].descriptor)
        if failed is not None:
            raise changed(self.shards[int(reads.shard[failed])].name)

    def _copy(self, reads: Reads, touched: Sequence[int]) -> int | None:
        if not self._copies:
            return self._copy_one_by_one(reads)
        base = np.zeros(touched[-1] + 1, np.uint64)
        base[touched] = [self._open_shards[shard].address for shard in touched]
        return gather(base[reads.shard] + reads.start.astype(np.uint64), reads.size, reads.target)

    def _copy_one_by_one(self, reads: Reads) -> int | None:
        """The same by one `preadv` a sample, where `gather` is not allowed."""
        for index, (shard, start, size, target) in enumerate(
            zip(reads.shard.tolist(), reads.start.tolist(), reads.size.tolist(), reads.target.tolist(), strict=True)
        ):
            memory = memory_at(target, size)
            done = 0
            while done < size and (count := os.preadv(self._open_shards[shard].descriptor, [memory[done:]], start + done)):
                done += count
            if done < size:
                return index
        return None

    def _open(self, shard: int) -> _OpenShard:
        name = self.shards[shard].name
        try:
            descriptor = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        except OSError as error:
            raise file_error(name, error) from error
        try:
            self._check_unchanged(shard, descriptor)
            mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            os.close(descriptor)
            raise file_error(name, error) from error
        except GyreError:
            os.close(descriptor)
            raise
        return _OpenShard(descriptor, mapping, np.frombuffer(mapping, np.uint8).ctypes.data)

    def _check_unchanged(self, shard: int, descriptor: int) -> None:
        listed = self.shards[shard]
        try:
            stat = os.fstat(descriptor)
        except OSError as error:
            raise file_error(listed.name, error) from error
        if (stat.st_size, str(stat.st_mtime_ns)) != (listed.size_bytes, listed.version):
            raise changed(listed.name)


def list_files(path: Path, pattern: str) -> list[Path]:
    """The regular files that a path, a folder or a glob stands for, sorted by name.

    Args:
        path: as written by the operator; symbolic links are followed.
        pattern: which files count in a folder, such as `*.tar`.

    Raises:
        ShardMissing: there is none.
        NotAllowed: it is neither a regular file nor a folder, or the daemon may not look.
        InvalidRequest: no glob can be written so.
        StorageUnavailable: the file system fails.
    """
    try:
        files = [file for file in _matches(path, pattern) if file.is_file()]
        exists = bool(files) or path.exists()
    except OSError as error:
        raise file_error(str(path), error) from error
    except ValueError as error:
        raise InvalidRequest(f"{path} is no glob: {error}") from error
    if files:
        return files
    if exists and not path.is_dir():
        raise NotAllowed(f"{path} is neither a regular file nor a folder", {"path": path})
    raise ShardMissing(f"no shard at {path}: check the dataset's URI and that it matches {pattern}", {"path": path})


def _matches(path: Path, pattern: str) -> list[Path]:
    """In the order in which object storages list: by the whole path as text."""
    if path.is_dir():
        return sorted(path.glob(pattern), key=str)
    if path.exists() or not any(letter in str(path) for letter in "*?["):
        return [path]
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))), key=str)


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
