"""Which blocks the node cache holds in memory and on disk. It moves no bytes.

A bounded cache keeps the blocks that are used soonest: Belady's rule with one addition. What would
be used later than everything in the cache is not admitted at all. So a job that reads its data once
per epoch never loses what it has still to read to what it reads now, as it would with LRU, and
several jobs keep what any of them needs next. Uses are points on a clock of samples; `NEVER` is
later than all of them.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from typing import Generic, TypeVar
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.monitoring.metrics import CacheCounts
from gyre_daemon.storage.cache.blocks import (
    BlockMap,
    BlockMemory,
    Cell,
    Integers,
    Mirror,
    whole_pages,
)
from gyre_daemon.storage.reads import NextUse, Reads, Storage

NEVER = (1 << 63) - 1

Held = TypeVar("Held")


# Blocks whose next use is looked up at once. Each lookup costs as much as finding the block's
# samples in the order; with fewer, used blocks stay longer.
_MAX_LOOKUPS = 32
# Blocks that were read by half, and are looked up before others. Without them a job in block order
# fetches a fourth more blocks where the cache holds 40 % of its data; with 64, as few as without a
# limit.
_MAX_HALF_READ = 1024

# Blocks are in use if a read comes within this many samples for each. With more, a dataset whose
# jobs have ended keeps the cache for longer; with fewer, data for validation lose it meanwhile.
_PATIENCE = 4


class _Entry(Struct):
    """A held key; `version` distinguishes its newest place in the heap from older ones."""

    num_bytes: int
    next_use: int
    version: int


class NextUseEviction(Generic[Held]):
    """The keys held within a number of bytes.

    Attributes:
        limit_bytes: may change; the excess goes when another block is admitted.
        used_bytes: of all keys.
    """

    def __init__(self, limit_bytes: int, is_pinned: Callable[[Held], bool]) -> None:
        """Hold nothing.

        Args:
            limit_bytes: of all keys together.
            is_pinned: whether a key must stay for now.
        """
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._is_pinned = is_pinned
        self._entries: dict[Held, _Entry] = {}
        self._furthest: list[tuple[int, int, Held]] = []  # (-next use, version, key), some outdated
        self._versions = itertools.count()

    def __contains__(self, key: Held) -> bool:
        """Whether a key is held."""
        return key in self._entries

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Held]:
        """All keys."""
        return iter(self._entries)

    def fits(self, num_bytes: int) -> bool:
        """Whether this many bytes can be admitted without evicting anything."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def admit(self, key: Held, num_bytes: int, next_use: int) -> list[Held] | None:
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

    def expect(self, key: Held, next_use: int) -> None:
        """Set the next use of a held key."""
        entry = self._entries[key]
        entry.next_use, entry.version = next_use, next(self._versions)
        heapq.heappush(self._furthest, (-next_use, entry.version, key))
        if len(self._furthest) > 4 * len(self._entries) + 64:
            self._furthest = [
                (-its.next_use, its.version, one) for one, its in self._entries.items()
            ]
            heapq.heapify(self._furthest)

    def drop(self, key: Held) -> None:
        """Hold a key no longer."""
        self.used_bytes -= self._entries.pop(key).num_bytes

    def passed(self, now: int, max_keys: int) -> list[Held]:
        """Keys whose next use has passed, so that it must be found out again; oldest first."""
        late = (
            (entry.next_use, entry.version, key)
            for key, entry in self._entries.items()
            if entry.next_use < now
        )
        return [key for _, _, key in heapq.nsmallest(max_keys, late)]

    def _victims(self, excess_bytes: int, next_use: int) -> list[Held] | None:
        """The keys used furthest in the future that make room.

        None if some of them would be used before `next_use`.
        """
        victims: list[Held] = []
        kept: list[tuple[int, int, Held]] = []
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


class Tier(IntEnum):
    """Where a block is read from."""

    ABSENT = 0
    FETCHING = 1
    MEMORY = 2
    DISK = 3


