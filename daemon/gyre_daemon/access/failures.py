"""Limits on how often a caller's credential is refused with a reason, and how often logged."""

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from gyre_daemon.errors import NotAuthenticated, Overloaded
from gyre_daemon.runtime.bucket import Bucket
from gyre_daemon.runtime.events import log_event

# Failures of one address to answer with their reason: ten at once, then one in six seconds.
# A job whose token has expired needs one. The addresses that failed last are remembered.
_FAILURES, _FAILURES_PER_S = 10.0, 1 / 6
_MAX_ADDRESSES = 4096
# Lines of the log, for all addresses together.
_LINES, _LINES_PER_S = 20.0, 1 / 3
_IPV6_NETWORK_BITS = 64  # one host's usual network


class FailureLimit:
    """Counts refused credentials by address.

    It never stands in the way of a valid credential: users of one machine, who share an address,
    cannot lock each other out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._lines = Bucket(_LINES, _LINES_PER_S, clock())
        self._num_unlogged = 0

    def refuse(self, address: str, reason: NotAuthenticated) -> NotAuthenticated | Overloaded:
        """Count and log a failure.

        Args:
            address: the caller's IP address.
            reason: why the credential is refused.

        Returns:
            The error to send: the reason or, after too many, that there were too many.
        """
        now = self._clock()
        key = _network(address)
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            bucket = Bucket(_FAILURES, _FAILURES_PER_S, now)
        self._buckets[key] = bucket
        while len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        self._log(address, reason, now)
        if bucket.take(now):
            return reason
        return Overloaded(
            f"too many calls from {address} had no valid credential; check the token, and try "
            f"again in {bucket.wait_s:.0f} s",
            {"retry_after_s": f"{bucket.wait_s:.1f}"},
        )

    def _log(self, address: str, reason: NotAuthenticated, now: float) -> None:
        if not self._lines.take(now):
            self._num_unlogged += 1
            return
        facts: dict[str, object] = {"address": address, "reason": reason}
        if self._num_unlogged:
            facts["not_logged_before"] = self._num_unlogged
            self._num_unlogged = 0
        log_event("authentication failed", facts, logging.WARNING)


def _network(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ipaddress.ip_network((ip, _IPV6_NETWORK_BITS), strict=False))
