"""Takes the census of a daemon: the figures of its status and its metrics at one moment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from gyre_daemon import __version__
from gyre_daemon.monitoring.exposition import Census
from gyre_daemon.monitoring.jobs import OTHERS, JobKey, SessionGauges, SessionTotals
from gyre_daemon.order.quality import ShuffleQuality, average
from gyre_daemon.runtime.lag import LoopLag
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.table import SessionTable

# Limits on the spreads of balanced batches in one status: some tenths of a second of a thread.
_MAX_SPREAD_SAMPLES, _MAX_SPREADS = 1 << 14, 64


def take_census(
    sessions: SessionTable, loop_lag: LoopLag | None = None, *, with_names: bool = True
) -> Census:
    """The state of a daemon now.

    Args:
        sessions: the open ones.
        loop_lag: of the event loop.
        with_names: whether jobs are told apart; otherwise all count as `OTHERS`.
    """
    budget = sessions.resources.budget
    by_job = [(job if with_names else OTHERS, session) for job, session in sessions.by_job()]
    totals = _totals(sessions, with_names=with_names)
    jobs = dict.fromkeys(totals, SessionGauges())  # without a session, zeros
    qualities: dict[JobKey, list[ShuffleQuality]] = {}
    for job, session in by_job:
        jobs[job] += session.gauges
        if quality := session.shuffle.quality:
            qualities.setdefault(job, []).append(quality)
    return Census(
        version=__version__,
        counts=sessions.resources.metrics,
        is_draining=sessions.draining,
        memory_budget_bytes=budget.limit_bytes,
        memory_reserved_bytes=budget.reserved_bytes,
        memory_abandoned_bytes=budget.abandoned_bytes,
        num_sessions=len(by_job),
        totals=totals,
        jobs=jobs,
        qualities={
            (*job, of): value
            for job, each in qualities.items()
            for of, value in asdict(average(each)).items()
        },
        loop_lag=loop_lag or LoopLag(),
    )


def _totals(sessions: SessionTable, *, with_names: bool) -> Mapping[JobKey, SessionTotals]:
    live = ((job, session.totals) for job, session in sessions.by_job())
    totals = sessions.resources.metrics.jobs.totals(live)
    if with_names or not totals:
        return totals
    return {OTHERS: sum(totals.values(), start=SessionTotals())}


async def spreads_of(
    sessions: Sequence[Session], table: SessionTable, user: str
) -> list[float | None]:
    """By how much the most expensive rank exceeded the mean in the last step of each session.

    Args:
        sessions: of any jobs; all ranks of a job have the same.
        table: of all sessions.
        user: the user who asks.

    Returns:
        None where nothing is balanced, or batches are too large to look at for a status.
    """
    asked: dict[object, Callable[[], float | None]] = {}
    keys: list[object] = []
    for session in sessions:
        its, step = session.request, session.next_step
        size, world_size = its.order.global_batch_size, its.reader.world_size
        job = its.owner.name, its.reader.fence, its.dataset.fingerprint
        key = *job, its.order, its.balance, world_size, step
        keys.append(key)
        is_asked = its.balance and step and size <= _MAX_SPREAD_SAMPLES
        if is_asked and len(asked) < _MAX_SPREADS:
            asked.setdefault(key, partial(session.planner.spread, step - 1, world_size))
    if not asked:
        return [None] * len(keys)
    found = await table.compute(user, lambda: {key: work() for key, work in asked.items()})
    return [found.get(key) for key in keys]
