"""How long a daemon may be away, and when to try again.

Only the time in which the daemon is silent counts. A daemon that is up and waits for slow
storage uses up none of the limit, unless that storage has failed. The time adds up until a batch
arrives: a daemon that comes back only to die again does not start from zero.
"""

import logging
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from gyre_client.errors import (
    DaemonUnavailable,
    GyreError,
    LeaseExpired,
    Overloaded,
    StorageUnavailable,
)
from gyre_client.transport.connection import OPEN_TIMEOUT_S, RETRY_AFTER

# Each pause is drawn from [0, ceiling]; the ceiling starts at FIRST_PAUSE_S and doubles up to
# MAX_PAUSE_S. A shorter first pause makes all ranks call a daemon just starting; a longer
# last one adds its length to every recovery. Every attempt gets at least MIN_TIMEOUT_S, however
# little is left of the limit.
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MIN_TIMEOUT_S = 1.0

_RETRYABLE = (DaemonUnavailable, LeaseExpired, StorageUnavailable, Overloaded)
_Result = TypeVar("_Result")
_log = logging.getLogger("gyre_client")


class Outage:
    """Decides after each failure between another attempt and giving up."""

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

    def retry(self, attempt: Callable[[float], _Result], wait: Callable[[float], bool]) -> _Result:
        """Returns the result of the first `attempt` that succeeds.

        Args:
            attempt: Called with the seconds it may take.
            wait: See `pause`.

        Raises:
            GyreError: See `next_pause_s`.
        """
        while True:
            timeout_s = OPEN_TIMEOUT_S
            if self._num_failures:
                timeout_s = max(self._limit_s - self._waited_s(), MIN_TIMEOUT_S)
            try:
                return attempt(timeout_s)
            except GyreError as failure:
                self.pause(failure, wait)

    def pause(self, failure: GyreError, wait: Callable[[float], bool]) -> None:
        """Waits until it is time for the next attempt; logs one warning per outage.

        Args:
            failure: Why the last attempt failed, or why the session ended.
            wait: Waits for a number of seconds; returns true if the caller is closing.

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
        """Stops the clock because the daemon said something, unless its storage has failed."""
        if not self._storage_failed:
            self._spent_s = self._waited_s()
            self._since = None

    def batch_received(self) -> None:
        """Ends the outage, if there was one."""
        self._spent_s = 0.0
        self._since = None
        self._num_failures = 0
        self._storage_failed = False

    def next_pause_s(self, failure: GyreError) -> float:
        """Returns how long to wait before the next attempt: exponential back-off with full jitter.

        It is at least as long as the daemon asked for in the fact `retry_after_s`.

        Raises:
            GyreError: `failure` itself if another attempt cannot succeed; at the limit, an error of
                the same class whose message says how long was waited.
        """
        if not _is_retryable(failure):
            raise failure
        self._since = self._clock() if self._since is None else self._since
        self._num_failures += 1
        self._storage_failed = isinstance(failure, StorageUnavailable)
        waited_s = self._waited_s()  # read once: a pause is never negative
        if waited_s >= self._limit_s:
            raise type(failure)(
                f"{failure} (gave up after {waited_s:.1f} s and {self._num_failures} attempts)",
                failure.facts,
            ) from None
        ceiling_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 16))
        pause_s = max(self._uniform(0.0, ceiling_s), _number(failure, RETRY_AFTER, 0.0))
        return min(pause_s, self._limit_s - waited_s)

    def _waited_s(self) -> float:
        return self._spent_s + (0.0 if self._since is None else self._clock() - self._since)


def _is_retryable(failure: GyreError) -> bool:
    """A session that needs more memory than the daemon's whole budget never fits."""
    needed_bytes = _number(failure, "needed_bytes", 0.0)
    limit_bytes = _number(failure, "limit_bytes", math.inf)
    return isinstance(failure, _RETRYABLE) and needed_bytes <= limit_bytes


def _number(failure: GyreError, fact: str, default: float) -> float:
    """Returns a fact as a number; the default where the daemon sent none."""
    try:
        number = float(failure.facts.get(fact, default))
    except ValueError:
        return default
    return default if math.isnan(number) else number
