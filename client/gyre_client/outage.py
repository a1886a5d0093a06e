"""How long a daemon may be away, and when to knock again.

Time counts only while the daemon says nothing: one that is up and waits for slow storage uses up nobody's patience, until that
storage has failed. It adds up until a batch arrives, so a daemon that comes back only to die again does not get the limit anew
each time.
"""

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from gyre_client.connection import OPEN_TIMEOUT_S, RETRY_AFTER
from gyre_client.errors import DaemonUnavailable, GyreError, LeaseExpired, Overloaded, StorageUnavailable

MIN_TIMEOUT_S = 1.0  # of an attempt
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0

_PASSING = (DaemonUnavailable, LeaseExpired, StorageUnavailable, Overloaded)
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


class Outage:
    """Decides, failure by failure, between another attempt and giving up."""

    def __init__(
        self,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._uniform = uniform
        self._spent_s = 0.0
        self._since: float | None = None
        self._num_failures = 0
        self._storage_failed = False

    def patiently(self, attempt: Callable[[float], _Result], wait: Callable[[float], bool]) -> _Result:
        """Returns what `attempt` returns, as soon as it succeeds.

        Args:
            attempt: Called with the seconds it may take.
            wait: See `pause`.

        Raises:
            GyreError: See `next_pause_s`.
        """
        while True:
            timeout_s = max(self._limit_s - self._waited_s(), MIN_TIMEOUT_S) if self._num_failures else OPEN_TIMEOUT_S
            try:
                return attempt(timeout_s)
            except GyreError as failure:
                self.pause(failure, wait)

    def pause(self, failure: GyreError, wait: Callable[[float], bool]) -> None:
        """It is time for the next attempt; an outage is logged once.

        Args:
            failure: Of the last attempt, or why the session ended.
            wait: Waits for so many seconds; true if there is nothing to wait for any longer.

        Raises:
            GyreError: There shall be no further attempt.
        """
        if wait(0.0):
            raise failure
        pause_s = self.next_pause_s(failure)
        if self._num_failures == 1:
            _log.warning("%s; trying again for up to %.0f s", failure, self._limit_s)
        if wait(pause_s):
            raise failure

    def heard(self) -> None:
        """The daemon speaks: the clock stands still, unless it is the storage that is away."""
        if not self._storage_failed:
            self._spent_s = self._waited_s()
            self._since = None

    def batch_received(self) -> None:
        """The outage, if there was one, is over."""
        self._spent_s = 0.0
        self._since = None
        self._num_failures = 0
        self._storage_failed = False

    def next_pause_s(self, failure: GyreError) -> float:
        """Returns how long to wait before the next attempt: full jitter under an exponential, capped ceiling.

        The daemon's own wish (the fact `retry_after_s`) is the least.

        Raises:
            GyreError: `failure` itself, if it will not pass; another of its class that says how long was waited, if the limit
                is reached.
        """
        if not _may_pass(failure):
            raise failure
        self._since = self._clock() if self._since is None else self._since
        self._num_failures += 1
        self._storage_failed = isinstance(failure, StorageUnavailable)
        if self._waited_s() >= self._limit_s:
            account = f"gave up after {self._waited_s():.1f} s and {self._num_failures} attempts"
            raise type(failure)(f"{failure} ({account})", failure.facts) from None
        ceiling_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 16))
        pause_s = max(self._uniform(0.0, ceiling_s), float(failure.facts.get(RETRY_AFTER, 0.0)))
        return min(pause_s, self._limit_s - self._waited_s())

    def _waited_s(self) -> float:
        return self._spent_s + (0.0 if self._since is None else self._clock() - self._since)


def _may_pass(failure: GyreError) -> bool:
    """Whether another attempt can end otherwise; what needs more than a daemon's limit never fits."""
    needed, limit = failure.facts.get("needed_bytes", "0"), failure.facts.get("limit_bytes", "inf")
    return isinstance(failure, _PASSING) and float(needed) <= float(limit)
