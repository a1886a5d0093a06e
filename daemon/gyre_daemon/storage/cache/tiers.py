"""Which blocks the node cache holds in memory and on disk. It decides and keeps the books, and moves no byte."""

from collections import deque
from enum import Enum

import numpy as np

from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.storage.cache.blocks import Integers
from gyre_daemon.storage.cache.eviction import NEVER, NextUseEviction
from gyre_daemon.storage.cache.volume import Place, Volume

Key = tuple[Volume, int]

_MAX_ASKED = 32  # blocks whose next use is found out at once: each of their samples is looked up


class Need(Enum):
    """How urgently a block is wanted in memory."""

    BY_ITS_FUTURE = "only if it is used sooner than something held"
    SOON = "unless all that is held is used soon"
    AT_ONCE = "whatever must go for it, but for what is read at this moment"


class Tiers:
    """The books of a cache in memory and on disk.

    Attributes:
        in_memory: blocks with memory, also those on their way.
        on_disk: blocks with a place on disk, also those that are being written.
    """

    def __init__(self, memory_bytes: int, disk_bytes: int, counts: CacheCounts) -> None:
        self.in_memory: NextUseEviction[Key] = NextUseEviction(memory_bytes, _is_pinned)
        self.on_disk: NextUseEviction[Key] = NextUseEviction(disk_bytes, _is_pinned)
        self._counts = counts
        self._samples_read = 0.0  # by each job, about: the clock of next uses
        self._ask_again_at = 0
        self._half_read: deque[Key] = deque()

    def note_reads(self, num_samples: float) -> None:
        """So many samples were asked for by each job."""
        self._samples_read += num_samples

    def note_copied(self, volume: Volume, blocks: Integers, sizes: Integers) -> None:
        """So many bytes of blocks were used: one of which half was used since the last look may have served its time."""
        np.add.at(volume.used_bytes, blocks, sizes)
        touched = np.unique(blocks)
        for block in touched[2 * volume.used_bytes[touched] >= volume.sizes[touched]].tolist():
            volume.used_bytes[block] = 0
            self._half_read.append((volume, block))

    def take_memory(self, volume: Volume, block: int, need: Need) -> bool:
        """Reserve memory for a block that is absent; what must go for it is freed. False where it cannot be had."""
        victims = self._make_room(self.in_memory, (volume, block), int(volume.sizes[block]), need)
        if victims is None:
            return False
        for of, victim in victims:
            of.free(victim)
            of.move(victim, Place.DISK if of.on_disk[victim] else Place.ABSENT)
            self._counts.num_evicted += not of.on_disk[victim]
        volume.move(block, Place.FETCHING)
        volume.used_bytes[block] = 0
        return True

    def arrived(self, volume: Volume, block: int, *, is_whole: bool) -> None:
        """A block that was on its way is in memory, or will never be."""
        volume.move(block, Place.MEMORY if is_whole else Place.ABSENT)
        if is_whole:
            self._counts.num_blocks_fetched += 1
            self._counts.num_bytes_fetched += int(volume.sizes[block])
        else:
            volume.free(block)
            self.in_memory.drop((volume, block))
        self._tell()

    def take_disk(self, volume: Volume, block: int) -> list[Key] | None:
        """Reserve space on disk for a block in memory; gives whose space must be freed for it first, or None."""
        victims = self._make_room(self.on_disk, (volume, block), int(volume.disk_sizes[block]), Need.BY_ITS_FUTURE)
        for of, victim in victims or ():
            of.on_disk[victim] = False
            if of.place[victim] == Place.DISK:
                of.move(victim, Place.ABSENT)
                self._counts.num_evicted += 1
        return victims

    def written(self, volume: Volume, block: int, *, is_whole: bool) -> None:
        """A block is on disk, so that its memory is the first to go; or it could not be written."""
        if is_whole:
            volume.on_disk[block] = True
            self.in_memory.expect((volume, block), NEVER)
        else:
            self.on_disk.drop((volume, block))
        self._tell()

    def adopt(self, volume: Volume, found: Integers) -> list[int]:
        """Count what is on disk already; gives what is beyond the limit."""
        surplus = []
        for block in found.tolist():
            num_bytes = int(volume.disk_sizes[block])
            if self.on_disk.fits(num_bytes):
                self.on_disk.admit((volume, block), num_bytes, self._now - 1)
                volume.on_disk[block] = True
                volume.move(block, Place.DISK)
            else:
                surplus.append(block)
        self._tell()
        return surplus

    def lost(self, volume: Volume, damaged: set[int]) -> None:
        """Blocks are no longer on disk, since they were not what was written."""
        for block in damaged:
            if volume.on_disk[block] and volume.mirror and block not in volume.mirror:  # no other reader was faster
                volume.on_disk[block] = False
                if volume.place[block] == Place.DISK:
                    volume.move(block, Place.ABSENT)
                self.on_disk.drop((volume, block))
                self._counts.num_corrupt += 1
        self._tell()

    @property
    def _now(self) -> int:
        return int(self._samples_read)

    def _make_room(self, eviction: NextUseEviction[Key], key: Key, num_bytes: int, need: Need) -> list[Key] | None:
        """Take a block in; what had to go for it, or None where it is not taken in.

        When it is used next is found out later, and only if something must go.
        """
        now = self._now
        if eviction.fits(num_bytes):
            return eviction.admit(key, num_bytes, now - 1)
        match need:
            case Need.BY_ITS_FUTURE:
                latest = _later(now, key[0].distances(np.array([key[1]])))[0]
            case Need.SOON:
                latest = now + 4 * len(eviction)  # held blocks that are live are used about every so many samples
            case Need.AT_ONCE:
                latest = now
        self._ask_half_read(eviction)
        victims = eviction.admit(key, num_bytes, latest)
        if victims is None and (now >= self._ask_again_at or need is Need.AT_ONCE):
            self._ask_again_at = now + _MAX_ASKED
            self._ask(eviction, eviction.passed(now, _MAX_ASKED))
            victims = eviction.admit(key, num_bytes, latest)
        if victims is not None:
            eviction.expect(key, now - 1)
        return victims

    def _ask_half_read(self, eviction: NextUseEviction[Key]) -> None:
        keys = [self._half_read.popleft() for _ in range(min(_MAX_ASKED, len(self._half_read)))]
        self._ask(
            eviction, [key for key in keys if key in eviction and not (key[0].on_disk[key[1]] and eviction is self.in_memory)]
        )

    def _ask(self, eviction: NextUseEviction[Key], keys: list[Key]) -> None:
        """Find out when some blocks are used next."""
        by_volume: dict[Volume, list[int]] = {}
        for volume, block in keys:
            by_volume.setdefault(volume, []).append(block)
        for volume, blocks in by_volume.items():
            for block, use in zip(blocks, _later(self._now, volume.distances(np.array(blocks))), strict=True):
                eviction.expect((volume, block), use)

    def _tell(self) -> None:
        self._counts.memory_bytes = self.in_memory.used_bytes
        self._counts.disk_bytes = self.on_disk.used_bytes


def _is_pinned(key: Key) -> bool:
    volume, block = key
    return bool(volume.num_pins[block]) or volume.place[block] == Place.FETCHING


def _later(now: int, distances: Integers) -> list[int]:
    """Points of time at distances from now."""
    return [NEVER if distance == NEVER else now + distance for distance in distances.tolist()]
