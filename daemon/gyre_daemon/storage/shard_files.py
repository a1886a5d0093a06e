"""Shards as files for threads, whole or by position, and a few byte ranges of shards."""

import asyncio
import contextlib
import errno
import io
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import BinaryIO, cast

import numpy as np

from gyre_daemon.errors import first_error
from gyre_daemon.storage.base import Reads, Storage
from gyre_daemon.storage.beneath import LocalFile, file_error
from gyre_daemon.storage.listing import check_listed
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.shard import PositionedFile


class StorageFile(PositionedFile):
    """The only shard of a storage as a file for another thread; each read asks for a range."""

    def __init__(self, storage: Storage, loop: asyncio.AbstractEventLoop) -> None:
        """At the beginning of the shard.

        Args:
            storage: of one shard.
            loop: the event loop that it is used from.
        """
        super().__init__(storage.shards[0].size_bytes)
        self._storage = storage
        self._loop = loop

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read a range into the buffer.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
        """
        start, stop = self._position, min(self._position + len(buffer), self._num_bytes)
        if start >= stop:
            return 0
        piece = np.frombuffer(buffer, np.uint8)[: stop - start]
        reading = self._storage.read(Reads.into([piece], [0], [start]))
        try:
            asyncio.run_coroutine_threadsafe(reading, self._loop).result()
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        self._position = stop
        return stop - start


class _StreamFile(io.RawIOBase):
    """A stream of the event loop as a file that another thread reads once."""

    def __init__(self, chunks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._chunks = chunks
        self._loop = loop
        self._rest = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(
                asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()
            )
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._position += count
        return count

    async def _next(self) -> bytes:
        return await anext(self._chunks, b"")


class _StoppableFile(io.RawIOBase):
    """A file that cannot be read any more once an event is set."""

    def __init__(self, file: BinaryIO, stopped: threading.Event) -> None:
        self._file = file
        self._stopped = stopped

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._stopped.is_set():
            raise InterruptedError(errno.ECANCELED, "no caller waits for it any more")
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def until(file: BinaryIO, stopped: threading.Event) -> BinaryIO:
    """The same file for one pass, which fails with an OSError once the event is set."""
    return cast("BinaryIO", _StoppableFile(file, stopped))


@contextlib.contextmanager
def open_file(file: LocalFile, name: str) -> Iterator[BinaryIO]:
    """A local file; errors say that it is the shard `name`.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    try:
        with os.fdopen(file.open(), "rb") as opened:
            yield opened
    except OSError as error:
        raise file_error(name, error) from error


@contextlib.asynccontextmanager
async def opened_file(file: LocalFile, name: str) -> AsyncIterator[int]:
    """The descriptor of a local file; see `open_file`. Waits in threads of its mount."""
    try:
        mount = await MOUNTS.of(file.root.folder)
        async with mount.opened(file.open) as descriptor:
            yield descriptor
    except OSError as error:
        raise file_error(name, error) from error


@contextlib.contextmanager
def open_shard(storage: Storage, shard: int, loop: asyncio.AbstractEventLoop) -> Iterator[BinaryIO]:
    """A shard as a file for one pass, in a thread that may wait.

    Args:
        storage: has the shard.
        shard: its number.
        loop: the event loop that the storage's streams belong to.

    Raises:
        CorruptSample: a local shard changed between its listing and the end of its read.
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    listed, local = storage.shards[shard], storage.local_file(shard)
    if local is None:
        yield cast("BinaryIO", _StreamFile(storage.stream(shard), loop))
        return
    with open_file(local, listed.name) as file:
        yield file
    check_listed(local, listed)


async def read_ranges(
    storage: Storage, shards: Sequence[int], starts: Sequence[int], stops: Sequence[int]
) -> list[bytes]:
    """The n byte ranges `[start, stop)`, all read at once.

    Raises:
        ShardMissing, NotAllowed, StorageUnavailable: a range cannot be read.
    """
    pieces = [np.empty(stop - start, np.uint8) for start, stop in zip(starts, stops, strict=True)]
    try:
        if pieces:
            await storage.read(Reads.into(pieces, shards, starts))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [piece.tobytes() for piece in pieces]
