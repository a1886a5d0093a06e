"""A token bucket: how often something may happen."""


class Bucket:
    """Full at first, and refilled with time."""

    def __init__(self, capacity: float, per_s: float, now_s: float) -> None:
        """Fill it.

        Args:
            capacity: the most that it holds: so many times at once.
            per_s: its gain in a second.
            now_s: of a clock that never goes back.
        """
        self._capacity = capacity
        self._per_s = per_s
        self._level = capacity
        self._since_s = now_s

    def take(self, now_s: float) -> bool:
        """Take one, if there is one."""
        gained = (now_s - self._since_s) * self._per_s
        self._level = min(self._capacity, self._level + gained)
        self._since_s = now_s
        if self._level < 1:
            return False
        self._level -= 1
        return True

    @property
    def wait_s(self) -> float:
        """How long until there is one, as of the last `take`."""
        return max(0.0, (1 - self._level) / self._per_s)
