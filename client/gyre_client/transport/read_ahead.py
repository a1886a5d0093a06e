"""How far the daemon may read ahead of a trainer: to its iteration's end, and for some seconds.

It is pure: the caller brings the clock.
"""

import math
from collections import deque

NEVER = (1 << 63) - 1
# A trainer that computes for longer than it waits has batches for these seconds at its pace.
# With more, a slow trainer has samples decoded that it may never use, and memory that it does not
# need; with less, batches that take longer than others stop it.
_AHEAD_S, _LEAST = 5.0, 2
# The pace is that of the last seconds, from this often on. In a longer time a pause counts for
# longer; a shorter one has few batches.
_MEMORY_S, _INTERVAL_S = 2.0, 0.2
# A trainer that waits for a larger part of the time has no pace.
_WAITS = 0.1


class ReadAhead:
    """The first batch that need not be read yet, from what a trainer took lately."""

    def __init__(self) -> None:
        # each a time, the next batch, and how long the trainer has waited in all
        self._marks: deque[tuple[float, int, float]] = deque()
        self._first = -1

    def until(self, now_s: float, next_batch: int, waited_s: float, stop: int) -> int:
        """Returns the first batch that need not be read yet.

        Args:
            now_s: A time that never falls.
            next_batch: The batch that the trainer takes next.
            waited_s: How long it has waited in all.
            stop: The batch behind the last one of its iteration.
        """
        if self._first < 0:
            self._first = next_batch
        if next_batch == self._first:  # it has not begun
            return stop
        marks = self._marks
        if not marks or now_s - marks[-1][0] >= _INTERVAL_S:
            marks.append((now_s, next_batch, waited_s))
        while now_s - marks[0][0] > _MEMORY_S and len(marks) > 1:
            marks.popleft()
        since_s, first, had_waited_s = marks[0]
        passed_s, lately_s = now_s - since_s, waited_s - had_waited_s
        if passed_s < _INTERVAL_S or lately_s > _WAITS * passed_s:
            return stop
        pace = (next_batch - first + 1) / (passed_s - lately_s)  # the batch in hand counts, too
        return min(stop, next_batch + max(_LEAST, math.ceil(_AHEAD_S * pace)))
