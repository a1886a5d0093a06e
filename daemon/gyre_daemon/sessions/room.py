"""Makes room for one more session: the others give up some of their memory.

The budget is divided among the users in equal parts, and the part of each user among its sessions.
A new session that would find less than half of that makes others halve their shares until there is
enough: the largest session of the user who has most, again and again. A user who has no more than
its part gives nothing to another. No session goes below a few batches, and no batch is lost: memory
is given back as batches are released. The new session waits for that, for some seconds at most, and
takes the memory there is.
"""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Collection

from gyre_daemon.sessions.allowance import Taken, free_bytes
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.shared_stream import DaemonResources

_MAX_WAIT_S = 3.0  # longer, and a job starts late; shorter, and it starts with less memory


async def make_room(
    request: SessionRequest, sessions: Collection[Session], resources: DaemonResources
) -> None:
    """Free memory for a session with this request, as far as it can be had now.

    Args:
        request: that of the new session.
        sessions: the open ones.
        resources: the daemon's.
    """
    room = _Room(request, sessions, resources)
    wanted_bytes = request.wanted_share(resources.arena_limit_bytes).reserved_bytes
    if wanted_bytes <= room.free_bytes // 2:
        return
    await resources.registry.settle()
    kept_bytes = resources.budget.abandoned_bytes  # when that comes back is unknown
    fair_bytes = room.fair_bytes
    if 2 * room.found_bytes < fair_bytes:
        room.halve_the_largest(fair_bytes)
        await room.wait_for(fair_bytes, kept_bytes)


class _Room:
    """The memory that one new session finds, and the memory that the others can give it."""

    def __init__(
        self, request: SessionRequest, sessions: Collection[Session], resources: DaemonResources
    ) -> None:
        self._request = request
        self._sessions = sessions
        self._resources = resources
        self._budget = resources.budget
        self._user = request.owner.name

    @property
    def free_bytes(self) -> int:
        """How many bytes the new session may reserve now."""
        return free_bytes(self._request, Taken(self._sessions, self._budget), self._resources)

    @property
    def found_bytes(self) -> int:
        """Bytes the new session would reserve now, 0 if they do not fit."""
        free_bytes = self.free_bytes
        share = self._request.scarce_share(self._resources.arena_limit_bytes, free_bytes)
        return share.reserved_bytes if share.reserved_bytes <= free_bytes else 0

    @property
    def fair_bytes(self) -> int:
        """Bytes of an equal part for all, or all that the other sessions can do without if less.

        0 if that is less than one batch.
        """
        num_own = 1 + sum(
            each.request.owner.name == self._user and each.reserved_bytes > 0
            for each in self._sessions
        )
        most_bytes = self._most_bytes
        fair_bytes = min(self._resources.arena_limit_bytes, self._part_bytes // num_own)
        needed_bytes = self._request.wanted_share(fair_bytes, scarce=True).reserved_bytes
        if needed_bytes > most_bytes:
            needed_bytes = self._request.wanted_share(most_bytes, scarce=True).reserved_bytes
        return needed_bytes if needed_bytes <= most_bytes else 0

    def halve_the_largest(self, needed_bytes: int) -> None:
        """Halve others until the new session may have these bytes, or may once batches go."""
        resources, part_bytes = self._resources, self._part_bytes
        taken = Taken(self._sessions, self._budget)
        others = set(self._sessions)
        while True:
            missing_bytes = needed_bytes - resources.leaving_bytes
            if free_bytes(self._request, taken, resources) >= missing_bytes:
                return
            # where only the limit of its user is reached, no other user can help
            least_bytes = part_bytes if self._budget.free_bytes < missing_bytes else math.inf
            givers = [
                (taken.by_user[user], each.reserved_bytes, each)
                for each in others
                if (user := each.request.owner.name) == self._user
                or taken.by_user[user] > least_bytes
            ]
            if not givers:
                return
            _, before_bytes, largest = max(givers, key=lambda each: each[:2])
            if largest.halve():
                taken.add(largest, largest.reserved_bytes - before_bytes)
            else:
                others.remove(largest)

    async def wait_for(self, num_bytes: int, kept_bytes: int) -> None:
        """Until so much is free, or nothing more is about to become free, but not for long."""
        budget = self._budget
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_S):
                while self.free_bytes < num_bytes and (
                    self._resources.leaving_bytes or budget.abandoned_bytes > kept_bytes
                ):
                    budget.freed.clear()
                    await budget.freed.wait()

    @property
    def _part_bytes(self) -> int:
        """The bytes of each user if all have the same."""
        users = {self._user, *(each.request.owner.name for each in self._sessions)}
        return (self._budget.limit_bytes - self._budget.abandoned_bytes) // len(users)

    @property
    def _most_bytes(self) -> int:
        """Bytes left for it when all other sessions have given up all they can."""
        budget, part_bytes = self._budget, self._part_bytes
        taken = Taken(self._sessions, budget).by_user
        least: Counter[str] = Counter()
        for session in self._sessions:
            least[session.request.owner.name] += session.least_bytes
        own_bytes = least.pop(self._user, 0)
        others_bytes = sum(
            max(least[user], min(taken[user] - budget.abandoned_by[user], part_bytes))
            for user in least
        )
        most_bytes = budget.limit_bytes - budget.abandoned_bytes - others_bytes - own_bytes
        limits = self._resources.limits.of_user(self._user)
        if limits is None:
            return most_bytes
        kept_bytes = budget.abandoned_by[self._user]
        allowed_bytes = budget.limit_bytes - (budget.abandoned_bytes - kept_bytes) - others_bytes
        return min(most_bytes, int(limits.memory * allowed_bytes) - own_bytes - kept_bytes)
