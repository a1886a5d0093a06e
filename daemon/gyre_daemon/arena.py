"""The memory of batches: one budget for the daemon, an arena with a share of it for every session, slots that are reused.

A session reserves its share when it opens and keeps it to its end, so one that stops reading can never take memory from
another.
"""

from dataclasses import dataclass

import numpy as np

from gyre_daemon.errors import Overloaded

_PAGE_BYTES = 4096


class Budget:
    """Bytes that all arenas may have together."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The buffer of one batch.

    Attributes:
        memory: writable; at least as long as was asked for.
    """

    memory: memoryview

    @property
    def num_bytes(self) -> int:
        """Capacity."""
        return self.memory.nbytes


class Arena:
    """The slots of one session, within its share of the budget."""

    def __init__(self, budget: Budget, limit_bytes: int, purpose: str) -> None:
        """Reserve the share.

        Raises:
            Overloaded: see `Budget.reserve`.
        """
        budget.reserve(limit_bytes, purpose)
        self._budget = budget
        self.limit_bytes = limit_bytes
        self._free: list[Slot] = []
        self.held_bytes = 0
        self.memory_bytes = 0

    def take(self, num_bytes: int) -> Slot | None:
        """A slot of at least so many bytes, or None until one is given back; free slots make room for larger ones."""
        fitting = [slot for slot in self._free if slot.num_bytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda free: free.num_bytes)
            self._free.remove(slot)
        else:
            capacity = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
            if self.held_bytes + capacity > self.limit_bytes:
                return None
            while self.memory_bytes + capacity > self.limit_bytes:
                self.memory_bytes -= self._free.pop().num_bytes
            slot = Slot(np.empty(capacity, np.uint8).data)
            self.memory_bytes += capacity
        self.held_bytes += slot.num_bytes
        return slot

    def put_back(self, slot: Slot) -> None:
        """Make a slot free for another batch; nobody may read it any more."""
        self.held_bytes -= slot.num_bytes
        self._free.append(slot)

    def close(self) -> None:
        """Give the share back; slots that are still held live as long as their holders."""
        self._free.clear()
        self._budget.give_back(self.limit_bytes)
        self.limit_bytes = 0


def share_bytes(budget: Budget, batch_bytes: int, num_batches: int, session_limit_bytes: int) -> int:
    """The share a session asks for: room for its window, at most the session limit, but never less than one batch.

    Args:
        budget: of the daemon.
        batch_bytes: upper bound of a batch.
        num_batches: the prefetch window and the one that is being sent.
        session_limit_bytes: the configured bound of one session.
    """
    batch_bytes = -(-batch_bytes // _PAGE_BYTES) * _PAGE_BYTES
    wanted = min(batch_bytes * num_batches, session_limit_bytes)
    if budget.free_bytes < wanted:
        wanted = budget.free_bytes
    return max(wanted, batch_bytes)