class Volume:
    """M blocks, which several datasets may have.

    Attributes:
        map: where they lie in the shards.
        sizes: int64 [M], in bytes.
        memory_sizes: int64 [M], the bytes that each takes in memory.
        disk_sizes: int64 [M], the bytes that each takes on disk.
        mirror: the blocks on disk; None without a disk cache.
        tier: uint8 [M], the best tier that has each block; changed by `move`.
        num_present: how many are in memory or on disk.
        absent_bytes: what all blocks that are neither present nor being fetched would take in
            memory.
        on_disk: bool [M], whether the mirror has each block.
        num_pins: int32 [M], how many readers each block has now.
        read_at: when a job last read here, or a dataset with these blocks was opened.
        used_bytes: int64 [M], the bytes copied out of each block since it was last looked at.
    """

    def __init__(self, blocks: BlockMap, mirror: Mirror | None, memory: BlockMemory) -> None:
        self.map = blocks
        self.sizes = blocks.sizes()
        self.memory_sizes = whole_pages(self.sizes)
        self.disk_sizes = np.diff(blocks.offsets())
        self.mirror = mirror
        self.tier = np.full(blocks.num_blocks, Tier.ABSENT, np.uint8)
        self.num_present = 0
        self.absent_bytes = int(self.memory_sizes.sum())
        self.on_disk = np.zeros(blocks.num_blocks, np.bool_)
        self.num_pins = np.zeros(blocks.num_blocks, np.int32)
        self.read_at = 0
        self.used_bytes = np.zeros(blocks.num_blocks, np.int64)
        self._memory = memory
        self._cells: dict[int, Cell] = {}
        self._addresses = np.zeros(blocks.num_blocks, np.uint64)
        self._jobs: list[tuple[WeakMethod[NextUse], int]] = []

    @property
    def num_jobs(self) -> int:
        """The number of jobs whose future is known."""
        return len(self._jobs)

    @property
    def is_complete(self) -> bool:
        """Whether every block is present."""
        return self.num_present == self.map.num_blocks

    def follow(self, reads: Reads, block_bytes: int) -> None:
        """Remember the future of a job, to which the blocks have this size; forget ended jobs."""
        if reads.next_use and not any(job() == reads.next_use for job, _ in self._jobs):
            self._jobs = [each for each in self._jobs if each[0]()]
            self._jobs.append((WeakMethod(reads.next_use), block_bytes))

    def distances(self, blocks: Integers) -> Integers | None:
        """int64 [n], in how many samples from now the next job reads each block.

        None if no job's future is known.
        """
        nearest = np.full(len(blocks), NEVER)
        futures = [(next_use, size) for job, size in self._jobs if (next_use := job())]
        if not futures:
            return None
        for next_use, block_bytes in futures:
            nearest = np.minimum(nearest, next_use(block_bytes, blocks))
        return nearest

    def move(self, block: int, tier: Tier) -> None:
        """Read a block from this tier from now on."""
        before = self.tier[block]
        self.num_present += int(tier >= Tier.MEMORY) - int(before >= Tier.MEMORY)
        became_absent = int(tier == Tier.ABSENT) - int(before == Tier.ABSENT)
        self.absent_bytes += int(self.memory_sizes[block]) * became_absent
        self.tier[block] = tier

    def allocate(self, block: int) -> npt.NDArray[np.uint8]:
        """Memory for a block, of its size, until `free`; see `BlockMemory.take`."""
        cell = self._cells[block] = self._memory.take(int(self.sizes[block]))
        self._addresses[block] = cell.address
        return cell.array()

    def data(self, block: int) -> npt.NDArray[np.uint8]:
        """A block in memory."""
        return self._cells[block].array()

    def owner(self, block: int) -> object:
        """The owner of a block's memory, which keeps it even after `free`."""
        return self._cells[block]

    def free(self, block: int) -> None:
        """Give up a block's memory."""
        self._cells.pop(block, None)

    def sources(self, blocks: Integers, reads: Reads) -> npt.NDArray[np.uint64]:
        """uint64 [n], the addresses of reads from blocks in memory."""
        return self._addresses[blocks] + self.within(blocks, reads).astype(np.uint64)

    def within(self, blocks: Integers, reads: Reads) -> Integers:
        """int64 [n], where each read begins in its block."""
        return reads.start - self.map.start[blocks]


class View(Struct, frozen=True):
    """One dataset's way to a volume.

    Attributes:
        volume: has the blocks.
        storage: where the dataset finds their bytes, with its own credentials.
        block_bytes: about how large the blocks are, as the dataset's jobs ask for them.
        comes_together: whether blocks that are missed together are fetched by one read.
    """

    volume: Volume
    storage: Storage
    block_bytes: int
    comes_together: bool


Key = tuple[Volume, int]


class Need(Enum):
    """How urgently a block is wanted in memory."""

    BY_NEXT_USE = "only if it is used sooner than a held block"
    SOON = "unless all held blocks are used soon"
    NOW = "in place of any block not being read"


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
        self._half_read: deque[Key] = deque(maxlen=_MAX_HALF_READ)

    def count_samples(self, volume: Volume, num_samples: int) -> None:
        """The jobs of a volume have read this many samples more."""
        self._samples_read += num_samples / max(1, volume.num_jobs)
        volume.read_at = self._now

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
        """Count blocks already on disk; returns those beyond the limit."""
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
                latest = self._next_uses(eviction, key[0], [key[1]])[0]
            case Need.SOON:
                # Live blocks are used about once in as many samples as there are blocks.
                latest = now + _PATIENCE * len(eviction)
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
        in_memory = eviction is self.in_memory  # where blocks also on disk go first
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
            uses = self._next_uses(eviction, volume, blocks)
            for block, use in zip(blocks, uses, strict=True):
                eviction.expect((volume, block), use)

    def _next_uses(
        self, eviction: NextUseEviction[Key], volume: Volume, blocks: list[int]
    ) -> list[int]:
        """When blocks are used next, by a job whose future is known or by any other."""
        now, distances = self._now, volume.distances(np.array(blocks))
        if distances is not None:
            return [NEVER if each == NEVER else now + each for each in distances.tolist()]
        num_blocks = volume.map.num_blocks
        # Jobs that still go on would have read it by now.
        is_left = now - volume.read_at > _PATIENCE * max(num_blocks, len(eviction))
        return [NEVER if is_left else now + num_blocks] * len(blocks)

    def _update_counts(self) -> None:
        self._counts.memory_bytes = self.in_memory.used_bytes
        self._counts.disk_bytes = self.on_disk.used_bytes


def _is_pinned(key: Key) -> bool:
    volume, block = key
    return bool(volume.num_pins[block]) or volume.tier[block] == Tier.FETCHING
