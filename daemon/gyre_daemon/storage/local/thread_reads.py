"""Runs the parts of a read plan in threads, and counts what they read.

While the mount is fast, a thread reads a whole part. A part that finds out that the mount is slow
leaves the rest to a thread for each read, behind the request engine. So these have what requests to
object storage have: a limit of how many are in flight, the fair queue of all jobs, deadlines,
hedges, and shared reads of what several jobs want. A thread that waits for the kernel cannot be
stopped: a read whose hedge was faster gives its turn back and keeps its thread, so there are twice
as many threads as turns. A hedge helps where the file system asks its server again; where the
kernel keeps the pages locked, it waits for the first read.

Each thread of a slow mount reads into memory of its own, not into the slot: one that never returns
would keep the slot for ever.
"""

import asyncio
import errno
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gyre_daemon.errors import GyreError
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.threads import DaemonThreads, FairExecutor
from gyre_daemon.storage.base import ArenaClosed, ReadPlan, Reads, ShardBounds
from gyre_daemon.storage.engine.endpoint import Endpoint
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.mounts import Mount
from gyre_daemon.storage.response import Response
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.source import LoopThreads, OnResponse, SentRequest

# Work for less than this is not split among threads: copying it takes 4 ms, and a second job costs
# about one. Larger jobs leave threads idle while a batch is awaited.
_MIN_JOB_BYTES = 16 << 20

# Reads in this thread; returns how many reads it did, the first ones, and for how many seconds it
# waited for the disk. It does not do all only if the mount is slow.
ReadAll = Callable[[Reads], tuple[int, float]]

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


class ThreadReads:
    """The reads of one local storage."""

    def __init__(
        self,
        shards: Sequence[Shard],
        workers: FairExecutor,
        metrics: Metrics,
        read_all: ReadAll,
        read_range: ReadRange,
        slow: SlowReads | None,
    ) -> None:
        """Nothing is read yet.

        Args:
            shards: as listed; no read may leave them.
            workers: threads that read.
            metrics: counts the reads.
            read_all: reads a part of a plan in one thread.
            read_range: reads one range, while the mount is slow.
            slow: reads while the mount is slow; None where it is never slow.
        """
        self._shards = shards
        self._bounds = ShardBounds(shards)
        self._workers = workers
        self._metrics = metrics
        self._read_all = read_all
        self._read_range = read_range
        self._slow = slow

    @property
    def is_slow(self) -> bool:
        """Whether each read has a thread."""
        return self._slow is not None and self._slow.is_slow

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

    async def run(self, plan: ReadPlan, cost: int) -> float:
        """Work out each part of a plan in the thread that reads it.

        Returns:
            The longest time that a thread waited for the disk, in seconds.
        """
        if self.is_slow:
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
        """Read a part; returns what is left of it, and the time that the disk was waited for."""
        with plan.lease():
            reads = plan.part(part)
            self._bounds.check(reads)
            reads = reads.nonempty()
            if not len(reads):
                return None, 0.0
            if self.is_slow:
                return reads, 0.0
            worked_out.append(reads)
            num_read, waited_s = self._read_all(reads)
            if num_read == len(reads):
                return None, waited_s
            worked_out[:] = [reads.part(slice(num_read))]
            return reads.part(slice(num_read, None)), waited_s

    async def _read_slowly(self, plan: ReadPlan) -> None:
        assert self._slow
        await self._slow.read(plan, self._shards, self._read_range)


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
