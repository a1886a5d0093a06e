"""What stays in a bounded cache: whatever is used soonest. A state machine: nothing waits, nothing is read or written.

Belady's rule with one addition: what would be used later than all that is held is not taken in at all. So a job that goes
through its data once in an epoch never loses what it has still to read to what it reads now (LRU would), and several jobs keep
what any of them needs next. Uses are points of one clock that the caller keeps; `NEVER` is later than all of them.
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
    """One thing that is held; `version` tells its newest place in the heap from older ones."""

    num_bytes: int
    next_use: int
    version: int


class NextUseEviction(Generic[Key]):
    """Which keys are held within a number of bytes.

    Attributes:
        limit_bytes: may change; what is held beyond it goes when something else is taken in.
        used_bytes: of all that is held.
    """

    def __init__(self, limit_bytes: int, is_pinned: Callable[[Key], bool]) -> None:
        """Hold nothing.

        Args:
            limit_bytes: of all that is held together.
            is_pinned: whether something held must stay for now.
        """
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._is_pinned = is_pinned
        self._entries: dict[Key, _Entry] = {}
        self._furthest: list[tuple[int, int, Key]] = []  # (-next use, version, key), some outdated
        self._versions = itertools.count()

    def __contains__(self, key: Key) -> bool:
        """Whether it is held."""
        return key in self._entries

    def __len__(self) -> int:
        """How many are held."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        """All that are held."""
        return iter(self._entries)

    def fits(self, num_bytes: int) -> bool:
        """Whether so much can be taken in without losing anything."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def admit(self, key: Key, num_bytes: int, next_use: int) -> list[Key] | None:
        """Take something in that is not held.

        Returns:
            What had to go for it, all of it used later and not pinned; None where it is not taken in and all else stays.
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
        """Something held is used next then."""
        entry = self._entries[key]
        entry.next_use, entry.version = next_use, next(self._versions)
        heapq.heappush(self._furthest, (-next_use, entry.version, key))
        if len(self._furthest) > 4 * len(self._entries) + 64:
            self._furthest = [(-its.next_use, its.version, one) for one, its in self._entries.items()]
            heapq.heapify(self._furthest)

    def drop(self, key: Key) -> None:
        """It is held no more."""
        self.used_bytes -= self._entries.pop(key).num_bytes

    def passed(self, now: int, max_keys: int) -> list[Key]:
        """What should have been used by now, the longest ago first: when it is used next must be found out anew."""
        late = ((entry.next_use, entry.version, key) for key, entry in self._entries.items() if entry.next_use < now)
        return [key for _, _, key in heapq.nsmallest(max_keys, late)]

    def _victims(self, excess_bytes: int, next_use: int) -> list[Key] | None:
        """The keys used furthest in the future that make room, if all of them are used later than `next_use`."""
        victims: list[Key] = []
        pinned: list[tuple[int, int, Key]] = []
        while excess_bytes > 0 and self._furthest and -self._furthest[0][0] > next_use:
            place = heapq.heappop(self._furthest)
            entry = self._entries.get(place[2])
            if entry is None or entry.version != place[1]:
                continue
            if self._is_pinned(place[2]):
                pinned.append(place)
            else:
                victims.append(place[2])
                excess_bytes -= entry.num_bytes
        for place in pinned:
            heapq.heappush(self._furthest, place)
        if excess_bytes <= 0:
            return victims
        for key in victims:
            heapq.heappush(self._furthest, (-self._entries[key].next_use, self._entries[key].version, key))
        return None
