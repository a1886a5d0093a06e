"""How often requests are sent again. Pure: the caller brings the clock and the dice.

What fails is tried again, after a pause that is drawn anew each time (full jitter), as long as the budget lasts: a small part
of all requests, and in half a minute once everything that can be in flight. So a storage that is in trouble is not drowned in
repetitions, and one that failed for a moment loses nothing. Of an endpoint that little was asked of yet, time brings back less:
a short run whose storage is in trouble from the start would repeat more than a small part of what it asks for. Once such a
storage answers, the budget is what it was at first, or what waits would come back one by one.
"""

_SHARE = 0.15
_REFILL_S = 30.0
_FIRST, _MIN_FIRST = 1 / 16, 16.0
_KNOWN_AFTER = 16.0  # times the reserve, in requests
_LEAST_PER_S = 0.5
_BASE_S, _MAX_S = 0.1, 5.0


class RetryBudget:
    """Tokens: a repetition in vain costs one, a first request brings a part of one, all are back after half a minute."""

    def __init__(self, reserve: int, now: float, *, is_new: bool = False) -> None:
        """Full, or of an endpoint that nothing is known of.

        Args:
            reserve: how many repetitions it can hold.
            now: the time.
            is_new: it begins with a small part of them.
        """
        self._reserve = float(reserve)
        self._first = min(self._reserve, max(self._reserve * _FIRST, _MIN_FIRST))
        self._tokens = self._first if is_new else self._reserve
        self._known = 0.0 if is_new else 1.0  # how well, from 0 to 1
        self._at = now
        self._restored_at = now - _REFILL_S

    def num_left(self, now: float) -> int:
        """Repetitions that could be made at once."""
        per_s = max(_LEAST_PER_S, self._known * self._reserve / _REFILL_S)
        self._tokens = min(self._reserve, self._tokens + (now - self._at) * per_s)
        self._at = now
        return int(self._tokens)

    def earn(self) -> None:
        """A read was begun."""
        self._tokens = min(self._reserve, self._tokens + _SHARE)
        if self._known < 1:
            self._known = min(1.0, self._known + 1 / (_KNOWN_AFTER * self._reserve))

    def take(self, now: float) -> bool:
        """Whether a repetition may be sent now; if so, it counts as sent."""
        if not self.num_left(now):
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """A repetition succeeded: only those in vain count, or a storage that is back would be asked again slowly."""
        self._tokens = min(self._reserve, self._tokens + 1)

    def restore(self, now: float) -> None:
        """The storage answers again after nothing but failures; counts once in half a minute."""
        if now - self._restored_at >= _REFILL_S:
            self._restored_at = now
            self._tokens = max(self.num_left(now), self._first)


def pause_s(num_tries: int, dice: float) -> float:
    """How long to wait before the next try.

    Args:
        num_tries: that failed so far, at least 1.
        dice: uniform in `[0, 1)`.
    """
    longest_s: float = min(_MAX_S, _BASE_S * 2 ** min(num_tries - 1, 16))
    return dice * longest_s
