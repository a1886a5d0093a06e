"""How many connections to object storage a daemon may have: the operating system bounds them, and clients need some too."""

from typing import Protocol


class Sharer(Protocol):
    """A host to which connections are made."""

    def has_room(self) -> None:
        """There may be more connections than when it was last refused one."""

    def close_idle(self) -> bool:
        """Begin to close a connection that nobody uses; says whether there was one."""


class Connections:
    """Counts those of all hosts together. Used from one event loop."""

    def __init__(self, max_open: int) -> None:
        """None is made yet.

        Args:
            max_open: so many at the same time, those that are being made included.
        """
        self._num_left = max_open
        self._sharers: dict[Sharer, None] = {}  # those that have made one, and may have one that is idle
        self._short: dict[Sharer, None] = {}  # those that were refused one, the oldest first

    @property
    def num_left(self) -> int:
        """So many more may be made now."""
        return self._num_left

    def are_wanted(self, sharer: Sharer) -> bool:
        """Another host waits for one: if this one has no use for a connection, it closes it."""
        return any(other is not sharer for other in self._short)

    def take(self, sharer: Sharer) -> bool:
        """Whether it may make one more. Where it may not, an idle one of another host is closed, and it is told when it may."""
        if self._num_left:
            self._num_left -= 1
            self._sharers[sharer] = None
            return True
        if sharer not in self._short:
            self._short[sharer] = None
            next((other for other in self._sharers if other is not sharer and other.close_idle()), None)
        return False

    def give_back(self) -> None:
        """One that was taken is gone, or was never made."""
        self._num_left += 1
        if self._short:
            sharer = next(iter(self._short))
            del self._short[sharer]
            sharer.has_room()

    def forget(self, sharer: Sharer) -> None:
        """It makes none any more; what it has taken is still given back one by one."""
        self._sharers.pop(sharer, None)
        self._short.pop(sharer, None)
