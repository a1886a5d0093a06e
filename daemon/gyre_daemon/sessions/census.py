"""Counts a daemon through: what its metrics say is taken from what it holds, at the moment somebody asks."""

from dataclasses import asdict

from gyre_daemon import __version__
from gyre_daemon.monitoring.exposition import Census, JobNow
from gyre_daemon.order.quality import ShuffleQuality, average
from gyre_daemon.runtime.lag import LoopLag
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.table import SessionTable


def take_census(sessions: SessionTable, loop_lag: LoopLag) -> Census:
    """The daemon now."""
    environment = sessions.environment
    metrics = environment.metrics
    by_job = list(sessions.by_job())
    jobs: dict[str, JobNow] = {}
    qualities: dict[str, list[ShuffleQuality]] = {}
    for job, session in by_job:
        jobs[job] = jobs.get(job, JobNow()) + _now(session)
        if quality := session.shuffle.quality:
            qualities.setdefault(job, []).append(quality)
    return Census(
        version=__version__,
        is_draining=sessions.draining,
        memory_budget_bytes=environment.budget.limit_bytes,
        memory_reserved_bytes=environment.budget.reserved_bytes,
        memory_abandoned_bytes=environment.budget.abandoned_bytes,
        num_batches_sent=metrics.num_batches_sent,
        num_bytes_sent=metrics.num_bytes_sent,
        storage=metrics.storage,
        cache=metrics.cache,
        totals=metrics.jobs.totals((job, session.totals) for job, session in by_job),
        jobs=jobs,
        qualities={job: asdict(average(each)) for job, each in qualities.items()},
        loop_lag=loop_lag,
    )


def _now(session: Session) -> JobNow:
    return JobNow(
        num_sessions=1,
        num_ready=session.view.num_ready,
        num_held=session.num_held,
        window_size=session.window_size,
        memory_bytes=session.memory_bytes,
        memory_limit_bytes=session.share.reserved_bytes,
    )
