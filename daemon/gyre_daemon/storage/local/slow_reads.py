"""Reads of local files whose mount is slow: one thread for each, behind the request engine.

So they have what requests to object storage have: a limit of how many are in flight, the fair queue
of all jobs, deadlines, hedges, and shared reads of what several jobs want. A thread that waits for
the kernel cannot be stopped: a read whose hedge was faster gives its turn back and keeps its
thread, so there are twice as many threads as turns. A hedge helps where the file system asks its
server again; where the kernel keeps the pages locked, it waits for the first read.

Each thread reads into memory of its own, not into the slot: one that never returns would keep the
slot for ever.
"""

import errno
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gyre_daemon.errors import GyreError
from gyre_daemon.runtime.threads import DaemonThreads
from gyre_daemon.storage.base import ReadPlan
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.mounts import Mount
from gyre_daemon.storage.response import Response
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.source import LoopThreads, OnResponse, SentRequest

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
