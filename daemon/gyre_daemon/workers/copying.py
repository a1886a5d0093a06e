"""The copy workers' side: maps arenas and files, and copies ranges between them."""

import contextlib
import gc
import mmap
import os
import resource
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_daemon.workers.protocol import Kind, Message

_MADV_POPULATE_READ = 22  # since Linux 5.14; the standard library does not name it
Integers = npt.NDArray[np.int64]

_LENGTHS = struct.Struct("<4q")  # of the columns


@dataclass(frozen=True, slots=True)
class Ranges:
    """n ranges, none empty.

    `[start[i], start[i] + size[i])` of file `file[i]` goes to `target[i]` in an arena.

    Attributes:
        file: int64 [n], keys, or [1] where all ranges lie in one file.
        start: int64 [n], in bytes.
        size: int64 [n], in bytes, or [1] where all have the same size.
        target: int64 [n], in bytes from the beginning of the arena.
    """

    file: Integers
    start: Integers
    size: Integers
    target: Integers

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self.start)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray) -> "Ranges":
        """The ranges that `to_bytes` wrote; they refer to the memory of `data`."""
        ends = np.cumsum(_LENGTHS.unpack_from(data))
        columns = np.frombuffer(data, np.int64, offset=_LENGTHS.size)
        return cls(*np.split(columns, ends[:-1]))

    def to_bytes(self) -> bytes:
        """The body of a `COPY` request: the lengths of the columns, and the columns."""
        columns = self.file, self.start, self.size, self.target
        lengths = _LENGTHS.pack(*map(len, columns))
        return b"".join((lengths, *(column.tobytes() for column in columns)))

    @property
    def are_alike(self) -> bool:
        """Whether all have one size and lie in one file, as rows of a matrix do."""
        return len(self.file) == len(self.size) == 1

    def copy(self, files: Mapping[int, memoryview], arena: memoryview) -> None:
        """Copy all ranges.

        Raises:
            ValueError: a file is shorter than a range of it.
        """
        if not self._copy_rows(files, arena):
            self._copy_each(files, arena)

    def _copy_rows(self, files: Mapping[int, memoryview], arena: memoryview) -> bool:
        """Copy rows of a matrix, in one call for those whose targets follow each other.

        Returns:
            False where the ranges are no rows of a matrix, and nothing was copied.
        """
        if not self.are_alike or len(self) < 2:
            return False
        file, size = files[int(self.file[0])], int(self.size[0])
        first = int(self.start[0]) % size
        row, rest = np.divmod(self.start - first, size)
        ends = [*(np.flatnonzero(np.diff(self.target) != size) + 1).tolist(), len(self)]
        if rest.any() or int(row.min()) < 0 or 2 * len(ends) > len(self):
            return False
        num_rows = (len(file) - first) // size
        if int(row.max()) >= num_rows:
            raise ValueError("a row lies beyond the end of the file")
        rows = np.frombuffer(file, np.uint8, num_rows * size, first).reshape(-1, size)
        memory = np.frombuffer(arena, np.uint8)
        begin = 0
        for end in ends:
            target = int(self.target[begin])
            into = memory[target : target + (end - begin) * size].reshape(-1, size)
            # the mode "raise" would copy into a buffer first
            rows.take(row[begin:end], 0, into, "clip")
            begin = end
        return True

    def _copy_each(self, files: Mapping[int, memoryview], arena: memoryview) -> None:
        columns = (
            np.broadcast_to(column, len(self)).tolist()
            for column in (self.file, self.start, self.size, self.target)
        )
        for file, start, size, target in zip(*columns, strict=True):
            arena[target : target + size] = files[file][start : start + size]


class _Arena:
    """An arena, mapped for writing."""

    def __init__(self, descriptor: int) -> None:
        """Map all of it.

        Raises:
            OSError: it cannot be mapped for writing, since it is sealed already.
        """
        self._mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED)
        self._is_populated = np.zeros(len(self._mapping) // mmap.PAGESIZE, np.bool_)  # [pages]

    def memory_for(self, ranges: Ranges) -> memoryview:
        """All its memory, with page table entries where the ranges go.

        The kernel makes them in one call: a page fault for each page takes six times as long.
        """
        first = int(ranges.target.min()) // mmap.PAGESIZE
        stop = -(-int((ranges.target + ranges.size).max()) // mmap.PAGESIZE)
        if not self._is_populated[first:stop].all():
            self._is_populated[first:stop] = True
            with contextlib.suppress(OSError):  # an older kernel makes them one by one
                self._mapping.madvise(
                    _MADV_POPULATE_READ, first * mmap.PAGESIZE, (stop - first) * mmap.PAGESIZE
                )
        return memoryview(self._mapping)


class CopyWork:
    """The arenas and files that one process has mapped, by key; see `process.Work`.

    The fork server maps every arena and copies nothing. So a worker that replaces a dead one has
    all arenas, although those are sealed by then and could not be mapped for writing any more.
    """

    def __init__(self) -> None:
        """Have nothing mapped yet."""
        self.name = "gyre-copy"
        self._arenas: dict[int, _Arena] = {}
        self._files: dict[int, memoryview] = {}

    def prepare(self, body: bytes | bytearray) -> None:
        """A process needs nothing but the mappings."""

    def begin(self, body: bytes | bytearray) -> None:
        """Copies make no garbage that must be looked for."""
        gc.disable()

    def answer(self, request: Message) -> Message | None:
        """Map, unmap or copy."""
        try:
            num_waits = self._do(request)
        except (OSError, ValueError):
            return Message(Kind.FAILED)
        return None if num_waits is None else Message(Kind.DONE, num_waits)

    def _do(self, request: Message) -> int | None:
        """Do one thing.

        Returns:
            How often it waited for a disk, or None for no reply.

        Raises:
            OSError, ValueError: it cannot be done.
        """
        match request.kind:
            case Kind.COPY:
                before = _num_disk_waits()
                ranges = Ranges.from_bytes(request.body)
                ranges.copy(self._files, self._arenas[request.number].memory_for(ranges))
                return _num_disk_waits() - before
            case Kind.OPEN:
                self._files[request.number] = _map_file(request.descriptors[0])
                return None
            case Kind.CLOSE:
                self._files.pop(request.number).release()
                return None
            case Kind.MAP:
                with _owned(request.descriptors[0]):
                    self._arenas[request.number] = _Arena(request.descriptors[0])
            case Kind.UNMAP:
                del self._arenas[request.number]
        return 0


@contextlib.contextmanager
def _owned(descriptor: int) -> Iterator[None]:
    """Close a descriptor at the end."""
    try:
        yield
    finally:
        os.close(descriptor)


def _map_file(descriptor: int) -> memoryview:
    """The file's bytes; none where it cannot be mapped, so that every range of it is too long."""
    with _owned(descriptor):
        try:
            mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            mapping.madvise(mmap.MADV_RANDOM)
        except (OSError, ValueError):
            return memoryview(b"")
    return memoryview(mapping)


def _num_disk_waits() -> int:
    """How often this process has waited for a disk: its major page faults."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
