"""How many requests an endpoint takes at once: found by trying, as TCP finds a rate. Pure: no event loop, no clock.

Time goes in rounds: as many answers as the limit lets be in flight. A round that used the whole limit and in which nothing was
refused raises it: twofold until the first sign of too much, by a quarter where first bytes come later already, and then by a
constant. A round in which some were refused lowers it to what got through; and one whose first bytes came much later than they
did at their best, by a tenth. What was sent before the limit was lowered or doubled says nothing about the new one.
"""

import statistics

_START = 256
_FLOOR = 4
_SLOW_FLOOR = 64  # slowness alone takes the limit no lower: long tails and busy processors are slow, too
_STEP = 8
_GENTLY, _LATER, _JITTER_S = 1.25, 1.5, 0.005  # where first bytes come so much later, twice as many would bring no more
_SLOWER, _SLACK_S, _SHRINK = 2.0, 0.06, 0.9  # answers that wait for a busy loop of ours come tens of milliseconds later
_MAX_SAMPLES = 64
_MEMORY_ROUNDS = 500  # for so many the best round is remembered


class AdaptiveLimit:
    """The number of requests that may be in flight to one endpoint."""

    def __init__(self, ceiling: int) -> None:
        """Begin in the middle: what every object storage takes."""
        self._ceiling = ceiling
        self._floor = min(_FLOOR, ceiling)
        self._limit = float(min(_START, ceiling))
        self._doubles = True
        self._best = _Best()
        self._num_failed_rounds = 0
        self._was_refused = False
        self.round = 0
        self._counts_from = 0  # the round: what was sent before is not listened to
        self._num_done = 0
        self._num_refused = 0
        self._most_in_flight = 0
        self._waits_s: list[float] = []

    @property
    def limit(self) -> int:
        """At most so many at once."""
        return int(self._limit)

    def lower_ceiling(self, ceiling: int) -> None:
        """Never more than this from now on."""
        self._ceiling = min(self._ceiling, ceiling)
        self._floor = min(self._floor, self._ceiling)
        self._limit = min(self._limit, float(self._ceiling))

    @property
    def is_refused(self) -> bool:
        """Some of the last requests were."""
        return self._was_refused or self._num_refused > 0

    @property
    def num_failed_rounds(self) -> int:
        """How many rounds, up to now, brought nothing at all."""
        return self._num_failed_rounds

    def done(self, of_round: int, num_in_flight: int, first_byte_s: float | None) -> bool:
        """A request was answered.

        Args:
            of_round: `round` when it was sent. What was sent before the limit was lowered says nothing about the new one.
            num_in_flight: when it was answered, itself included.
            first_byte_s: how long it waited; None if it was refused for being too much.

        Returns:
            Whether the limit may be another now.
        """
        if of_round < self._counts_from:
            return False
        self._num_done += 1
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if first_byte_s is None:
            self._num_refused += 1
        elif len(self._waits_s) < _MAX_SAMPLES:
            self._waits_s.append(first_byte_s)
        if self._num_done < self.limit and self._num_refused * 2 < self.limit:
            return False
        self._end_round()
        return True

    def _begin_round(self) -> None:
        self._num_done = 0
        self._num_refused = 0
        self._most_in_flight = 0
        self._waits_s.clear()

    def _end_round(self) -> None:
        self.round += 1
        self._was_refused = self._num_refused > 0
        through = 1 - self._num_refused / self._num_done
        self._num_failed_rounds = 0 if through else self._num_failed_rounds + 1
        median_s = statistics.median(self._waits_s) if self._waits_s else 0.0
        is_slow = self._best.is_slower(median_s) if self._waits_s else False
        if self._was_refused:
            self._lower(self._limit * through, self._floor)
        elif is_slow and self._limit > _SLOW_FLOOR:
            self._lower(self._limit * _SHRINK, _SLOW_FLOOR)
        elif self._most_in_flight * 8 >= self.limit * 7:
            self._raise(median_s)
        self._begin_round()

    def _raise(self, median_s: float) -> None:
        if self._doubles:
            limit = self._limit * (2 if self._best.is_near(median_s) else _GENTLY)
            self._counts_from = self.round  # a round of what was sent at the new limit
        else:
            limit = self._limit + _STEP
        self._limit = min(self._ceiling, limit)

    def _lower(self, limit: float, floor: int) -> None:
        self._doubles = False
        if limit < self._limit:
            self._limit = min(self._limit, max(floor, limit))
            self._counts_from = self.round


class _Best:
    """The best round of late: the lowest median of the time to the first byte, forgotten in steps."""

    def __init__(self) -> None:
        self._recent_s = self._older_s = float("inf")
        self._num_rounds = 0

    def is_near(self, median_s: float) -> bool:
        """Whether a round was about as fast as the best."""
        return median_s <= min(self._recent_s, self._older_s) * _LATER + _JITTER_S

    def is_slower(self, median_s: float) -> bool:
        """Whether a round was much slower than the best; takes it in."""
        best_s = min(self._recent_s, self._older_s)
        self._num_rounds += 1
        if self._num_rounds % _MEMORY_ROUNDS == 0:
            self._older_s, self._recent_s = self._recent_s, median_s
        self._recent_s = min(self._recent_s, median_s)
        return median_s > best_s * _SLOWER + _SLACK_S
