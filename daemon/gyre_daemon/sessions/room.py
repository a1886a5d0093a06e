"""Room for one session more: the others give some of their memory to a newcomer.

Where a newcomer would find less than half of its fair part, the largest of the others halve their
shares, one after the other, until there is enough. No session goes below a few batches, and no
batch is lost: memory is given back as batches are released. The newcomer waits for that, for some
seconds at most, and takes what is there.
"""

import asyncio
import contextlib
from collections.abc import Collection

from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.shared_stream import DaemonResources

_MAX_WAIT_S = 3.0  # longer, and a job starts late; shorter, and it starts with less memory


async def make_room(
    request: SessionRequest, sessions: Collection[Session], resources: DaemonResources
) -> None:
    """Free memory for a session with this request, as far as it can be had now.

    Args:
        request: what the newcomer asks for.
        sessions: all that are open.
        resources: the daemon's.
    """
    budget = resources.budget
    wanted_bytes = request.wanted_share(resources.arena_limit_bytes).reserved_bytes
    if wanted_bytes <= budget.free_bytes // 2:
        return
    await resources.registry.settle()
    kept_bytes = budget.abandoned_bytes  # nobody can say when that comes back
    fair_bytes = _fair_bytes(request, sessions, resources)
    if 2 * _found_bytes(request, resources) < fair_bytes:
        _halve_the_largest(fair_bytes, sessions, resources)
        await _wait_for(fair_bytes, kept_bytes, resources)


def _found_bytes(request: SessionRequest, resources: DaemonResources) -> int:
    """What the newcomer would reserve now; 0 where that is too much."""
    free_bytes = resources.budget.free_bytes
    share = request.scarce_share(resources.arena_limit_bytes, free_bytes)
    return share.reserved_bytes if share.reserved_bytes <= free_bytes else 0


def _fair_bytes(
    request: SessionRequest, sessions: Collection[Session], resources: DaemonResources
) -> int:
    """What it would have if all had the same, or all that the others can do without.

    0 where that is less than one batch.
    """
    budget = resources.budget
    all_bytes = budget.limit_bytes - budget.abandoned_bytes
    most_bytes = all_bytes - sum(session.least_bytes for session in sessions)
    fair_bytes = min(resources.arena_limit_bytes, all_bytes // (1 + len(sessions)))
    needed_bytes = request.wanted_share(fair_bytes, scarce=True).reserved_bytes
    if needed_bytes > most_bytes:
        needed_bytes = request.wanted_share(most_bytes, scarce=True).reserved_bytes
    return needed_bytes if needed_bytes <= most_bytes else 0


def _halve_the_largest(
    needed_bytes: int, sessions: Collection[Session], resources: DaemonResources
) -> None:
    """Until enough is free, or will be once batches are released."""
    others = set(sessions)
    while others and resources.budget.free_bytes + resources.leaving_bytes < needed_bytes:
        largest = max(others, key=lambda session: session.share.reserved_bytes)
        if not largest.halve():
            others.remove(largest)


async def _wait_for(num_bytes: int, kept_bytes: int, resources: DaemonResources) -> None:
    """Until this much is free, or nothing more is about to become free, but not for long."""
    budget = resources.budget
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MAX_WAIT_S):
            while budget.free_bytes < num_bytes and (
                resources.leaving_bytes or budget.abandoned_bytes > kept_bytes
            ):
                budget.freed.clear()
                await budget.freed.wait()
