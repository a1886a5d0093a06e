"""Blocks: where they lie in shards, their memory, and their mirrors on disk.

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

[Note: Mirrors]

The folder of the node cache has a mirror of blocks for each dataset, bounded together. A mirror is
two files. `NAME.blocks` has a place for every block of a dataset, and takes space only for those
that it holds. `NAME.digests` has 16 bytes for each: the digest of a block that was written, zeros
for others. Nothing is flushed: a killed daemon leaves a block without a digest, and a crashed
machine may leave a digest without its block. So the digest is compared before a block is first
used. Within a daemon a mirror is open once: two would take each other's holes for their own blocks.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import is_ours, make_folder, open_ours
from gyre_daemon.storage.reads import Reads, address_of, gather, is_allowed, read_each

Integers = npt.NDArray[np.int64]

_PAGE_BYTES = 4096
_BEYOND = 1 << 62  # no shard is this long

# A slab is this part of the cache, and at least so large. Smaller slabs are more mappings. Larger
# ones cost nothing but addresses; a slab with few blocks then reserves many.
_SLABS, _MIN_SLAB_BYTES = 1024, 4 << 20

PAGE_BYTES = mmap.PAGESIZE


class BlockMap(Struct, frozen=True, dict=True):
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

    It has no limit: the cache counts admitted blocks in `whole_pages`.
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


BLOCKS_SUFFIX, DIGESTS_SUFFIX = ".blocks", ".digests"

_KEEP_SIZE_AND_PUNCH = 1 | 2
_DIGEST_BYTES = 16
_NO_DIGEST = bytes(_DIGEST_BYTES)  # of a missing block

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_LAYOUT_VERSION = 2
_DISK_BLOCK_BYTES = 512  # the unit of st_blocks


class _Stored(Struct, eq=False):
    """One write of a block; a second write of the same block is another object."""

    digest: bytes
    is_verified: bool = False


class Mirror:
    """The blocks of one dataset on disk. Safe for several threads; every method may wait."""

    def __init__(self, path: Path, sizes: Integers, offsets: Integers) -> None:
        """Open or create the files, and read the digests.

        Args:
            path: without a suffix; other blocks have another path.
            sizes: int64 [M], of the blocks.
            offsets: int64 [M + 1], from `BlockMap.offsets`.

        Raises:
            OSError: the folder cannot be written.
        """
        self._sizes, self._offsets = sizes, offsets
        self._lock = threading.Lock()  # held while the files change
        self._stored: dict[int, _Stored] = {}
        self._file = open_ours(path.with_name(path.name + BLOCKS_SUFFIX), os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._file, int(offsets[-1]))
        digests = path.with_name(path.name + DIGESTS_SUFFIX)
        self._digests = open_ours(digests, os.O_RDWR | os.O_CREAT)
        self._load()
        self._mapping = mmap.mmap(self._file, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._address = address_of(np.frombuffer(self._mapping, np.uint8))
        self._may_gather = is_allowed()

    def __del__(self) -> None:
        """Close the files, also if they could not all be opened."""
        for name in ("_file", "_digests"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def blocks(self) -> Integers:
        """int64, the stored blocks, ascending."""
        return np.array(sorted(self._stored), np.int64)

    def __contains__(self, block: int) -> bool:
        """Whether a block is stored; does not wait."""
        return block in self._stored

    def write(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Store a block that is not stored yet.

        Raises:
            OSError: there is no space, or the disk fails; the block is not stored.
        """
        memory, offset, done = data.data, int(self._offsets[block]), 0
        digest = _digest(memory)
        with self._lock:
            try:
                while done < len(memory):
                    done += os.pwrite(self._file, memory[done:], offset + done)
                self._record(block, digest)
            except OSError:
                self._punch(block, block + 1)
                raise
            self._stored[block] = _Stored(digest)

    def drop(self, blocks: Iterable[int]) -> None:
        """Free the space of blocks.

        Raises:
            OSError: the disk fails; the blocks are no longer stored all the same.
        """
        with self._lock:
            self._drop([block for block in blocks if block in self._stored])

    def copy(self, blocks: Integers, starts: Integers, reads: Reads) -> set[int]:
        """Copy ranges of stored blocks into memory.

        Args:
            blocks: int64 [n].
            starts: int64 [n], within the blocks.
            reads: the sizes and targets.

        Returns:
            The damaged blocks. They are dropped, and none of their ranges counts as copied.
        """
        touched = {block: self._stored.get(block) for block in np.unique(blocks).tolist()}
        damaged = {block for block, its in touched.items() if not self._is_sound(block, its)}
        while True:
            sound = ~np.isin(blocks, list(damaged)) if damaged else slice(None)
            failed = self._copy(
                self._offsets[blocks[sound]] + starts[sound], reads.size[sound], reads.target[sound]
            )
            if failed is None:
                break
            damaged.add(int(blocks[sound][failed]))
        # Another reader may have made a hole of damage meanwhile, and a thread have filled it.
        damaged |= {block for block, its in touched.items() if self._stored.get(block) is not its}
        if damaged:
            with contextlib.suppress(OSError), self._lock:
                stored = {block: self._stored.get(block) for block in damaged}
                self._drop([each for each, its in stored.items() if its and its is touched[each]])
        return damaged

    def _copy(
        self, places: Integers, sizes: Integers, targets: npt.NDArray[np.uint64]
    ) -> int | None:
        """Copy from places in the file; returns the first range that cannot be read, if any."""
        if self._may_gather:
            return gather(self._address + places.astype(np.uint64), sizes, targets)
        return read_each(itertools.repeat(self._file), places, sizes, targets)

    def _is_sound(self, block: int, stored: _Stored | None) -> bool:
        """Whether a block is stored; its digest is compared before its first use."""
        if stored is None:
            return False
        if not stored.is_verified:
            size, offset = int(self._sizes[block]), int(self._offsets[block])
            with contextlib.suppress(OSError):
                data = os.pread(self._file, size, offset)
                stored.is_verified = stored.digest == _digest(data)
        return stored.is_verified

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._stored[block]
        for block in blocks:
            self._punch(block, block + 1)
            self._record(block, _NO_DIGEST)

    def _record(self, block: int, digest: bytes) -> None:
        """Write a digest; a part of one belongs to no block."""
        if os.pwrite(self._digests, digest, block * _DIGEST_BYTES) != _DIGEST_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _load(self) -> None:
        """Read the digests, and free all other space."""
        num_bytes = len(self._sizes) * _DIGEST_BYTES
        with os.fdopen(self._digests, "rb", closefd=False) as file:
            data = file.read(num_bytes).ljust(num_bytes, b"\0")
        digests = np.frombuffer(data, np.uint8).reshape(-1, _DIGEST_BYTES)
        for block in np.flatnonzero(digests.any(axis=1)).tolist():
            self._stored[block] = _Stored(digests[block].tobytes())
        borders = [-1, *self._stored, len(self._sizes)]
        for before, after in itertools.pairwise(borders):
            self._punch(before + 1, after)

    def _punch(self, first: int, end: int) -> None:
        """Make a hole of the blocks `[first, end)`: they then take no space."""
        offset, stop = int(self._offsets[first]), int(self._offsets[end])
        if offset < stop:
            punch(self._file, offset, stop - offset)


