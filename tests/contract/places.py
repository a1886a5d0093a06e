"""Where contract tests put shards, and memory to read them into."""

import asyncio
import itertools
import os
import threading
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
import numpy.typing as npt
from fsspec import register_implementation
from gyre_daemon.errors import first_error
from gyre_daemon.storage.reads import Reads
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.conftest import S3Server
from tests.contract.storage.objects import ObjectServer

Result = TypeVar("Result")
Bytes = npt.NDArray[np.uint8]

GUARD = 0xA5
unique = itertools.count()


class Place:
    """Where the shards of a test lie.

    Attributes:
        root: a URI; shards lie below it.
        settings: for the driver.
    """

    root: str
    settings: Mapping[str, Any] = {}

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Store a shard."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove one."""


class LocalPlace(Place):
    def __init__(self, folder: Path) -> None:
        self.root, self._folder = str(folder), folder

    def put(self, name: str, data: bytes) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink()


class S3Place(Place):
    def __init__(self, server: S3Server) -> None:
        self._server, self._bucket = server, f"storage-{os.getpid()}-{next(unique)}"
        self.root, self.settings = f"s3://{self._bucket}/data", server.storage_settings
        server.make_bucket(self._bucket)

    def put(self, name: str, data: bytes) -> None:
        self._server.put(self._bucket, f"data/{name}", data)

    def delete(self, name: str) -> None:
        self._server.delete(self._bucket, f"data/{name}")


class MemoryPlace(Place):
    """fsspec's synchronous driver for tests, which stands for all synchronous drivers.

    It has another scheme here: no daemon reads `memory://`.
    """

    def __init__(self) -> None:
        self._folder = f"/storage-{next(unique)}/data"
        self.root = f"shelf:/{self._folder}"
        register_implementation(
            "shelf", "fsspec.implementations.memory.MemoryFileSystem", clobber=True
        )
        self._filesystem = fsspec.filesystem("memory")

    def put(self, name: str, data: bytes) -> None:
        self._filesystem.pipe_file(f"{self._folder}/{name}", data)

    def delete(self, name: str) -> None:
        self._filesystem.rm_file(f"{self._folder}/{name}")


class HttpPlace(Place):
    def __init__(self, server: ObjectServer) -> None:
        self._server, self._folder = server, f"/storage-{next(unique)}/data"
        self.root = server.url + self._folder

    def put(self, name: str, data: bytes) -> None:
        self._server.objects[f"{self._folder}/{name}"] = data

    def delete(self, name: str) -> None:
        del self._server.objects[f"{self._folder}/{name}"]


@dataclass
class FailingDisk:
    """A file system on a loop device; it fails once its image is truncated."""

    folder: Path
    image: Path

    def evict(self, name: str) -> None:
        """Write a file out and drop it from memory."""
        with (self.folder / name).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def fail(self) -> None:
        os.truncate(self.image, 1 << 20)


class Targets:
    """Memory for reads; each piece lies between guards that must not be written."""

    def __init__(self) -> None:
        self._reads: list[tuple[int, int, int, int]] = []  # shard, start, size, sample
        self._memory: list[Bytes] = []

    def add(self, shard: int, start: int, size: int, sample: int | None = None) -> "Targets":
        self._reads.append((shard, start, size, len(self._reads) if sample is None else sample))
        self._memory.append(np.full(size + 32, GUARD, np.uint8))
        return self

    def reads(self) -> Reads:
        shard, start, size, sample = (
            np.array(column, np.int64) for column in zip(*self._reads, strict=True)
        )
        target = np.array([memory.ctypes.data + 16 for memory in self._memory], np.uint64)
        return Reads(shard, start, size, target, sample, tuple(self._memory))

    def check(self, shards: list[bytes]) -> None:
        """Check that every target has its shard's bytes, and that nothing else was written."""
        for (shard, start, size, _), memory in zip(self._reads, self._memory, strict=True):
            assert memory[16 : 16 + size].tobytes() == shards[shard][start : start + size]
            assert (memory[:16] == GUARD).all()
            assert (memory[16 + size :] == GUARD).all()


def take_checksums(storage: Any) -> None:
    """Take the checksums of all shards, as `gyre index --checksums` does."""
    for shard in range(len(storage.shards)):
        assert storage.checksums.take(shard, threading.Event()) is not None


openers: list[StorageOpener] = []


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run on a new event loop, and close everything afterwards."""

    async def whole() -> Result:
        try:
            return await work
        finally:
            for opener in openers:
                opener.close()
            await asyncio.sleep(0.01)

    return asyncio.run(whole())


async def first_of(work: Coroutine[Any, Any, Result]) -> Result:
    """Raise the first error of a group."""
    try:
        return await work
    except ExceptionGroup as errors:
        raise first_error(errors) from errors


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)
