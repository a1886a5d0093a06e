"""What a session did in the last seconds: its rates, and how its time went. Pure: the caller brings the clock.

Batches are sent in groups, some of them seconds apart, so counting what is sent in a second tells nothing. The client says now
and then how many batches its trainer has taken; between two such words, some ten seconds apart, the rate is exact.
"""

from collections import deque
from dataclasses import astuple, dataclass

from gyre_daemon.monitoring.jobs import SessionTotals
from gyre_daemon.monitoring.occupancy import WindowTimes

# Rates are means of SPAN_S: with half of it a job of a batch per second has 4, 5 or 6 of them in it; with twice as much, a
# change takes half a minute to be seen. Marks are MIN_GAP_S apart, so a session keeps some twenty.
SPAN_S = 10.0
MIN_GAP_S = 0.5
SILENCE_S = 3.0  # clients speak every second while batches are taken: after so long none was


@dataclass(frozen=True, slots=True)
class Lately:
    """Some last seconds.

    Attributes:
        elapsed_s: how many.
        batches_per_s: taken by the trainer.
        bytes_per_s: of their payload.
        times: of the window, in these seconds.
        trainer_waited_s: likewise.
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
    """Marks of one session, the oldest of them just before the last `SPAN_S`."""

    def __init__(self, now: float) -> None:
        """The session begins; `now` is of a monotonic clock, as every other here."""
        self._marks = deque([_Mark(now, 0, SessionTotals())])

    def is_due(self, now: float) -> bool:
        """A mark would tell something new."""
        return now - self._marks[-1].at >= MIN_GAP_S

    def mark(self, now: float, num_taken: int, totals: SessionTotals) -> None:
        """The session stands here; `num_taken` batches of it have been taken."""
        self._marks.append(_Mark(now, num_taken, totals))
        self._forget(now)

    def at(self, now: float, totals: SessionTotals) -> Lately:
        """The last seconds before `now`; since the session's beginning if that was later."""
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
            _between(first.totals.times, totals.times),
            totals.trainer_waited_s - first.totals.trainer_waited_s,
        )

    def _forget(self, now: float) -> None:
        while len(self._marks) > 1 and self._marks[1].at <= now - SPAN_S:
            self._marks.popleft()


def _between(before: WindowTimes, after: WindowTimes) -> WindowTimes:
    return WindowTimes(*(end - begin for begin, end in zip(astuple(before), astuple(after), strict=True)))
