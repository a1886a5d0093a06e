"""How long one reader may keep others waiting: a leaky bucket of lost time. Pure: the caller brings the clock."""


class Patience:
    """Lost time adds up, and a small part of all time is forgiven again."""

    def __init__(self, limit_s: float, forgiven: float) -> None:
        """Nothing is lost yet.

        Args:
            limit_s: how much may be lost at once.
            forgiven: the part of time that may be lost for ever.
        """
        self._limit_s = limit_s
        self._forgiven = forgiven
        self._lost_s = 0.0
        self._at = float("-inf")

    def left_s(self, now: float) -> float:
        """How much more may be lost now; 0 when patience has run out."""
        return max(0.0, self._limit_s - self._level(now))

    def lose(self, since: float, now: float) -> None:
        """The time from `since` to `now` was lost."""
        level = self._level(since)
        self._lost_s, self._at = level + (now - since), now

    def _level(self, now: float) -> float:
        return max(0.0, self._lost_s - self._forgiven * (now - self._at)) if self._lost_s else 0.0
