"""A bounded cache keeps the blocks that are used soonest. A state machine without I/O.

Belady's rule with one addition: what would be used later than everything in the cache is not
admitted at all. So a job that reads its data once per epoch never loses what it has still to read
to what it reads now, as it would with LRU, and several jobs keep what any of them needs next. Uses
are points on a clock that the caller keeps; `NEVER` is later than all of them.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

NEVER = (1 << 63) - 1

Key = TypeVar("Key")


@dataclass(slots=True)
class _Entry:
    """A held key; `version` distinguishes its newest place in the heap from older ones."""

    num_bytes: int
    next_use: int
    version: int


class NextUseEviction(Generic[Key]):
    """The keys held within a number of bytes.

    Attributes:
        limit_bytes: may change; the excess goes when another block is admitted.
        used_bytes: of all keys.
    """

    def __init__(self, limit_bytes: int, is_pinned: Callable[[Key], bool]) -> None:
        """Hold nothing.

        Args:
            limit_bytes: of all keys together.
            is_pinned: whether a key must stay for now.
        """
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._is_pinned = is_pinned
        self._entries: dict[Key, _Entry] = {}
        self._furthest: list[tuple[int, int, Key]] = []  # (-next use, version, key), some outdated
        self._versions = itertools.count()

    def __contains__(self, key: Key) -> bool:
        """Whether a key is held."""
        return key in self._entries

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        """All keys."""
        return iter(self._entries)

    def fits(self, num_bytes: int) -> bool:
        """Whether this many bytes can be admitted without evicting anything."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def admit(self, key: Key, num_bytes: int, next_use: int) -> list[Key] | None:
        """Admit a new key.

        Returns:
            The evicted keys, which are used later and not pinned; None if the key is not admitted,
            and nothing is evicted.
        """
        victims = self._victims(self.used_bytes + num_bytes - self.limit_bytes, next_use)
        if victims is None:
            return None
        for victim in victims:
            self.drop(victim)
        self._entries[key] = _Entry(num_bytes, next_use, 0)
        self.used_bytes += num_bytes
        self.expect(key, next_use)
        return victims

    def expect(self, key: Key, next_use: int) -> None:
        """Set the next use of a held key."""
        entry = self._entries[key]
        entry.next_use, entry.version = next_use, next(self._versions)
        heapq.heappush(self._furthest, (-next_use, entry.version, key))
        if len(self._furthest) > 4 * len(self._entries) + 64:
            self._furthest = [
                (-its.next_use, its.version, one) for one, its in self._entries.items()
            ]
            heapq.heapify(self._furthest)

    def drop(self, key: Key) -> None:
        """Hold a key no longer."""
        self.used_bytes -= self._entries.pop(key).num_bytes

    def passed(self, now: int, max_keys: int) -> list[Key]:
        """Keys whose next use has passed, so that it must be found out again; oldest first."""
        late = (
            (entry.next_use, entry.version, key)
            for key, entry in self._entries.items()
            if entry.next_use < now
        )
        return [key for _, _, key in heapq.nsmallest(max_keys, late)]

    def _victims(self, excess_bytes: int, next_use: int) -> list[Key] | None:
        """The keys used furthest in the future that make room.

        None if some of them would be used before `next_use`.
        """
        victims: list[Key] = []
        kept: list[tuple[int, int, Key]] = []
        while excess_bytes > 0 and self._furthest and -self._furthest[0][0] > next_use:
            place = heapq.heappop(self._furthest)
            _, version, key = place
            entry = self._entries.get(key)
            if entry is None or entry.version != version:
                continue
            if self._is_pinned(key):
                kept.append(place)
            else:
                victims.append(key)
                excess_bytes -= entry.num_bytes
        if excess_bytes > 0:
            for key in victims:
                entry = self._entries[key]
                kept.append((-entry.next_use, entry.version, key))
        for place in kept:
            heapq.heappush(self._furthest, place)
        return victims if excess_bytes <= 0 else None
