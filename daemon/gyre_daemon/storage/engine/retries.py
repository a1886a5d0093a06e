"""How often requests are sent again. Pure: the caller brings the clock and the random number.

A failed request is sent again after a random pause (full jitter), as long as the budget lasts: a
small part of all requests, and everything that can be in flight once in half a minute. So a storage
in trouble is not drowned in retries, and one that failed for a moment loses nothing. A new endpoint
has less: a short run whose storage is in trouble from the start would otherwise retry more than a
small part of what it reads. Once such a storage answers, the budget starts over, because the
waiting requests would otherwise return one by one.
"""

# Each request earns this part of a retry. Twice as much doubles the load on a storage that fails.
_SHARE = 0.15
# The whole reserve returns in this time, and requests then retry at least this often.
_REFILL_S, _LEAST_PER_S = 30.0, 0.5
# A new endpoint starts with this part of its reserve, and at least this number of retries. Time
# brings the full rate only after it has been sent this many times the reserve.
_FIRST, _MIN_FIRST, _KNOWN_AFTER = 1 / 16, 16.0, 16.0
# The longest pause before the first retry, doubled for each further one, and its bound.
_BASE_S, _MAX_S = 0.1, 5.0


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
