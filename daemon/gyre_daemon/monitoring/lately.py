"""Rates of a session over the last seconds. Pure: the caller brings the clock.

Batches are sent in groups that may be seconds apart, so the number sent in a second is no rate. The
client reports now and then how many batches its trainer has taken. Between two such reports, some
ten seconds apart, the rate is exact.
"""

from collections import deque
from dataclasses import dataclass

from gyre_daemon.monitoring.jobs import SessionTotals
from gyre_daemon.monitoring.occupancy import WindowTimes

# Rates are means over SPAN_S. With half of it, a job of one batch per second would be shown 4, 5 or
# 6 of them; with twice as much, a change would show after half a minute. Marks are MIN_GAP_S apart,
# so that a session keeps some twenty. Clients report every second while batches are taken; after
# SILENCE_S without a report, none was.
SPAN_S = 10.0
MIN_GAP_S = 0.5
SILENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Lately:
    """The rates and waits of a session in its last seconds.

    Attributes:
        elapsed_s: how many seconds these are.
        batches_per_s: how many batches the trainer took.
        bytes_per_s: payload of those batches.
        times: of the prefetch window, in these seconds.
        trainer_waited_s: how long the trainer had no batch, in these seconds.
    """

    elapsed_s: float
    batches_per_s: float
    bytes_per_s: float
    times: WindowTimes
    trainer_waited_s: float


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    num_taken: int
    totals: SessionTotals


class Recorder:
    """Remembers where a session stood at some moments of the last `SPAN_S`."""

    def __init__(self, now: float) -> None:
        """The session begins at `now`, in seconds of a monotonic clock as everywhere here."""
        self._marks = deque([_Mark(now, 0, SessionTotals())])

    def is_due(self, now: float) -> bool:
        """Whether the last mark is old enough for another one."""
        return now - self._marks[-1].at >= MIN_GAP_S

    def mark(self, now: float, num_taken: int, totals: SessionTotals) -> None:
        """Remember that the trainer has taken `num_taken` batches so far, and the totals."""
        self._marks.append(_Mark(now, num_taken, totals))
        self._forget(now)

    def at(self, now: float, totals: SessionTotals) -> Lately:
        """The last `SPAN_S` before `now`, or the time since the session began if shorter."""
        self._forget(now)
        first, last = self._marks[0], self._marks[-1]
        is_silent = last is first or now - last.at > SILENCE_S
        counted_s = (now if is_silent else last.at) - first.at
        batches_per_s = (last.num_taken - first.num_taken) / counted_s if counted_s > 0 else 0.0
        mean_bytes = totals.num_bytes / totals.num_batches if totals.num_batches else 0.0
        return Lately(
            now - first.at,
            batches_per_s,
            batches_per_s * mean_bytes,
            totals.times - first.totals.times,
            totals.trainer_waited_s - first.totals.trainer_waited_s,
        )

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1].at <= now - SPAN_S:
            self._marks.popleft()
