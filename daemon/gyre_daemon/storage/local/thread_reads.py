"""Runs the parts of a read plan in threads, and counts what they read."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.storage.base import ArenaClosed, ReadPlan, Reads, ShardBounds
from gyre_daemon.storage.shard import Shard

# Work for less than this is not split among threads: copying it takes 4 ms, and a second job costs
# about one. Larger jobs leave threads idle while a batch is awaited.
_MIN_JOB_BYTES = 16 << 20


class ThreadReads:
    """The reads of one local storage."""

    def __init__(self, shards: Sequence[Shard], workers: FairExecutor, metrics: Metrics) -> None:
        """Nothing is read yet.

        Args:
            shards: as listed; no read may leave them.
            workers: threads that read.
            metrics: counts the reads.
        """
        self._bounds = ShardBounds(shards)
        self._workers = workers
        self._metrics = metrics

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

    async def run(self, plan: ReadPlan, cost: int, read_all: Callable[[Reads], float]) -> float:
        """Work out each part of a plan in the thread that reads it, by `read_all`.

        Returns:
            The longest time that a thread waited for the disk, in seconds, as `read_all` says.
        """
        cuts = self.cuts(len(plan), cost)
        share = cost / (len(cuts) - 1)
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._run_part(plan, slice(*cut), share, read_all))
                for cut in itertools.pairwise(cuts)
            ]
        return max(each.result() for each in running)

    async def _run_part(
        self, plan: ReadPlan, part: slice, cost: float, read_all: Callable[[Reads], float]
    ) -> float:
        outcome: Outcome = "error"
        worked_out: list[Reads] = []
        work = partial(self._read_part, plan, part, worked_out, read_all)
        try:
            waited_s = await self._workers.run(plan.flow, cost, plan.urgency, work)
            outcome = "ok"
            return waited_s
        except (asyncio.CancelledError, ArenaClosed):  # the session ended
            outcome = "abandoned"
            raise
        finally:
            labels = RequestLabels("file", "read", outcome)
            for reads in worked_out:
                self._metrics.count_requests(labels, len(reads), reads.num_bytes)

    def _read_part(
        self,
        plan: ReadPlan,
        part: slice,
        worked_out: list[Reads],
        read_all: Callable[[Reads], float],
    ) -> float:
        with plan.lease():
            reads = plan.part(part)
            self._bounds.check(reads)
            reads = reads.nonempty()
            if not len(reads):
                return 0.0
            worked_out.append(reads)
            return read_all(reads)
