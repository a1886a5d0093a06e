"""Limits on the calls and sessions of one user."""

import fnmatch
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from gyre_protos.text import counted

from gyre_daemon.access.principal import Principal
from gyre_daemon.config import LimitsConfig, UserLimits
from gyre_daemon.errors import Overloaded
from gyre_daemon.runtime.threads import Bucket

# A user that was silent may make the requests of this many seconds at once: the ranks of a
# job begin together. With more, a burst keeps the event loop busy for longer.
_BURST_S = 5.0
# A message on a control stream costs this part of a request, and again for each of these bytes: a
# message of 64 KiB may release thousands of batches. A user who sends more is not refused but read
# later. Jobs of small batches need some hundred messages per second; with a smaller number of
# messages per request they would wait.
_MESSAGES_PER_REQUEST = 20
_MESSAGE_BYTES = 64
# Lists of transforms, and ways to pack, that a user may declare at once, and how many more per
# second. Each new list may have to be measured, which reads the dataset and leaves a file for each
# shard; to pack takes up to minutes, one after the other. With more, a user who declares one after
# the other fills the disk and the memory, and keeps others from packing.
_CHAINS_AT_ONCE, _CHAINS_PER_S = 64, 0.2
_MAX_CHAINS = 4096  # to remember, of all users
# Beyond this many buckets full ones are dropped, since a full one holds no information.
_MAX_BUCKETS = 1024


class Limits:
    """The limits of all users and jobs, and how fast each of them calls."""

    def __init__(
        self, config: LimitsConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """No caller is known yet.

        Args:
            config: the operator's limits; None for no limits at all, on a private daemon.
            clock: returns the time in seconds.
        """
        self._config = config
        self._requests = Rates(clock)
        self._chains = Rates(clock, _CHAINS_AT_ONCE / _CHAINS_PER_S)
        self._declared: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def replace(self, config: LimitsConfig) -> None:
        """Apply these limits from now on; users already beyond them keep their sessions."""
        self._config = config

    def of_user(self, name: str) -> UserLimits | None:
        """The limits of a user; None for none."""
        if self._config is None:
            return None
        overrides = self._config.users.items()
        return next(
            (limits for pattern, limits in overrides if fnmatch.fnmatchcase(name, pattern)),
            self._config.user,
        )

    def count_request(self, caller: Principal) -> None:
        """Count a request of a user.

        Raises:
            Overloaded: the user calls too often.
        """
        name, limits = caller.name, self.of_user(caller.name)
        if limits and (wait_s := self._requests.take(name, limits.requests_per_s)):
            raise Overloaded(
                f"{name} makes more than {limits.requests_per_s:g} requests per second; try again "
                f"in {wait_s:.1f} s",
                {
                    "limit_per_s": limits.requests_per_s,
                    "who": name,
                    "retry_after_s": round(wait_s, 3),
                },
            )

    def count_chain(self, user: str, chain: bytes) -> None:
        """Count transforms or a way to pack that a user declares, unless it did so lately.

        Args:
            user: the name of a principal.
            chain: tells it and its dataset from others.

        Raises:
            Overloaded: the user declares too many different ones.
        """
        if self.of_user(user) is None:
            return
        key = user, hashlib.blake2b(chain, digest_size=16).digest()
        if key not in self._declared and (wait_s := self._chains.take(user, _CHAINS_PER_S)):
            raise Overloaded(
                f"{user} has declared more than {_CHAINS_AT_ONCE} different lists of transforms "
                "or ways to pack; "
                f"try again in {wait_s:.1f} s",
                {"who": user, "retry_after_s": round(wait_s, 3)},
            )
        self._declared[key] = None
        self._declared.move_to_end(key)
        if len(self._declared) > _MAX_CHAINS:
            self._declared.popitem(last=False)

    def pace(self, user: str) -> Callable[[int], float]:
        """How a user's control stream is slowed down.

        Returns:
            A function that takes the size of a message that was handled, in bytes, and returns for
            how many seconds the next is not to be read.
        """

        def pause_s(num_bytes: int) -> float:
            if limits is None:
                return 0.0
            per_s = _MESSAGES_PER_REQUEST * limits.requests_per_s
            return self._requests.charge(key, per_s, 1.0 + num_bytes / _MESSAGE_BYTES)

        limits, key = self.of_user(user), f"{user} messages"
        return pause_s

    def why_no_connection(self, caller: Principal, num_open: int) -> str:
        """Why a user with this many connections may have no further one; empty if it may."""
        limits = self.of_user(caller.name)
        if limits is None or num_open < limits.connections:
            return ""
        return (
            f"{caller.name} has {counted(num_open, 'connection')} to the daemon, and may have "
            f"{limits.connections} (limits.user.connections); close some"
        )

    def check_sessions(self, user: str, num_open: int) -> None:
        """Refuse a further session of a user that has this many.

        Raises:
            Overloaded: it has all that it may have.
        """
        limits = self.of_user(user)
        if limits and num_open >= limits.sessions:
            raise Overloaded(
                f"user {user} has {counted(num_open, 'session')}, and may have {limits.sessions} "
                "(limits.user.sessions); close one",
                {"needed_sessions": num_open + 1, "limit_sessions": limits.sessions, "who": user},
            )


@dataclass(slots=True)
class Rates:
    """How often each caller has called lately: a token bucket each."""

    clock: Callable[[], float] = time.monotonic
    burst_s: float = _BURST_S
    _buckets: dict[tuple[str, float], Bucket] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many callers are remembered."""
        return len(self._buckets)

    def take(self, key: str, per_s: float) -> float:
        """Take a token of a caller who gets this many per second.

        Returns:
            0, or the seconds until there is a token where there is none.
        """
        bucket = self._bucket(key, per_s)
        return 0.0 if bucket.take(self.clock()) else bucket.wait_s

    def charge(self, key: str, per_s: float, num: float) -> float:
        """Take tokens, whether they are there or not.

        Returns:
            The seconds until none is owed.
        """
        return self._bucket(key, per_s).charge(self.clock(), num)

    def _bucket(self, key: str, per_s: float) -> Bucket:
        bucket = self._buckets.get((key, per_s))
        if bucket is None:
            now = self.clock()
            if len(self._buckets) >= _MAX_BUCKETS:
                self._buckets = {
                    k: each for k, each in self._buckets.items() if not each.is_full(now)
                }
            bucket = Bucket(max(1.0, per_s * self.burst_s), per_s, now)
            self._buckets[key, per_s] = bucket
        return bucket
