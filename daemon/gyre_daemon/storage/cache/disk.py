"""The folder of the node cache: a mirror of blocks for each dataset, bounded together.

A mirror is two files. `NAME.blocks` has a place for every block of a dataset, and takes space only
for those that it holds. `NAME.journal` records each block that was written, with a digest of its
bytes, and each that was dropped. Nothing is flushed: a killed daemon leaves a block without a
record, and a crashed machine may leave a record without its block. So the digest is compared before
a block is first used, and again after another process has written to the file.
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
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.ownership import is_ours, make_folder, open_ours
from gyre_daemon.storage.base import Reads
from gyre_daemon.storage.cache.blocks import BlockMap, Integers
from gyre_daemon.storage.local.gather import address_of, gather, is_allowed, read_each

BLOCKS_SUFFIX, JOURNAL_SUFFIX = ".blocks", ".journal"

_RECORD = struct.Struct("<Q16s")  # block and digest, followed by a CRC of both
_CRC = struct.Struct("<I")
_RECORD_BYTES = _RECORD.size + _CRC.size
_KEEP_SIZE_AND_PUNCH = 1 | 2
_DIGEST_BYTES = 16
_NO_DIGEST = bytes(_DIGEST_BYTES)  # of a block that was dropped
# How often a copy is repeated while another process writes to the file; then its blocks count as
# damaged, and are fetched again.
_MAX_LOOKS = 3

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_LAYOUT_VERSION = 1
_DISK_BLOCK_BYTES = 512  # the unit of st_blocks


@dataclass(slots=True, eq=False)
class _Stored:
    """One write of a block; a second write of the same block is another object."""

    digest: bytes


class Mirror:
    """The blocks of one dataset on disk. Safe for several threads; every method may wait."""

    def __init__(self, path: Path, sizes: Integers, offsets: Integers) -> None:
        """Open or create the files, and read the journal.

        Args:
            path: without a suffix; other blocks have another path.
            sizes: int64 [M], of the blocks.
            offsets: int64 [M + 1], from `BlockMap.offsets`.

        Raises:
            OSError: the folder cannot be written.
        """
        self._sizes, self._offsets = sizes, offsets
        self._lock = threading.Lock()
        self._stored: dict[int, _Stored] = {}
        self._is_verified = np.zeros(len(sizes), np.bool_)
        self._file = open_ours(path.with_name(path.name + BLOCKS_SUFFIX), os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(self._file, int(offsets[-1]))
            self._load_journal(path.with_name(path.name + JOURNAL_SUFFIX))
            self._mapping = mmap.mmap(self._file, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError:
            os.close(self._file)
            raise
        self._address = address_of(np.frombuffer(self._mapping, np.uint8))
        self._may_gather = is_allowed()
        self._written_at = os.fstat(self._file).st_mtime_ns

    def __del__(self) -> None:
        """Close the files."""
        for name in ("_file", "_journal"):
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
        with self._own_change():
            try:
                while done < len(memory):
                    done += os.pwrite(self._file, memory[done:], offset + done)
                self._record(block, digest)
            except OSError:
                self._punch(block, block + 1)
                raise
            self._stored[block] = _Stored(digest)
            self._is_verified[block] = True

    def drop(self, blocks: Iterable[int]) -> None:
        """Free the space of blocks.

        Raises:
            OSError: the disk fails; the blocks are no longer stored all the same.
        """
        with self._own_change():
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
        touched = np.unique(blocks)
        damaged: dict[int, _Stored | None] = {}
        for _ in range(_MAX_LOOKS):
            self._look()
            damaged |= self._unsound(touched[~self._is_verified[touched]])
            sound = ~np.isin(blocks, list(damaged)) if damaged else slice(None)
            failed = self._copy(
                self._offsets[blocks[sound]] + starts[sound], reads.size[sound], reads.target[sound]
            )
            if failed is not None:
                block = int(blocks[sound][failed])
                damaged[block] = self._stored.get(block)
            elif self._look() and (damaged or self._is_verified[touched].all()):
                break
        else:
            damaged = {block: self._stored.get(block) for block in touched.tolist()}
        if damaged:
            with contextlib.suppress(OSError), self._own_change():
                # Another thread may have written a block again meanwhile.
                same = [block for block, its in damaged.items() if self._stored.get(block) is its]
                self._drop([block for block in same if block in self._stored])
        return set(damaged)

    def _copy(
        self, places: Integers, sizes: Integers, targets: npt.NDArray[np.uint64]
    ) -> int | None:
        """Copy from places in the file; returns the first range that cannot be read, if any."""
        if self._may_gather:
            return gather(self._address + places.astype(np.uint64), sizes, targets)
        return read_each(itertools.repeat(self._file), places, sizes, targets)

    def _unsound(self, blocks: Integers) -> "dict[int, _Stored | None]":
        """Compare blocks with their digests; returns those that differ or are not stored."""
        unsound: dict[int, _Stored | None] = {}
        for block in blocks.tolist():
            stored = self._stored.get(block)
            if not stored or not self._matches(block, stored.digest):
                unsound[block] = stored
                continue
            with self._lock:
                # Another thread may have dropped it meanwhile.
                self._is_verified[block] = self._stored.get(block) is stored
        return unsound

    def _matches(self, block: int, digest: bytes) -> bool:
        size, offset = int(self._sizes[block]), int(self._offsets[block])
        try:
            return digest == _digest(os.pread(self._file, size, offset))
        except OSError:
            return False

    def _look(self) -> bool:
        """Whether only this process has written to the file since the last look.

        Otherwise every block must be verified again. True while another thread writes, since its
        writes cannot be told from those of another process.
        """
        if not self._lock.acquire(blocking=False):
            return True
        try:
            written_at = os.fstat(self._file).st_mtime_ns
            if written_at == self._written_at:
                return True
            self._is_verified[:] = False
            self._written_at = written_at
            return False
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _own_change(self) -> Iterator[None]:
        """This thread changes the file inside the context; its blocks stay verified."""
        with self._lock:
            try:
                yield
            finally:
                self._written_at = os.fstat(self._file).st_mtime_ns

    def _drop(self, blocks: Sequence[int]) -> None:
        self._is_verified[list(blocks)] = False
        for block in blocks:
            del self._stored[block]
        for block in blocks:
            self._punch(block, block + 1)
        for block in blocks:
            self._record(block, _NO_DIGEST)

    def _record(self, block: int, digest: bytes) -> None:
        """Append a record to the journal, whole or not at all."""
        record = _encode_record(block, digest)
        end = os.fstat(self._journal).st_size
        if os.write(self._journal, record) != len(record):
            os.ftruncate(self._journal, end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _load_journal(self, path: Path) -> None:
        """Read the journal, write it again without outdated records, and free all other space."""
        with os.fdopen(open_ours(path, os.O_RDONLY | os.O_CREAT), "rb") as journal:
            data = journal.read()
        for begin in range(0, len(data) - _RECORD_BYTES + 1, _RECORD_BYTES):
            record = data[begin : begin + _RECORD.size]
            if _CRC.unpack_from(data, begin + _RECORD.size) == (zlib.crc32(record),):
                block, digest = _RECORD.unpack(record)
                self._stored.pop(block, None)
                if digest != _NO_DIGEST and block < len(self._sizes):
                    self._stored[block] = _Stored(digest)
        unfinished = path.with_name(path.name + ".tmp")
        unfinished.unlink(missing_ok=True)
        records = (_encode_record(block, its.digest) for block, its in self._stored.items())
        new = open_ours(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        with os.fdopen(new, "wb", closefd=False) as file:
            self._journal = new
            file.write(b"".join(records))
        unfinished.replace(path)
        borders = [-1, *sorted(self._stored), len(self._sizes)]
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


def _encode_record(block: int, digest: bytes) -> bytes:
    record = _RECORD.pack(block, digest)
    return record + _CRC.pack(zlib.crc32(record))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclass(slots=True)
class DiskCache:
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
    _lock: int = field(repr=False)

    def close(self) -> None:
        """Release the folder for the next daemon; mirrors that are open stay readable."""
        os.close(self._lock)

    @property
    def free_bytes(self) -> int:
        """The most bytes of all opened mirrors together."""
        return max(0, self.limit_bytes - sum(self.unopened.values()))

    def open_mirror(self, identity: str, blocks: BlockMap) -> Mirror:
        """The mirror of a dataset's blocks.

        Args:
            identity: of the dataset's shards; changes when any of them does.
            blocks: of the dataset.

        Raises:
            OSError: the folder cannot be written.
        """
        key = f"{_LAYOUT_VERSION}\n{identity}\n".encode() + blocks.digest()
        name = hashlib.blake2b(key, digest_size=16).hexdigest()
        mirror = Mirror(self.folder / name, blocks.sizes(), blocks.offsets())
        self.unopened.pop(name, None)
        return mirror

    def remove_oldest(self) -> None:
        """Remove the unopened mirror that was written longest ago.

        Raises:
            OSError: it cannot be removed.
        """
        name = next(iter(self.unopened))
        for suffix in (JOURNAL_SUFFIX, BLOCKS_SUFFIX):
            self.folder.joinpath(name + suffix).unlink(missing_ok=True)
        self.unopened.pop(name, None)


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
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(8192))
        file.flush()
        punch(file.fileno(), 0, 4096)


def _remove_foreign(folder: Path) -> None:
    """Remove files that others could put into the folder: they may be forged."""
    entries = (*folder.glob("*" + BLOCKS_SUFFIX), *folder.glob("*" + JOURNAL_SUFFIX))
    foreign = [path for path in entries if path.is_symlink() or not is_ours(path.lstat())]
    for path in foreign:
        path.unlink()
    if foreign:
        facts = {"folder": folder, "files": len(foreign), "reason": "another user made them"}
        log_event("cache files removed", facts, logging.WARNING)


def _leftovers(folder: Path) -> dict[str, int]:
    for unfinished in folder.glob("*.tmp"):
        unfinished.unlink()
    _remove_foreign(folder)
    found = [
        (path.stat(), path.name.removesuffix(BLOCKS_SUFFIX))
        for path in folder.glob("*" + BLOCKS_SUFFIX)
    ]
    found.sort(key=lambda its: its[0].st_mtime_ns)
    return {name: stat.st_blocks * _DISK_BLOCK_BYTES for stat, name in found}
