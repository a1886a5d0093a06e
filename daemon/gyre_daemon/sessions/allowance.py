"""How much memory a newcomer may reserve: what the budget has, and what its user and job may take.

A user may take a fraction of what other users do not have (`limits.user.memory`). So nobody takes
everything, and a user who comes later finds memory. All jobs of a user share that.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from gyre_daemon.memory.budget import Allowance, Budget
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.shared_stream import DaemonResources


def allowances(
    request: SessionRequest, sessions: Collection[Session], resources: DaemonResources
) -> Iterator[Allowance]:
    """What the newcomer's user and job may still reserve, as far as they are limited."""
    budget, limits = resources.budget, resources.limits
    user, job = request.owner.name, request.reader.job
    if of_user := limits.of_user(user):
        taken = taken_by_user(sessions, budget)
        others_bytes = taken.total() - taken[user]
        yield Allowance(
            user,
            "limits.user.memory",
            taken[user],
            int(of_user.memory * (budget.limit_bytes - others_bytes)),
            int(of_user.memory * budget.limit_bytes),
        )
    if of_job := limits.of_job:
        limit_bytes = int(of_job.memory * budget.limit_bytes)
        taken_bytes = sum(
            session.share.reserved_bytes
            for session in sessions
            if (session.request.owner.name, session.request.reader.job) == (user, job)
        )
        yield Allowance(
            f"job {job!r} of {user}", "limits.job.memory", taken_bytes, limit_bytes, limit_bytes
        )


def free_bytes(
    request: SessionRequest, sessions: Collection[Session], resources: DaemonResources
) -> int:
    """How many bytes the newcomer may reserve now."""
    allowed = (each.free_bytes for each in allowances(request, sessions, resources))
    return min(resources.budget.free_bytes, *allowed, resources.budget.limit_bytes)


def taken_by_user(sessions: Collection[Session], budget: Budget) -> Counter[str]:
    """The bytes that each user's sessions have reserved, and those that the user may keep."""
    taken = budget.abandoned_by.copy()
    for session in sessions:
        taken[session.request.owner.name] += session.share.reserved_bytes
    return taken
