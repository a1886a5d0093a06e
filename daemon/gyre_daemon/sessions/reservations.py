"""The memory that sessions reserve: each job at once, for all its ranks on this node.

[Note: Fixed shares] A session's share is fixed when it opens, and nothing takes it back. The first
rank of a job reserves for all its ranks on this node; its client says how many there are. They get
equal shares. Together these take a fourth of the free memory, so the next job finds some; or three
batches each, where a fourth is less. A rank that ends leaves its share to its successor. When the
last rank has ended, all is free.

A user may take a fraction of the memory that other users do not have (`limits.user.memory`), so a
user who comes later still finds some. All jobs of a user share that fraction.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from gyre_daemon.access.limits import Limits
from gyre_daemon.memory.arenas import ArenaRegistry
from gyre_daemon.memory.budget import Allowance, Budget
from gyre_daemon.memory.share import Share
from gyre_daemon.sessions.request import SessionRequest

InUse = tuple[str, int]  # a user, and the bytes that a session of it has reserved

_PART_OF_FREE = 4


@dataclass(slots=True)
class _Reservation:
    """The memory of the ranks of one job that read the same.

    Attributes:
        user: the job's owner.
        num_taken: how many ranks have a share.
        left: the shares of ranks that have not come yet, or have ended.
    """

    user: str
    num_taken: int = 0
    left: list[Share] = field(default_factory=list)


class Reservations:
    """The reserved shares of all jobs."""

    def __init__(self, budget: Budget, limits: Limits, limit_bytes: int) -> None:
        """Nothing is reserved.

        Args:
            budget: of the daemon.
            limits: on users.
            limit_bytes: the most memory that one session may reserve, three batches excepted.
        """
        self._budget = budget
        self._limits = limits
        self._limit_bytes = limit_bytes
        self._by_key: dict[Hashable, _Reservation] = {}

    def take(self, request: SessionRequest, in_use: Iterable[InUse]) -> Share:
        """A share for a rank: one that its job has left, or a new one.

        Args:
            request: that of the rank.
            in_use: the memory of open sessions.

        Raises:
            Overloaded: the memory is not free, or beyond a limit.
        """
        key = _key(request)
        reservation = self._by_key.get(key) or _Reservation(request.owner.name)
        if not reservation.left:
            num_ranks = max(1, request.reader.num_local - reservation.num_taken)
            reservation.left = self._reserve(request, num_ranks, in_use)
        self._by_key[key] = reservation
        reservation.num_taken += 1
        return reservation.left.pop()

    async def settle(self, request: SessionRequest, arenas: ArenaRegistry) -> None:
        """Where memory is scarce, wait until that of sessions just ended is back.

        Args:
            request: that of a session about to `take` memory.
            arenas: all arenas of the daemon.
        """
        num_bytes = request.share(self._limit_bytes).reserved_bytes
        num_ranks = max(1, request.reader.num_local)
        if num_bytes * num_ranks > self._budget.free_bytes // _PART_OF_FREE:
            await arenas.settle()

    def give_back(self, request: SessionRequest, share: Share) -> None:
        """Leave a rank's share to the rank that takes its place, or to all if it is the last."""
        key = _key(request)
        reservation = self._by_key[key]
        reservation.num_taken -= 1
        reservation.left.append(share)
        if not reservation.num_taken:
            del self._by_key[key]
            self._budget.give_back(_bytes_of(reservation.left))

    def check(self, request: SessionRequest) -> None:
        """Check that the session could have memory if no other had any.

        Raises:
            Overloaded: it could not.
        """
        share = request.share(min(self._limit_bytes, self._budget.limit_bytes))
        self._budget.check(share.reserved_bytes, _purpose(request, 1))

    def _reserve(
        self, request: SessionRequest, num_ranks: int, in_use: Iterable[InUse]
    ) -> list[Share]:
        allowance = self._allowance(request, in_use)
        free_bytes = self._budget.free_bytes
        if allowance:
            free_bytes = min(free_bytes, allowance.free_bytes)
        part_bytes = max(0, free_bytes) // _PART_OF_FREE // num_ranks
        share = request.share(min(self._limit_bytes, part_bytes))
        only_user = None if request.is_operator else request.owner.name
        num_bytes = num_ranks * share.reserved_bytes
        self._budget.reserve(num_bytes, _purpose(request, num_ranks), allowance, only_user)
        return [share] * num_ranks

    def _allowance(self, request: SessionRequest, in_use: Iterable[InUse]) -> Allowance | None:
        """The bytes that the user may still reserve; None without a limit."""
        user, budget = request.owner.name, self._budget
        limits = self._limits.of_user(user)
        if limits is None:
            return None
        by_user = budget.abandoned_by.copy()
        left = ((each.user, _bytes_of(each.left)) for each in self._by_key.values())
        for its_user, num_bytes in chain(in_use, left):
            by_user[its_user] += num_bytes
        others_bytes = by_user.total() - by_user[user]
        return Allowance(
            user,
            "limits.user.memory",
            by_user[user],
            int(limits.memory * (budget.limit_bytes - others_bytes)),
            int(limits.memory * budget.limit_bytes),
        )


def _key(request: SessionRequest) -> Hashable:
    """Equal for the ranks of one run that read the same batches."""
    reader, dataset = request.reader, request.dataset
    run = request.owner.name, reader.job, reader.fence, reader.world_size
    batches = dataset.name, dataset.fingerprint, request.order, request.balance
    return run, batches, request.prefetch_batches


def _purpose(request: SessionRequest, num_ranks: int) -> str:
    what = "a session" if num_ranks == 1 else f"a job of {num_ranks} ranks on this node"
    return f"{what} on `{request.dataset.name}`"


def _bytes_of(shares: Iterable[Share]) -> int:
    return sum(each.reserved_bytes for each in shares)
