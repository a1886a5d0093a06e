"""What is copied: ranges of files to places in one arena, and the copy itself."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ranges:
    """n ranges, none empty: `[start[i], start[i] + size[i])` of file `file[i]` goes to `target[i]` in an arena.

    Attributes:
        file: int64 [n], or [1] where it is the same for all.
        start: int64 [n], in bytes.
        size: int64 [n], in bytes, or [1] where it is the same for all.
        target: int64 [n], bytes from the arena's beginning.
    """

    file: Integers
    start: Integers
    size: Integers
    target: Integers

    def __len__(self) -> int:
        """The number of ranges."""
        return len(self.start)

    @property
    def are_alike(self) -> bool:
        """One size, one file: maybe rows of a matrix."""
        return len(self.file) == len(self.size) == 1

    def copy(self, files: Mapping[int, memoryview], arena: memoryview) -> None:
        """Copy them all.

        Raises:
            ValueError: a file is shorter than a range of it.
        """
        if not self._copy_rows(files, arena):
            self._copy_each(files, arena)

    def _copy_rows(self, files: Mapping[int, memoryview], arena: memoryview) -> bool:
        """In one call for all whose places follow each other, if the ranges are rows of a matrix; says whether they are."""
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
            place = int(self.target[begin])
            into = memory[place : place + (end - begin) * size].reshape(-1, size)
            rows.take(row[begin:end], 0, into, "clip")  # "raise" would copy what it puts out once more
            begin = end
        return True

    def _copy_each(self, files: Mapping[int, memoryview], arena: memoryview) -> None:
        columns = (np.broadcast_to(column, len(self)).tolist() for column in (self.file, self.start, self.size, self.target))
        for file, start, size, target in zip(*columns, strict=True):
            arena[target : target + size] = files[file][start : start + size]


NOTHING = Ranges(*(np.empty(0, np.int64) for _ in range(4)))
