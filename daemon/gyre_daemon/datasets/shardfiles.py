"""Shards as files that a thread reads from their beginning to their end, wherever they lie."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

from gyre_daemon.datasets.formats import Format
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.unpacked import UnpackedDataset
from gyre_daemon.storage.local.local import check_listed
from gyre_daemon.storage.local.openfiles import file_error
from gyre_daemon.storage.shard import Shard


class StreamFile(io.RawIOBase):
    """A stream of the event loop as a file that a scanning thread reads from its beginning to its end."""

    def __init__(self, chunks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._chunks = chunks
        self._loop = loop
        self._rest = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """How many bytes were read."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """The next bytes, as many as are there; 0 at the end."""
        if not self._rest:
            self._rest = memoryview(asyncio.run_coroutine_threadsafe(self._next(), self._loop).result())
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        self._position += count
        return count

    async def _next(self) -> bytes:
        return await anext(self._chunks, b"")


def scan_file(dataset_format: Format, name: str, path: Path) -> Arrays:
    """The index of a shard that is a file of this machine.

    Raises:
        CorruptSample: see `Format.scan`.
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return dataset_format.scan(name, file)
    except OSError as error:
        raise file_error(name, error) from error


def scan_listed(dataset_format: Format, listed: Shard, path: Path) -> Arrays:
    """As `scan_file`, of a shard that is what was listed, up to the end of its scan."""
    scan = scan_file(dataset_format, listed.name, path)
    check_listed(path, listed)
    return scan


def unpack_file(unpacked: UnpackedDataset, listed: Shard, path: Path) -> Path:
    """Where a shard lies that is compressed on this machine's disk, once it is unpacked.

    Raises:
        CorruptSample: it is damaged, or no longer what was listed.
        Overloaded: there is no room.
        ShardMissing, NotAllowed, StorageUnavailable: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = unpacked.unpack(listed, file)
    except OSError as error:
        raise file_error(listed.name, error) from error
    check_listed(path, listed)
    return found
