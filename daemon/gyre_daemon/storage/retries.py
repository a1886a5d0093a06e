"""How often requests are sent again. Pure: the caller brings the clock and the dice.

What fails is tried again, after a pause that is drawn anew each time (full jitter), as long as the budget lasts: a small part
of all requests, and in half a minute once everything that can be in flight. So a storage that is in trouble is not drowned in
repetitions, and one that failed for a moment loses nothing. It begins with a sixteenth of that, or a short run whose storage is
in trouble from the start would repeat more than a small part of what it asks for.
"""

_SHARE = 0.15
_REFILL_S = 30.0
_FIRST, _MIN_FIRST = 1 / 16, 16.0
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
        self._tokens = min(self._reserve, max(self._reserve * _FIRST, _MIN_FIRST)) if is_new else self._reserve
        self._at = now

    def num_left(self, now: float) -> int:
        """Repetitions that could be made at once."""
        self._tokens = min(self._reserve, self._tokens + (now - self._at) * self._reserve / _REFILL_S)
        self._at = now
        return int(self._tokens)

    def earn(self) -> None:
        """A read was begun."""
        self._tokens = min(self._reserve, self._tokens + _SHARE)

    def take(self, now: float) -> bool:
        """Whether a repetition may be sent now; if so, it counts as sent."""
        if not self.num_left(now):
            return False
        self._tokens -= 1
        return True

    def give_back(self) -> None:
        """A repetition succeeded: only those in vain count, or a storage that is back would be asked again slowly."""
        self._tokens = min(self._reserve, self._tokens + 1)


def pause_s(num_tries: int, dice: float) -> float:
    """How long to wait before the next try.

    Args:
        num_tries: that failed so far, at least 1.
        dice: uniform in `[0, 1)`.
    """
    longest_s: float = min(_MAX_S, _BASE_S * 2 ** min(num_tries - 1, 16))
    return dice * longest_s
