"""The memory that all sessions of a daemon may have together."""

from gyre_daemon.errors import Overloaded


class Budget:
    """Bytes that all arenas may have together, with what is noted of the batches in them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What can still be reserved."""
        return self.limit_bytes - self.reserved_bytes

    def reserve(self, num_bytes: int, purpose: str) -> None:
        """Take a share.

        Raises:
            Overloaded: it does not fit; says needed and limit.
        """
        if num_bytes > self.free_bytes:
            raise Overloaded(
                f"{purpose} needs {num_bytes} bytes, but of the daemon's memory_budget of {self.limit_bytes} bytes only "
                f"{self.free_bytes} are free; close a session, lower the batch size or raise memory_budget",
                {"needed_bytes": num_bytes, "free_bytes": self.free_bytes, "limit_bytes": self.limit_bytes},
            )
        self.reserved_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return a share."""
        self.reserved_bytes -= num_bytes
