"""Counters of one session: batches sent, fill of its window, waits of its trainer. Pure."""

import math

from gyre_daemon.monitoring.jobs import SessionTotals
from gyre_daemon.monitoring.lately import Lately, Recorder
from gyre_daemon.monitoring.occupancy import Occupancy


class SessionAccount:
    """The counts of a session since it was opened; all times are of one monotonic clock.

    Attributes:
        window: how long the prefetch window was how full.
    """

    def __init__(self, now: float) -> None:
        """The session is opened `now`, in seconds."""
        self.window = Occupancy(now)
        self._recorder = Recorder(now)
        self._num_batches = self._num_bytes = self._num_substitutes = 0
        self._trainer_waited_s = 0.0

    def totals(self, now: float) -> SessionTotals:
        """All counts up to `now`."""
        return SessionTotals(
            self._num_batches,
            self._num_bytes,
            self.window.at(now),
            self._trainer_waited_s,
            self._num_substitutes,
        )

    def lately(self, now: float) -> Lately:
        """The rates of the last ten seconds."""
        return self._recorder.at(now, self.totals(now))

    def sent(self, num_batches: int, num_bytes: int, num_substitutes: int = 0) -> None:
        """Count batches sent, with that much payload and that many substitutes."""
        self._num_batches += num_batches
        self._num_bytes += num_bytes
        self._num_substitutes += num_substitutes

    def trainer_waited(self, waited_s: float) -> None:
        """Add the time that a client reports its trainer waited; ignore invalid times."""
        if 0 < waited_s < math.inf:
            self._trainer_waited_s += waited_s

    def heard(self, now: float, num_taken: int) -> None:
        """The client has sent a message.

        Args:
            now: when it came.
            num_taken: how many batches its trainer has taken since the session was opened. With 0
                the client does not say, and all batches that were sent count.
        """
        if self._recorder.is_due(now):
            totals = self.totals(now)
            self._recorder.mark(now, num_taken or totals.num_batches, totals)
