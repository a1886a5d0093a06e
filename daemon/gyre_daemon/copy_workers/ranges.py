"""Ranges of files to copy into one arena, and the copy itself."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
