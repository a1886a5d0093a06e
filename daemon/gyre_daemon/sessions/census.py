"""Takes the census of a daemon: what its status and its metrics say at the moment of asking."""

from dataclasses import asdict

from gyre_daemon import __version__
from gyre_daemon.monitoring.exposition import Census
from gyre_daemon.monitoring.jobs import SessionGauges
from gyre_daemon.order.quality import ShuffleQuality, average
from gyre_daemon.runtime.lag import LoopLag
from gyre_daemon.sessions.table import SessionTable


def take_census(sessions: SessionTable, loop_lag: LoopLag | None = None) -> Census:
    """The state of a daemon now."""
    budget, metrics = sessions.resources.budget, sessions.resources.metrics
    by_job = list(sessions.by_job())
    jobs: dict[str, SessionGauges] = {}
    qualities: dict[str, list[ShuffleQuality]] = {}
    for job, session in by_job:
        jobs[job] = jobs.get(job, SessionGauges()) + session.gauges
        if quality := session.shuffle.quality:
            qualities.setdefault(job, []).append(quality)
    return Census(
        version=__version__,
        is_draining=sessions.draining,
        memory_budget_bytes=budget.limit_bytes,
        memory_reserved_bytes=budget.reserved_bytes,
        memory_abandoned_bytes=budget.abandoned_bytes,
        num_batches_sent=metrics.num_batches_sent,
        num_bytes_sent=metrics.num_bytes_sent,
        storage=metrics.storage,
        cache=metrics.cache,
        totals=metrics.jobs.totals((job, session.totals) for job, session in by_job),
        jobs=jobs,
        qualities={job: asdict(average(each)) for job, each in qualities.items()},
        loop_lag=loop_lag or LoopLag(),
    )
