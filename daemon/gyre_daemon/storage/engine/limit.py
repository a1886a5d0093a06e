"""How many requests an endpoint takes, at once and again, found by trying. Pure.

As TCP finds a rate, time passes in rounds of as many responses as the limit allows in flight. A
round that used the whole limit and was never throttled raises it: it doubles until the first sign
of overload, grows by a quarter where first bytes come later already, and by a constant afterwards.
A throttled round lowers the limit to what got through. A round whose first bytes came much later
than at their best lowers it by a tenth. Responses to requests sent before the limit was changed are
ignored.

A failed request is sent again after a random pause (full jitter), as long as the budget lasts: a
small part of all requests, and everything that can be in flight once in half a minute. So a storage
in trouble is not drowned in retries, and one that failed for a moment loses nothing. A new endpoint
has less: a short run whose storage is in trouble from the start would otherwise retry more than a
small part of what it reads. Once such a storage answers, the budget starts over, because the
waiting requests would otherwise return one by one.
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

# Each request earns this part of a retry. Twice as much doubles the load on a storage that fails.
_SHARE = 0.15
# The whole reserve returns in this time, and requests then retry at least this often.
_REFILL_S, _LEAST_PER_S = 30.0, 0.5
# A new endpoint starts with this part of its reserve, and at least this number of retries. Time
# brings the full rate only after it has been sent this many times the reserve.
_FIRST, _MIN_FIRST, _KNOWN_AFTER = 1 / 16, 16.0, 16.0
# The longest pause before the first retry, doubled for each further one, and its bound.
_BASE_S, _MAX_S = 0.1, 5.0


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


class RetryBudget:
    """Tokens, each worth one retry. Requests and time earn them; a retry that succeeds is free."""

    def __init__(self, reserve: int, now: float) -> None:
        """Start with the tokens of a new endpoint.

        Args:
            reserve: the most tokens that it can hold.
            now: the time.
        """
        self._reserve = float(reserve)
        self._first = min(self._reserve, max(self._reserve * _FIRST, _MIN_FIRST))
        self._tokens = self._first
        self._known = 0.0  # how well the endpoint is known, from 0 to 1
        self._at = now
        self._restored_at = now - _REFILL_S

    def num_left(self, now: float) -> int:
        """How many retries could be sent now."""
        per_s = max(_LEAST_PER_S, self._known * self._reserve / _REFILL_S)
        self._tokens = min(self._reserve, self._tokens + (now - self._at) * per_s)
        self._at = now
        return int(self._tokens)

    def earn(self) -> None:
        """A range was requested for the first time."""
        self._tokens = min(self._reserve, self._tokens + _SHARE)
        self._known = min(1.0, self._known + 1 / (_KNOWN_AFTER * self._reserve))

    def take(self, now: float) -> bool:
        """Take a token for a retry; False if there is none."""
        if not self.num_left(now):
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """A retry succeeded.

        Were it to count, a storage that has recovered would be asked again only slowly.
        """
        self._tokens = min(self._reserve, self._tokens + 1)

    def restore(self, now: float) -> None:
        """The storage answers again after nothing but failures; counts once in half a minute."""
        if now - self._restored_at >= _REFILL_S:
            self._restored_at = now
            self._tokens = max(self.num_left(now), self._first)


def pause_s(num_attempts: int, random: float) -> float:
    """How long to wait before the next attempt, in seconds.

    Args:
        num_attempts: the failed ones so far, at least 1.
        random: uniform in `[0, 1)`.
    """
    longest_s: float = min(_MAX_S, _BASE_S * 2 ** min(num_attempts - 1, 16))
    return random * longest_s
