"""The cache's state of the blocks of one dataset and one size. No I/O."""

from enum import IntEnum
from weakref import WeakMethod

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.base import NextUse, Reads, Storage
from gyre_daemon.storage.cache.blocks import BlockMap, Integers
from gyre_daemon.storage.cache.cells import BlockMemory, Cell, whole_pages
from gyre_daemon.storage.cache.eviction import NEVER
from gyre_daemon.storage.cache.mirror import Mirror


class Tier(IntEnum):
    """Where a block is read from."""

    ABSENT = 0
    FETCHING = 1
    MEMORY = 2
    DISK = 3


class Volume:
    """The M blocks of a dataset.

    Attributes:
        storage: where they come from.
        map: where they lie there.
        block_bytes: about how large they are.
        sizes: int64 [M], in bytes.
        memory_sizes: int64 [M], the bytes that each takes in memory.
        disk_sizes: int64 [M], the bytes that each takes on disk.
        comes_together: whether blocks that are missed together are fetched by one read.
        mirror: the blocks on disk; None without a disk cache.
        tier: uint8 [M], the best tier that has each block; changed by `move`.
        num_present: how many are in memory or on disk.
        absent_bytes: what all blocks that are neither present nor being fetched would take in
            memory.
        on_disk: bool [M], whether the mirror has each block.
        num_pins: int32 [M], how many readers each block has now.
        used_bytes: int64 [M], the bytes copied out of each block since it was last looked at.
    """

    def __init__(
        self,
        storage: Storage,
        blocks: BlockMap,
        block_bytes: int,
        mirror: Mirror | None,
        memory: BlockMemory,
        *,
        comes_together: bool = False,
    ) -> None:
        self.storage = storage
        self.comes_together = comes_together
        self.map = blocks
        self.block_bytes = block_bytes
        self.sizes = blocks.sizes()
        self.memory_sizes = whole_pages(self.sizes)
        self.disk_sizes = np.diff(blocks.offsets())
        self.mirror = mirror
        self.tier = np.full(blocks.num_blocks, Tier.ABSENT, np.uint8)
        self.num_present = 0
        self.absent_bytes = int(self.memory_sizes.sum())
        self.on_disk = np.zeros(blocks.num_blocks, np.bool_)
        self.num_pins = np.zeros(blocks.num_blocks, np.int32)
        self.used_bytes = np.zeros(blocks.num_blocks, np.int64)
        self._memory = memory
        self._cells: dict[int, Cell] = {}
        self._addresses = np.zeros(blocks.num_blocks, np.uint64)
        self._jobs: list[WeakMethod[NextUse]] = []

    @property
    def num_jobs(self) -> int:
        """The number of jobs whose future is known."""
        return len(self._jobs)

    @property
    def is_complete(self) -> bool:
        """Whether every block is present."""
        return self.num_present == self.map.num_blocks

    def follow(self, reads: Reads) -> None:
        """Remember the future of a job; forget jobs that are over."""
        if reads.next_use and not any(job() == reads.next_use for job in self._jobs):
            self._jobs = [job for job in self._jobs if job()]
            self._jobs.append(WeakMethod(reads.next_use))

    def distances(self, blocks: Integers) -> Integers:
        """int64 [n], in how many samples from now the next job reads each block.

        The number of all blocks if no job's future is known.
        """
        nearest = np.full(len(blocks), NEVER)
        futures = [next_use for job in self._jobs if (next_use := job())]
        if not futures:
            return np.full(len(blocks), self.map.num_blocks)
        for next_use in futures:
            nearest = np.minimum(nearest, next_use(self.block_bytes, blocks))
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
