"""How long one reader may keep others waiting: leaky buckets of lost time. Pure: the caller brings the clock."""

from collections.abc import Sequence


class Patience:
    """Lost time adds up, and a part of all time is forgiven again: little of it in the long run, more for a while."""

    def __init__(self, limits: Sequence[tuple[float, float]]) -> None:
        """Nothing is lost yet.

        Args:
            limits: how many seconds may be lost at once, and the part of time that may be lost for ever; each of them counts.
        """
        self._limits = limits
        self._lost_s = [0.0] * len(limits)
        self._at = float("-inf")

    def left_s(self, now: float) -> float:
        """How much more may be lost now; 0 when patience has run out."""
        levels = self._levels(now)
        return max(0.0, min(limit_s - level for (limit_s, _), level in zip(self._limits, levels, strict=True)))

    def lose(self, since: float, now: float) -> None:
        """The time from `since` to `now` was lost."""
        self._lost_s = [level + (now - since) for level in self._levels(since)]
        self._at = now

    def regain(self, since: float, now: float) -> None:
        """The time from `since` to `now` was lost to somebody else: as much is forgiven."""
        self._lost_s = [max(0.0, level - (now - since)) for level in self._levels(now)]
        self._at = now

    def _levels(self, now: float) -> list[float]:
        passed_s = max(0.0, now - self._at)  # what two feeds tell of one reader may overlap
        pairs = zip(self._limits, self._lost_s, strict=True)
        return [max(0.0, lost_s - forgiven * passed_s) if lost_s else 0.0 for (_, forgiven), lost_s in pairs]
