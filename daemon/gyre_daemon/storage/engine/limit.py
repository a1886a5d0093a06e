"""How many requests an endpoint takes at once, found by trying, as TCP finds a rate. Pure.

Time passes in rounds of as many responses as the limit allows in flight. A round that used the
whole limit and was never throttled raises it: it doubles until the first sign of overload, grows by
a quarter where first bytes come later already, and by a constant afterwards. A throttled round
lowers the limit to what got through. A round whose first bytes came much later than at their best
lowers it by a tenth. Responses to requests sent before the limit was changed are ignored.
"""

import statistics

_START = 256  # any object storage takes these
_FLOOR = 4
# Latency alone lowers the limit no further than this: long tails and busy processors look slow too.
_SLOW_FLOOR = 64
_STEP = 8
# While the limit doubles: a round this much later than the best grows by less, since twice as many
# requests would bring no more. Without it, cold starts overshoot what the network carries.
_GENTLY, _LATER, _JITTER_S = (1.25, 1.5, 0.005)
# A round is slow beyond this factor and slack. Responses wait tens of milliseconds for a busy event
# loop; with less slack, that would be taken for a slow storage.
_SLOWER, _SLACK_S, _SHRINK = (2.0, 0.06, 0.9)
_MAX_SAMPLES = 64  # of latency in a round
_MEMORY_ROUNDS = 500  # for which the best round is remembered


class AdaptiveLimit:
    """The number of requests that may be in flight to one endpoint.

    Attributes:
        round: the number of the present round.
        num_failed_rounds: how many rounds, up to now, had no response that was not throttled.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._floor = min(_FLOOR, ceiling)
        self._limit = float(min(_START, ceiling))
        self._doubles = True
        self._best = _Best()
        self.num_failed_rounds = 0
        self.round = 0
        self._counts_from = 0  # requests of earlier rounds are ignored
        self._was_throttled = False
        self._num_done = self._num_throttled = self._most_in_flight = 0
        self._latencies_s: list[float] = []

    @property
    def limit(self) -> int:
        """The most requests at once."""
        return int(self._limit)

    @property
    def is_throttled(self) -> bool:
        """Whether some of the last requests were throttled."""
        return self._was_throttled or self._num_throttled > 0

    def lower_ceiling(self, ceiling: int) -> None:
        """Never exceed this from now on."""
        self._ceiling = min(self._ceiling, ceiling)
        self._floor = min(self._floor, self._ceiling)
        self._limit = min(self._limit, float(self._ceiling))

    def done(self, of_round: int, num_in_flight: int, first_byte_s: float | None) -> bool:
        """A request was answered.

        Args:
            of_round: `round` when it was sent.
            num_in_flight: requests in flight when it was answered, this one included.
            first_byte_s: the time to its first byte; None if it was throttled.

        Returns:
            Whether the limit may have changed.
        """
        if of_round < self._counts_from:
            return False
        self._num_done += 1
        self._most_in_flight = max(self._most_in_flight, num_in_flight)
        if first_byte_s is None:
            self._num_throttled += 1
        elif len(self._latencies_s) < _MAX_SAMPLES:
            self._latencies_s.append(first_byte_s)
        if self._num_done < self.limit and self._num_throttled * 2 < self.limit:
            return False
        self._end_round()
        return True

    def _begin_round(self) -> None:
        self._num_done = self._num_throttled = self._most_in_flight = 0
        self._latencies_s.clear()

    def _end_round(self) -> None:
        self.round += 1
        self._was_throttled = self._num_throttled > 0
        through = 1 - self._num_throttled / self._num_done
        self.num_failed_rounds = 0 if through else self.num_failed_rounds + 1
        median_s = statistics.median(self._latencies_s) if self._latencies_s else 0.0
        is_slow = bool(self._latencies_s) and self._best.is_slower(median_s)
        if self._was_throttled:
            self._lower(self._limit * through, self._floor)
        elif is_slow and self._limit > _SLOW_FLOOR:
            self._lower(self._limit * _SHRINK, _SLOW_FLOOR)
        elif self._most_in_flight * 8 >= self.limit * 7:
            self._raise(median_s)
        self._begin_round()

    def _raise(self, median_s: float) -> None:
        if self._doubles:
            limit = self._limit * (2 if self._best.is_near(median_s) else _GENTLY)
            self._counts_from = self.round
        else:
            limit = self._limit + _STEP
        self._limit = min(self._ceiling, limit)

    def _lower(self, limit: float, floor: int) -> None:
        self._doubles = False
        if limit < self._limit:
            self._limit = min(self._limit, max(floor, limit))
            self._counts_from = self.round


class _Best:
    """The lowest median time to the first byte in recent rounds, forgotten in steps."""

    def __init__(self) -> None:
        self._recent_s = self._older_s = float("inf")
        self._num_rounds = 0

    def is_near(self, median_s: float) -> bool:
        """Whether a round was about as fast as the best."""
        return median_s <= min(self._recent_s, self._older_s) * _LATER + _JITTER_S

    def is_slower(self, median_s: float) -> bool:
        """Whether a round was much slower than the best; remembers the round."""
        best_s = min(self._recent_s, self._older_s)
        self._num_rounds += 1
        if self._num_rounds % _MEMORY_ROUNDS == 0:
            self._older_s, self._recent_s = self._recent_s, median_s
        self._recent_s = min(self._recent_s, median_s)
        return median_s > best_s * _SLOWER + _SLACK_S
