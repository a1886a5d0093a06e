"""Memory that the daemon shares with one process that decodes; used again for the next one."""

import asyncio
import fcntl
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.runtime.threads import Claims, FairQueue

_PAGE_BYTES = mmap.PAGESIZE
# Files are as large as powers of two from here on, so that one serves chunks of similar sizes.
_MIN_FILE_BYTES = 1 << 20
# Unused files that are kept. More would take memory that nothing counts; with fewer, the kernel
# clears fresh pages for every chunk.
_MAX_KEPT_BYTES = 64 << 20


def pages(num_bytes: int) -> int:
    """This many bytes in whole pages."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Exchange:
    """A memory file that nobody can resize, mapped by the daemon.

    Attributes:
        num_bytes: its size.
        file: the open file.
        memory: uint8 [num_bytes]; another process may write to it at any time.
    """

    def __init__(self, num_bytes: int) -> None:
        """Make a file.

        Raises:
            Overloaded: the machine has no such memory.
        """
        self.num_bytes = num_bytes
        try:
            descriptor = os.memfd_create("gyre-decode", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self.file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
            os.ftruncate(descriptor, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            mapping = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise Overloaded(
                f"there is no memory for {num_bytes} bytes that are being decoded: {error.strerror}"
            ) from error
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Give up the file; its memory goes with the last array that refers to it."""
        self.file.close()
        self.memory = np.empty(0, np.uint8)


class ExchangeRoom:
    """Files for chunks being decoded, within bounds; a larger chunk has its turn alone."""

    def __init__(self, max_bytes: int) -> None:
        """Use no memory yet.

        Args:
            max_bytes: of all files that are held at once. They are not part of any budget.
        """
        self._max_bytes = max_bytes
        self._max_files = descriptor_shares().exchanges
        self._unused: list[Exchange] = []
        self._used_bytes = 0
        self._num_used = 0
        self._line = FairQueue(1)  # those that wait for memory
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, num_bytes: int, claims: Claims) -> AsyncIterator[Exchange]:
        """A file of at least this size, inside the context.

        Raises:
            Overloaded: the machine has no such memory.
        """
        async with self._line.turn_of(claims, num_bytes):
            while self._num_used and (
                self._used_bytes + num_bytes > self._max_bytes or self._num_used >= self._max_files
            ):
                self._freed.clear()
                await self._freed.wait()
            self._used_bytes += num_bytes
            self._num_used += 1
        exchange = None
        try:
            exchange = self._take(num_bytes)
            yield exchange
            self._give_back(exchange)
        except BaseException:
            # A storage or a process may still write to it: nobody else must get it.
            if exchange:
                exchange.close()
            raise
        finally:
            self._used_bytes -= num_bytes
            self._num_used -= 1
            self._freed.set()

    def close(self) -> None:
        """Give back the files that are not held."""
        while self._unused:
            self._unused.pop().close()

    def _take(self, num_bytes: int) -> Exchange:
        """A file of at least this size, which counts as used already."""
        size = max(_MIN_FILE_BYTES, 1 << (num_bytes - 1).bit_length())
        for place, exchange in enumerate(self._unused):
            if exchange.num_bytes == size:
                return self._unused.pop(place)
        while self._unused and self._num_used + len(self._unused) > self._max_files:
            self._unused.pop(0).close()
        return Exchange(size)

    def _give_back(self, exchange: Exchange) -> None:
        """Keep a file for later, or close it."""
        kept_bytes = sum(each.num_bytes for each in self._unused)
        if kept_bytes + exchange.num_bytes > _MAX_KEPT_BYTES:
            exchange.close()
        else:
            self._unused.append(exchange)
