"""What the cache knows of one dataset's blocks of one size. State only: `node` decides and moves."""

import mmap
from enum import IntEnum
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.base import NextUse, Reads, Storage
from gyre_daemon.storage.cache.blocks import BlockMap, Integers
from gyre_daemon.storage.cache.eviction import NEVER
from gyre_daemon.storage.cache.mirror import Mirror
from gyre_daemon.storage.local.gather import address_of


class Place(IntEnum):
    """Where a block is read from."""

    ABSENT = 0
    FETCHING = 1
    MEMORY = 2
    DISK = 3


class Volume:
    """The blocks of a dataset.

    Attributes:
        storage: where they come from.
        map: where they lie there.
        block_bytes: about how large they are: with the dataset it says which samples each has.
        sizes: int64 [M], in bytes.
        disk_sizes: int64 [M], what each takes on disk.
        mirror: those on disk; None without a disk cache.
        place: uint8 [M], where each is read from: the best place that has it; changed by `move`.
        num_there: how many are in memory or on disk.
        absent_bytes: of all that are neither there nor on their way.
        on_disk: bool [M], whether the mirror has it.
        num_pins: int32 [M], who reads each now.
        used_bytes: int64 [M], what was copied out of each since it was last looked at.
    """

    def __init__(self, storage: Storage, blocks: BlockMap, block_bytes: int, mirror: Mirror | None) -> None:
        self.storage = storage
        self.map = blocks
        self.block_bytes = block_bytes
        self.sizes = blocks.sizes()
        self.disk_sizes = np.diff(blocks.offsets())
        self.mirror = mirror
        self.place = np.full(blocks.num_blocks, Place.ABSENT, np.uint8)
        self.num_there = 0
        self.absent_bytes = int(self.sizes.sum())
        self.on_disk = np.zeros(blocks.num_blocks, np.bool_)
        self.num_pins = np.zeros(blocks.num_blocks, np.int32)
        self.used_bytes = np.zeros(blocks.num_blocks, np.int64)
        self._memory: dict[int, mmap.mmap] = {}
        self._addresses = np.zeros(blocks.num_blocks, np.uint64)
        self._jobs: list[WeakMethod[NextUse]] = []

    @property
    def num_jobs(self) -> int:
        """Those whose future is known."""
        return len(self._jobs)

    @property
    def is_complete(self) -> bool:
        """Every block is there."""
        return self.num_there == self.map.num_blocks

    def follow(self, reads: Reads) -> None:
        """Remember what else the job of these reads will read; forget jobs that are over."""
        if reads.next_use and not any(job() == reads.next_use for job in self._jobs):
            self._jobs = [job for job in self._jobs if job()]
            self._jobs.append(WeakMethod(reads.next_use))

    def distances(self, blocks: Integers) -> Integers:
        """int64 [n], in how many samples from now a job reads each block; an epoch's share where no job tells."""
        nearest = np.full(len(blocks), NEVER)
        told = False
        for job in self._jobs:
            next_use = job()
            if next_use:
                told = True
                nearest = np.minimum(nearest, next_use(self.block_bytes, blocks))
        return nearest if told else np.full(len(blocks), self.map.num_blocks)

    def move(self, block: int, place: Place) -> None:
        """From now on a block is read from there."""
        before = self.place[block]
        self.num_there += int(place >= Place.MEMORY) - int(before >= Place.MEMORY)
        self.absent_bytes += int(self.sizes[block]) * (int(place == Place.ABSENT) - int(before == Place.ABSENT))
        self.place[block] = place

    def allocate(self, block: int) -> npt.NDArray[np.uint8]:
        """Memory for a block, of its size, until `free`; apart from the heap, so that all of it comes back."""
        memory = self._memory[block] = mmap.mmap(-1, int(self.sizes[block]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.uint8)
        self._addresses[block] = address_of(array)[0]
        return array

    def data(self, block: int) -> npt.NDArray[np.uint8]:
        """A block in memory."""
        return np.frombuffer(self._memory[block], np.uint8)

    def holder(self, block: int) -> object:
        """What keeps a block's memory, even after `free`, as long as it is referred to."""
        return self._memory[block]

    def free(self, block: int) -> None:
        """Let go of a block's memory."""
        self._memory.pop(block, None)

    def sources(self, blocks: Integers, reads: Reads) -> npt.NDArray[np.uint64]:
        """uint64 [n], addresses of what is read, all of it in memory."""
        return self._addresses[blocks] + self.within(blocks, reads).astype(np.uint64)

    def within(self, blocks: Integers, reads: Reads) -> Integers:
        """int64 [n], where each read begins in its block."""
        return reads.start - self.map.start[blocks]