def punch(descriptor: int, offset: int, num_bytes: int) -> None:
    """Make a hole in a file.

    Raises:
        OSError: the file system cannot make holes, or fails.
    """
    if _fallocate(descriptor, _KEEP_SIZE_AND_PUNCH, offset, num_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


class DiskCache(Struct):
    """A folder that belongs to this daemon until it is closed.

    Attributes:
        folder: where mirrors lie.
        limit_bytes: the most bytes of all blocks together.
        unopened: the bytes of each mirror that an earlier daemon left and that has not been opened
            since, by name, the oldest first.
    """

    folder: Path
    limit_bytes: int
    unopened: dict[str, int]
    _lock: int
    _mirrors: WeakValueDictionary[str, Mirror] = field(default_factory=WeakValueDictionary)
    _names: threading.Lock = field(default_factory=threading.Lock)  # held while one is opened

    def close(self) -> None:
        """Release the folder for the next daemon; open mirrors stay readable."""
        os.close(self._lock)

    @property
    def free_bytes(self) -> int:
        """The most bytes of all opened mirrors together."""
        return max(0, self.limit_bytes - sum(self.unopened.values()))

    def open_mirror(self, identity: str, blocks: BlockMap) -> Mirror:
        """The mirror of a dataset's blocks; the same one for as long as somebody has it.

        Args:
            identity: of the dataset's shards; changes when any of them does.
            blocks: of the dataset.

        Raises:
            OSError: the folder cannot be written.
        """
        key = f"{_LAYOUT_VERSION}\n{identity}\n".encode() + blocks.digest()
        name = hashlib.blake2b(key, digest_size=16).hexdigest()
        with self._names:
            mirror = self._mirrors.get(name)
            if mirror is None:
                mirror = Mirror(self.folder / name, blocks.sizes(), blocks.offsets())
                self._mirrors[name] = mirror
            self.unopened.pop(name, None)
        return mirror

    def remove_oldest(self) -> None:
        """Remove the unopened mirror that was written longest ago, if there is any.

        Raises:
            OSError: it cannot be removed.
        """
        with self._names:
            name = next(iter(self.unopened), None)
            if name is None:
                return
            for suffix in (DIGESTS_SUFFIX, BLOCKS_SUFFIX):
                self.folder.joinpath(name + suffix).unlink(missing_ok=True)
            del self.unopened[name]


def open_disk_cache(folder: Path, limit_bytes: int) -> DiskCache | None:
    """Lock a folder for the cache.

    Returns:
        None, after a warning, if the folder cannot be used; the daemon works without it.
    """
    reason = "another daemon uses it"
    try:
        make_folder(folder)
        lock = open_ours(folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_holes(folder)
            return DiskCache(folder, limit_bytes, _leftovers(folder), lock)
        except BaseException:
            os.close(lock)
            raise
    except BlockingIOError:
        pass
    except OSError as error:
        reason = error.strerror or repr(error)
    log_event("no disk cache", {"folder": folder, "reason": reason}, logging.WARNING)
    return None


def _check_holes(folder: Path) -> None:
    """Check that the file system can make holes in files, by which space is given back."""
    import tempfile  # noqa: PLC0415  # by a daemon with a disk cache alone

    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(8192))
        file.flush()
        punch(file.fileno(), 0, 4096)


def _remove_foreign(folder: Path) -> None:
    """Remove files that others could put into the folder: they may be forged."""
    entries = (*folder.glob("*" + BLOCKS_SUFFIX), *folder.glob("*" + DIGESTS_SUFFIX))
    foreign = [path for path in entries if path.is_symlink() or not is_ours(path.lstat())]
    for path in foreign:
        path.unlink()
    if foreign:
        facts = {"folder": folder, "files": len(foreign), "reason": "another user made them"}
        log_event("cache files removed", facts, logging.WARNING)


def _leftovers(folder: Path) -> dict[str, int]:
    for journal in folder.glob("*.journal*"):  # of an earlier version
        journal.unlink()
    _remove_foreign(folder)
    found = [
        (path.stat(), path.name.removesuffix(BLOCKS_SUFFIX))
        for path in folder.glob("*" + BLOCKS_SUFFIX)
    ]
    found.sort(key=lambda its: its[0].st_mtime_ns)
    return {name: stat.st_blocks * _DISK_BLOCK_BYTES for stat, name in found}
