"""Which blocks the node cache holds in memory and on disk. It moves no bytes."""

from collections import deque
from enum import Enum

import numpy as np

from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.storage.cache.blocks import Integers
from gyre_daemon.storage.cache.eviction import NEVER, NextUseEviction
from gyre_daemon.storage.cache.volume import Tier, Volume

Key = tuple[Volume, int]

# Blocks whose next use is looked up at once. Each lookup costs as much as finding the block's
# samples in the order; with fewer, blocks that are used up stay longer.
_MAX_LOOKUPS = 32


class Need(Enum):
    """How urgently a block is wanted in memory."""

    BY_NEXT_USE = "only if it is used sooner than a held block"
    SOON = "unless all held blocks are used soon"
    NOW = "in place of any block that is not being read"


class Placement:
    """Decides which blocks are held in memory and on disk.

    Attributes:
        in_memory: blocks with memory, including those being fetched.
        on_disk: blocks with space on disk, including those being written.
    """

    def __init__(self, memory_bytes: int, disk_bytes: int, counts: CacheCounts) -> None:
        self.in_memory: NextUseEviction[Key] = NextUseEviction(memory_bytes, _is_pinned)
        self.on_disk: NextUseEviction[Key] = NextUseEviction(disk_bytes, _is_pinned)
        self._counts = counts
        self._samples_read = 0.0  # by each job, about: the clock of next uses
        self._look_up_at = 0
        self._half_read: deque[Key] = deque()

    def count_samples(self, num_samples: float) -> None:
        """Each job has read this many samples more."""
        self._samples_read += num_samples

    def count_copied(self, volume: Volume, blocks: Integers, sizes: Integers) -> None:
        """Bytes of blocks were copied; a block of which half was read may not be needed again."""
        np.add.at(volume.used_bytes, blocks, sizes)
        touched = np.unique(blocks)
        for block in touched[2 * volume.used_bytes[touched] >= volume.sizes[touched]].tolist():
            volume.used_bytes[block] = 0
            self._half_read.append((volume, block))

    def take_memory(self, volume: Volume, block: int, need: Need) -> bool:
        """Reserve memory for an absent block, evicting others; False if it is not admitted."""
        num_bytes = int(volume.memory_sizes[block])
        victims = self._make_room(self.in_memory, (volume, block), num_bytes, need)
        if victims is None:
            return False
        for of, victim in victims:
            of.free(victim)
            of.move(victim, Tier.DISK if of.on_disk[victim] else Tier.ABSENT)
            self._counts.num_evicted += not of.on_disk[victim]
        volume.move(block, Tier.FETCHING)
        volume.used_bytes[block] = 0
        return True

    def fetched(self, volume: Volume, block: int, *, is_whole: bool) -> None:
        """A block that was being fetched is in memory, or could not be fetched."""
        volume.move(block, Tier.MEMORY if is_whole else Tier.ABSENT)
        if is_whole:
            self._counts.num_blocks_fetched += 1
            self._counts.num_bytes_fetched += int(volume.sizes[block])
        else:
            volume.free(block)
            self.in_memory.drop((volume, block))
        self._update_counts()

    def take_disk(self, volume: Volume, block: int) -> list[Key] | None:
        """Reserve disk space for a block in memory.

        Returns:
            The blocks whose space must be freed for it; None if it is not admitted.
        """
        num_bytes = int(volume.disk_sizes[block])
        victims = self._make_room(self.on_disk, (volume, block), num_bytes, Need.BY_NEXT_USE)
        for of, victim in victims or ():
            of.on_disk[victim] = False
            if of.tier[victim] == Tier.DISK:
                of.move(victim, Tier.ABSENT)
                self._counts.num_evicted += 1
        return victims

    def written(self, volume: Volume, block: int, *, is_whole: bool) -> None:
        """A block is on disk, so that its memory is freed first; or it could not be written."""
        if is_whole:
            volume.on_disk[block] = True
            self.in_memory.expect((volume, block), NEVER)
        else:
            self.on_disk.drop((volume, block))
        self._update_counts()

    def adopt(self, volume: Volume, found: Integers) -> list[int]:
        """Count blocks that are on disk already; returns those beyond the limit."""
        surplus = []
        for block in found.tolist():
            num_bytes = int(volume.disk_sizes[block])
            if self.on_disk.fits(num_bytes):
                self.on_disk.admit((volume, block), num_bytes, self._now - 1)
                volume.on_disk[block] = True
                volume.move(block, Tier.DISK)
            else:
                surplus.append(block)
        self._update_counts()
        return surplus

    def lost(self, volume: Volume, damaged: set[int]) -> None:
        """Damaged blocks are no longer on disk."""
        for block in damaged:
            # Another reader may have noticed it first.
            if volume.on_disk[block] and volume.mirror and block not in volume.mirror:
                volume.on_disk[block] = False
                if volume.tier[block] == Tier.DISK:
                    volume.move(block, Tier.ABSENT)
                self.on_disk.drop((volume, block))
                self._counts.num_corrupt += 1
        self._update_counts()

    @property
    def _now(self) -> int:
        return int(self._samples_read)

    def _make_room(
        self, eviction: NextUseEviction[Key], key: Key, num_bytes: int, need: Need
    ) -> list[Key] | None:
        """Admit a block; returns the evicted ones, or None if it is not admitted.

        Its next use is looked up later, and only if something must be evicted.
        """
        now = self._now
        if eviction.fits(num_bytes):
            return eviction.admit(key, num_bytes, now - 1)
        match need:
            case Need.BY_NEXT_USE:
                latest = _later(now, key[0].distances(np.array([key[1]])))[0]
            case Need.SOON:
                # Live blocks are used about once in as many samples as there are blocks.
                latest = now + 4 * len(eviction)
            case Need.NOW:
                latest = now
        self._look_up_half_read(eviction)
        victims = eviction.admit(key, num_bytes, latest)
        if victims is None and (now >= self._look_up_at or need is Need.NOW):
            self._look_up_at = now + _MAX_LOOKUPS
            self._look_up(eviction, eviction.passed(now, _MAX_LOOKUPS))
            victims = eviction.admit(key, num_bytes, latest)
        if victims is not None:
            eviction.expect(key, now - 1)
        return victims

    def _look_up_half_read(self, eviction: NextUseEviction[Key]) -> None:
        num_keys = min(_MAX_LOOKUPS, len(self._half_read))
        keys = [self._half_read.popleft() for _ in range(num_keys)]
        in_memory = eviction is self.in_memory  # where blocks that are on disk, too, go first
        self._look_up(
            eviction,
            [key for key in keys if key in eviction and not (in_memory and key[0].on_disk[key[1]])],
        )

    def _look_up(self, eviction: NextUseEviction[Key], keys: list[Key]) -> None:
        """Find out when blocks are used next."""
        by_volume: dict[Volume, list[int]] = {}
        for volume, block in keys:
            by_volume.setdefault(volume, []).append(block)
        for volume, blocks in by_volume.items():
            uses = _later(self._now, volume.distances(np.array(blocks)))
            for block, use in zip(blocks, uses, strict=True):
                eviction.expect((volume, block), use)

    def _update_counts(self) -> None:
        self._counts.memory_bytes = self.in_memory.used_bytes
        self._counts.disk_bytes = self.on_disk.used_bytes


def _is_pinned(key: Key) -> bool:
    volume, block = key
    return bool(volume.num_pins[block]) or volume.tier[block] == Tier.FETCHING


def _later(now: int, distances: Integers) -> list[int]:
    """Points of time at distances from now."""
    return [NEVER if distance == NEVER else now + distance for distance in distances.tolist()]
