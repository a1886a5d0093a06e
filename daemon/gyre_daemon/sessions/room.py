"""Room for one session more: the others give some of their memory where a newcomer would find too little.

First the windows that have grown shrink. A newcomer that then finds less than half of its fair part has the largest of the
others halve their shares, one after the other, until there is enough. Nobody goes below a few batches, and no batch is lost:
memory is given back as slots become free. The newcomer waits for that, for some seconds at most, and takes what is there.
"""

import asyncio
import contextlib
from collections.abc import Collection

from gyre_daemon.sessions.feed import Machinery
from gyre_daemon.sessions.request import SessionRequest
from gyre_daemon.sessions.session import Session

_MAX_WAIT_S = 3.0


async def make_room(request: SessionRequest, sessions: Collection[Session], machinery: Machinery) -> None:
    """There is memory for a session with this request, or it cannot be had now.

    Args:
        request: of the newcomer.
        sessions: all that are open.
        machinery: theirs.
    """
    budget, limit_bytes = machinery.budget, machinery.arena_limit_bytes
    wanted_bytes = request.wanted_share(limit_bytes).reserved_bytes
    if wanted_bytes <= budget.free_bytes // 2:
        return
    kept_bytes = budget.abandoned_bytes  # nobody can say when that comes back
    for feed in list(machinery.feeds):
        feed.shrink()
    await asyncio.sleep(0)  # windows that were just growing stop
    await _wait_for(2 * wanted_bytes, kept_bytes, machinery)
    fair_bytes = _fair_bytes(request, sessions, machinery)
    if 2 * _found_bytes(request, machinery) < fair_bytes:
        _halve_the_largest(fair_bytes, sessions, machinery)
        await _wait_for(fair_bytes, kept_bytes, machinery)


def _found_bytes(request: SessionRequest, machinery: Machinery) -> int:
    """What the newcomer would reserve now; 0 where that is too much."""
    free_bytes = machinery.budget.free_bytes
    share = request.scarce_share(machinery.arena_limit_bytes, free_bytes)
    return share.reserved_bytes if share.reserved_bytes <= free_bytes else 0


def _fair_bytes(request: SessionRequest, sessions: Collection[Session], machinery: Machinery) -> int:
    """What it would have if all had as much, or all that the others can do without; 0 where that is no batch."""
    budget = machinery.budget
    all_bytes = budget.limit_bytes - budget.abandoned_bytes
    most_bytes = all_bytes - sum(session.least_bytes for session in sessions)
    fair_bytes = min(machinery.arena_limit_bytes, all_bytes // (1 + len(sessions)))
    needed_bytes = request.wanted_share(fair_bytes, scarce=True).reserved_bytes
    if needed_bytes > most_bytes:
        needed_bytes = request.wanted_share(most_bytes, scarce=True).reserved_bytes
    return needed_bytes if needed_bytes <= most_bytes else 0


def _halve_the_largest(needed_bytes: int, sessions: Collection[Session], machinery: Machinery) -> None:
    """Until so much is free, or will be once batches are released."""
    others = set(sessions)
    while others and machinery.budget.free_bytes + _leaving_bytes(machinery) < needed_bytes:
        largest = max(others, key=lambda session: session.share.reserved_bytes)
        if not largest.halve():
            others.remove(largest)


async def _wait_for(num_bytes: int, kept_bytes: int, machinery: Machinery) -> None:
    """Until so much is free, or nothing is about to become free beyond what clients kept before; but not for long."""
    budget = machinery.budget
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_MAX_WAIT_S):
            while budget.free_bytes < num_bytes and (_leaving_bytes(machinery) or budget.abandoned_bytes > kept_bytes):
                budget.freed.clear()
                await budget.freed.wait()


def _leaving_bytes(machinery: Machinery) -> int:
    return sum(feed.arenas.leaving_bytes for feed in machinery.feeds)
