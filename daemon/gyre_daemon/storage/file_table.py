"""The single files of a dataset as arrays: names, sizes and times. A value without I/O.

A dataset of images may have ten million files. An object for each would take gigabytes; here a file
takes 32 bytes and its name.
"""

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.storage.shard import UNKNOWN, Shard, Validators

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Texts:
    """n byte strings, back to back.

    Attributes:
        data: all of them.
        ends: int64 [n + 1]; string i is `data[ends[i] : ends[i + 1]]`.
    """

    data: bytes
    ends: Integers

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> "Texts":
        """These strings."""
        kept = list(texts)
        return cls.joined([b"".join(kept)], np.array([len(text) for text in kept], np.int64))

    @classmethod
    def joined(cls, pieces: Iterable[bytes], sizes: Integers) -> "Texts":
        """Strings of these sizes, int64 [n], whose bytes come in any pieces."""
        return cls(b"".join(pieces), np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))

    @classmethod
    def merged(cls, columns: "Sequence[Texts]") -> "Texts":
        """The strings of several columns of n, those with one number back to back."""
        if len(columns) == 1:
            return columns[0]
        rows = zip(
            *(map(column.__getitem__, range(len(column))) for column in columns), strict=True
        )
        sizes = np.sum([column.sizes for column in columns], axis=0)
        return cls.joined((text for row in rows for text in row), sizes)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.ends) - 1

    def __getitem__(self, number: int) -> bytes:
        """String `number`."""
        return self.data[self.ends[number] : self.ends[number + 1]]

    @property
    def sizes(self) -> Integers:
        """Int64 [n], in bytes."""
        return np.diff(self.ends)


@dataclass(frozen=True)
class FileTable:
    """The n files of a dataset.

    Attributes:
        names: relative to the dataset's root, in UTF-8, in the dataset's order.
        sizes: int64 [n], in bytes.
        validators: of remote files, each `Validators.encoded`. None for local ones.
        stamps: of local files: int64 [n, 2], modification and change times in ns. None for remote
            ones.
    """

    names: Texts
    sizes: Integers
    validators: Texts | None = None
    stamps: Integers | None = None

    def __len__(self) -> int:
        """How many there are."""
        return len(self.sizes)

    def name(self, number: int) -> str:
        """The name of a file."""
        return self.names[number].decode()

    def shard(self, number: int) -> Shard:
        """A file as it was listed."""
        if self.stamps is not None:
            modified_ns, changed_ns = self.stamps[number].tolist()
            return Shard(self.name(number), int(self.sizes[number]), f"{modified_ns}.{changed_ns}")
        told = Validators.decoded(self.validators[number]) if self.validators else UNKNOWN
        return Shard(self.name(number), int(self.sizes[number]), told.text, validators=told)

    def top_folders(self, limit: int = 1000) -> list[str]:
        """The first folders of the paths, at most `limit`, if the files are sorted by name."""
        found: list[str] = []
        number = 0
        while number < len(self) and len(found) < limit:
            folder, slash, _ = self.names[number].partition(b"/")
            if not slash:
                number += 1
                continue
            found.append(folder.decode())
            after = folder + b"0"  # the letter behind the slash
            number = bisect.bisect_left(range(len(self)), after, number, key=self.names.__getitem__)
        return found

    @cached_property
    def version(self) -> str:
        """Changes whenever a file does; empty if a file has no version."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.names.ends, self.sizes, self.stamps):
            digest.update(b"" if array is None else array.tobytes())
        digest.update(self.names.data)
        if self.validators is not None:
            if not self.validators.sizes.all():
                return ""
            for number in range(len(self)):
                digest.update(Validators.decoded(self.validators[number]).text.encode())
        return digest.hexdigest()


class FileShards(Sequence[Shard]):
    """The files of a table as shards, each made when it is asked for.

    Attributes:
        table: the files.
        sizes: int64 [n], in bytes.
    """

    def __init__(self, table: FileTable) -> None:
        self.table = table
        self.sizes = table.sizes

    def __len__(self) -> int:
        """How many there are."""
        return len(self.table)

    def __getitem__(self, number: Any) -> Any:
        """A file as it was listed."""
        return self.table.shard(number)


class FilePaths(Sequence[str]):
    """The paths of the files of a table, each made when it is asked for."""

    def __init__(self, root: str, table: FileTable) -> None:
        """Name the root, which ends with a slash."""
        self._root, self._table = root, table

    def __len__(self) -> int:
        """How many there are."""
        return len(self._table)

    def __getitem__(self, number: Any) -> Any:
        """The path of a file, with its scheme."""
        return self._root + self._table.name(number)


def sizes_of(shards: Sequence[Shard]) -> Integers:
    """Int64 [n], the sizes of shards in bytes."""
    if isinstance(shards, FileShards):
        return shards.sizes
    return np.array([shard.size_bytes for shard in shards], np.int64)


def starts_of(heads: Texts, sizes: Integers) -> Integers:
    """Where files lie if all follow each other, each after its head.

    Args:
        heads: n byte strings.
        sizes: int64 [n], of the files.

    Returns:
        Int64 [n + 1]: where the head of each file begins, and where the last file ends.
    """
    return np.concatenate(([0], np.cumsum(heads.sizes + sizes))).astype(np.int64)
