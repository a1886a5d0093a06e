"""Where the blocks of a dataset lie in its shards, and the memory that the node cache has for them.

[Note: Blocks share mappings]

Linux allows a process 65,530 mappings by default (`vm.max_map_count`). If each block were a mapping
of its own, those side by side would count as one, until a block between them is evicted. So
evictions here and there would use up the limit. From then on `munmap` fails where it has to cut a
mapping in two, and the memory stays.

So blocks lie in the cells of *slabs*. A slab is one mapping; it is never cut and never unmapped. An
evicted block's pages go back with `madvise(MADV_DONTNEED)`, which needs no further mapping, and its
cell is taken by another block of about the size. Addresses and their page tables stay,
8 bytes for each page that was ever used.

The cells of a slab have one size, a power of two. New slabs are made only while all cells of that
size are taken, and a block fills more than half of its cell. So cells of one size never need more
addresses than twice the cache, and one more slab: about 2,048 slabs. There are some 20 sizes, so
even a cache that was full of each size in turn stays below the limit.
"""

import contextlib
import hashlib
import mmap
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.base import Reads

Integers = npt.NDArray[np.int64]

_PAGE_BYTES = 4096
_BEYOND = 1 << 62  # no shard is this long

# A slab is this part of the cache, and at least so large. Smaller slabs are more mappings. Larger
# ones cost nothing but addresses; a slab with few blocks then reserves many.
_SLABS, _MIN_SLAB_BYTES = 1024, 4 << 20

PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class BlockMap:
    """The M blocks of a dataset: ranges of shards, in their order.

    A read that begins in a block, before the next one begins, belongs to it.

    Attributes:
        shard: int64 [M], ascending.
        start: int64 [M], ascending within a shard.
        stop: int64 [M].
    """

    shard: Integers
    start: Integers
    stop: Integers

    @classmethod
    def of(cls, shard: Integers, start: Integers, stop: Integers) -> "BlockMap":
        """Blocks of which some may be empty, with any start."""
        start, stop = start.copy(), stop.copy()
        for block in reversed(np.flatnonzero(start >= stop).tolist()):
            # An empty block is where the next one begins, or beyond all of its shard.
            is_last = block + 1 == len(shard) or shard[block + 1] != shard[block]
            start[block] = stop[block] = _BEYOND if is_last else start[block + 1]
        return cls(shard, start, stop)

    @property
    def num_blocks(self) -> int:
        """M."""
        return len(self.shard)

    def sizes(self) -> Integers:
        """int64 [M], in bytes."""
        return self.stop - self.start

    def offsets(self) -> Integers:
        """int64 [M + 1]: where each block begins in a file with all of them, and the file's end.

        Every block begins on a page.
        """
        pages = -(-self.sizes() // _PAGE_BYTES)
        return np.concatenate(([0], np.cumsum(pages))) * _PAGE_BYTES

    def blocks_of(self, reads: Reads) -> Integers:
        """int64 [n], the block that contains each read; -1 where none contains all of it."""
        if not self.num_blocks:
            return np.full(len(reads), -1, np.int64)
        begins, length = self._line
        where = reads.shard * length + np.minimum(reads.start, length - 2)
        blocks = np.searchsorted(begins, where, side="right") - 1
        is_inside = reads.start + reads.size <= self.stop[blocks]
        return np.where((self.shard[blocks] == reads.shard) & is_inside & (blocks >= 0), blocks, -1)

    @cached_property
    def _line(self) -> tuple[Integers, int]:
        """Where blocks begin if all shards lie in one line, and the length of each shard there."""
        length = int(self.stop[self.stop < _BEYOND].max(initial=0)) + 2
        return self.shard * length + np.minimum(self.start, length - 1), length

    def digest(self) -> bytes:
        """Changes whenever a block moves."""
        ranges = np.stack((self.shard, self.start, self.stop))
        return hashlib.blake2b(ranges.tobytes(), digest_size=16).digest()


class _Slab:
    """One mapping, divided into cells of one size."""

    def __init__(self, cell_bytes: int, num_cells: int) -> None:
        self.cell_bytes = cell_bytes
        self.memory = mmap.mmap(
            -1, cell_bytes * num_cells, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        # A huge page would be memory of several blocks, taken with the first byte of one of them.
        with contextlib.suppress(OSError):  # the kernel has none
            self.memory.madvise(mmap.MADV_NOHUGEPAGE)


class Cell:
    """The memory of one block.

    Whoever refers to it, or to an array of it, may use it: a thread goes on if its task is
    cancelled. The last one who does not refer to it any more gives the memory back, in any thread.

    Attributes:
        address: of its first byte.
    """

    __slots__ = ("_free", "_num_bytes", "_number", "_slab", "address")

    def __init__(
        self, free: "list[tuple[_Slab, int]]", slab: _Slab, number: int, num_bytes: int
    ) -> None:
        """Take a cell; see `BlockMemory.take`."""
        self._free, self._slab, self._number = free, slab, number
        self._num_bytes = num_bytes
        self.address = slab.address + number * slab.cell_bytes

    @property
    def __array_interface__(self) -> dict[str, object]:
        """The block's bytes, as numpy asks for them; its array keeps the cell."""
        return {
            "version": 3,
            "data": (self.address, False),
            "shape": (self._num_bytes,),
            "typestr": "|u1",
        }

    def array(self) -> npt.NDArray[np.uint8]:
        """The block's bytes, writable; the array refers to the cell."""
        return np.asarray(self)

    def __del__(self) -> None:
        """Give the memory back, and let another block have the cell."""
        begin = self._number * self._slab.cell_bytes
        with contextlib.suppress(OSError):  # locked pages stay; the next block has them
            self._slab.memory.madvise(mmap.MADV_DONTNEED, begin, self._slab.cell_bytes)
        self._free.append((self._slab, self._number))


class BlockMemory:
    """The memory of all blocks of a node cache; see [Note: Blocks share mappings].

    It has no limit of its own: the cache counts admitted blocks in `whole_pages`.
    """

    def __init__(self, cache_bytes: int) -> None:
        """Map nothing yet.

        Args:
            cache_bytes: of all blocks that are held at once.
        """
        self._slab_bytes = max(_MIN_SLAB_BYTES, _power_of_two(cache_bytes // _SLABS))
        # by size; any thread adds to these, the event loop alone takes from them
        self._free: dict[int, list[tuple[_Slab, int]]] = {}

    def take(self, num_bytes: int) -> Cell:
        """Memory for a block, until nothing refers to it. On the event loop only.

        Raises:
            OSError: the system maps no more memory.
        """
        cell_bytes = max(PAGE_BYTES, _power_of_two(num_bytes))
        free = self._free.setdefault(cell_bytes, [])
        if not free:
            num_cells = max(1, self._slab_bytes // cell_bytes)
            slab = _Slab(cell_bytes, num_cells)
            free.extend((slab, number) for number in reversed(range(num_cells)))
        slab, number = free.pop()
        return Cell(free, slab, number, num_bytes)


def whole_pages(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """int64 [M], the memory that blocks of these sizes take."""
    return -(-sizes // PAGE_BYTES) * PAGE_BYTES


def _power_of_two(num_bytes: int) -> int:
    """The next one that is not smaller."""
    return 1 << max(0, num_bytes - 1).bit_length()
