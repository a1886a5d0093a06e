"""How many connections to object storage a daemon may have, over all hosts."""

from typing import Protocol


class ConnectionPool(Protocol):
    """The connections to one host."""

    def has_room(self) -> None:
        """More connections may be opened than when one was last refused."""

    def close_idle(self) -> bool:
        """Begin to close an idle connection; returns whether there was one."""


class ConnectionBudget:
    """Counts the connections of all hosts. Used from one event loop.

    The operating system limits descriptors, and the daemon's clients need some too. A host without
    a connection gets one that another host leaves idle, or it would never be served.

    Attributes:
        num_left: how many more connections may be opened now.
    """

    def __init__(self, max_open: int) -> None:
        """Nothing is open.

        Args:
            max_open: the most connections at once, including those being opened.
        """
        self.num_left = max_open
        self._pools: dict[ConnectionPool, None] = {}  # those that may have idle connections
        self._refused: dict[ConnectionPool, None] = {}  # those that wait for one, oldest first

    def is_wanted_by_others(self, pool: ConnectionPool) -> bool:
        """Whether another host waits, so that a pool closes a connection that becomes idle."""
        return any(other is not pool for other in self._refused)

    def take(self, pool: ConnectionPool) -> bool:
        """Whether a pool may open one more connection.

        If not, another pool's idle one is closed, and `has_room` is called when there is room.
        """
        if self.num_left:
            self.num_left -= 1
            self._pools[pool] = None
            return True
        if pool not in self._refused:
            self._refused[pool] = None
            any(other.close_idle() for other in self._pools if other is not pool)
        return False

    def give_back(self) -> None:
        """A connection was closed, or was never opened."""
        self.num_left += 1
        if self._refused:
            pool = next(iter(self._refused))
            del self._refused[pool]
            pool.has_room()

    def forget(self, pool: ConnectionPool) -> None:
        """A pool opens no more connections; those it has are still given back one by one."""
        self._pools.pop(pool, None)
        self._refused.pop(pool, None)
