"""How late the event loop is: whatever computes in it for too long delays every session of the daemon."""

import asyncio
import time
from itertools import accumulate

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_INTERVAL_S = 0.25


class LoopLag:
    """How often a timer came how late.

    Attributes:
        num_timers: that were waited for.
        sum_s: of their delays.
    """

    def __init__(self) -> None:
        self.num_timers = 0
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    @property
    def at_most(self) -> list[int]:
        """How many timers were at most as late as each of `BOUNDS_S`."""
        return list(accumulate(self._counts[:-1]))

    def note(self, late_s: float) -> None:
        """A timer came so late; a negative delay is none."""
        late_s = max(0.0, late_s)
        self.num_timers += 1
        self.sum_s += late_s
        self._counts[sum(late_s > bound for bound in BOUNDS_S)] += 1

    async def watch(self) -> None:
        """Wait for one timer after another, for ever."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_INTERVAL_S)
            self.note(time.monotonic() - began - _INTERVAL_S)
