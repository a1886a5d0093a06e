"""The memory that a new session may reserve, within the budget and the limits of user and job.

A user may take a fraction of the memory that other users do not have (`limits.user.memory`), so a
user who comes later still finds some. All jobs of a user share that fraction.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from gyre_daemon.memory.budget import Allowance, Budget
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.shared_stream import DaemonResources


class Taken:
    """The memory that each user and each job has.

    Attributes:
        by_user: reserved by the user's sessions, and kept of arenas already closed.
        by_job: reserved by the sessions of a user's job.
    """

    def __init__(self, sessions: Collection[Session], budget: Budget) -> None:
        self.by_user = budget.abandoned_by.copy()
        self.by_job: Counter[tuple[str, str]] = Counter()
        for session in sessions:
            self.add(session, session.reserved_bytes)

    def add(self, session: Session, num_bytes: int) -> None:
        """Count bytes of a session; negative where it gave some back."""
        user = session.request.owner.name
        self.by_user[user] += num_bytes
        self.by_job[user, session.request.reader.job] += num_bytes


def allowances(
    request: SessionRequest, taken: Taken, resources: DaemonResources
) -> Iterator[Allowance]:
    """The bytes that the new session's user and job may still reserve, where they have limits."""
    limits, limit_bytes = resources.limits, resources.budget.limit_bytes
    user, job = request.owner.name, request.reader.job
    if of_user := limits.of_user(user):
        others_bytes = taken.by_user.total() - taken.by_user[user]
        yield Allowance(
            user,
            "limits.user.memory",
            taken.by_user[user],
            int(of_user.memory * (limit_bytes - others_bytes)),
            int(of_user.memory * limit_bytes),
        )
    if of_job := limits.of_job:
        most_bytes = int(of_job.memory * limit_bytes)
        yield Allowance(
            f"job {job!r} of {user}",
            "limits.job.memory",
            taken.by_job[user, job],
            most_bytes,
            most_bytes,
        )


def free_bytes(request: SessionRequest, taken: Taken, resources: DaemonResources) -> int:
    """How many bytes the new session may reserve now."""
    allowed = (each.free_bytes for each in allowances(request, taken, resources))
    return min([resources.budget.free_bytes, *allowed])
