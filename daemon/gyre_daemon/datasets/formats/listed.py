"""The seam between formats of single files and the rest of the daemon.

The daemon lists the files below a folder, at any depth, or reads a manifest, or makes one of files
that describe others. To all other code they are one shard, in which each file comes after its
*head*: its path, and the texts that the manifest has of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import SampleIndex
from gyre_daemon.storage.shard import FileTable, Texts


@dataclass(frozen=True, slots=True)
class ManifestColumn:
    """One column of a manifest, with a value for each of n files.

    Attributes:
        name: of the column.
        kind: `text`, `json`, `number` or `class`.
        values: of text and JSON the bytes; else int64, float64 or int32 [n].
        categories: the meanings of the values of a class, or numbers in JSON.
    """

    name: str
    kind: Literal["text", "json", "number", "class"]
    values: Texts | npt.NDArray[Any]
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A list of files, in the dataset's order.

    Attributes:
        names: their paths, relative to the folder of the manifest.
        columns: with other facts about them.
    """

    names: Texts
    columns: tuple[ManifestColumn, ...]


@dataclass(frozen=True, slots=True)
class Described:
    """Which files of a folder are samples, and which describe them.

    Attributes:
        names: of the n samples, in the dataset's order.
        texts: int64 [n], for each the number of the file that describes it; -1 if there is none.
        about: the facts that the format has about all samples.
    """

    names: Texts
    texts: npt.NDArray[np.int64]
    about: Any


class ManifestPlace(NamedTuple):
    """The place of a manifest.

    Attributes:
        path: of the manifest.
        folder: that its paths are relative to, and that they do not leave.
    """

    path: str
    folder: str


@runtime_checkable
class ListedFormat(Protocol):
    """A format in which each file is a sample, with the options of one dataset."""

    @property
    def pattern(self) -> str:
        """The files usually meant; see `Format.pattern`."""

    def is_wanted(self, name: str) -> bool:
        """Whether a file of this name, without its folder, is one of the dataset."""

    def manifest_of(self, path: str) -> ManifestPlace | None:
        """The place of the manifest for a location of this path; None if its files are listed."""

    def index_of(self, table: FileTable, columns: Sequence[ManifestColumn]) -> SampleIndex:
        """The index of files, and of the columns that a manifest has of them.

        Raises:
            ConfigError: the options do not fit the files.
        """


@runtime_checkable
class ManifestFormat(ListedFormat, Protocol):
    """A format whose manifest is one file."""

    @property
    def reads_apart(self) -> bool:
        """Whether a separate process reads a manifest, whose parsing would block others."""

    def read_manifest(self, name: str, data: bytes) -> Manifest:
        """A manifest of this name and these bytes.

        Raises:
            CorruptSample: it is damaged.
            ConfigError: it lacks columns.
        """


@runtime_checkable
class DescribedFormat(ListedFormat, Protocol):
    """A format in which a file describes each sample, and the manifest's place has a file for all.

    `is_wanted` takes the files that describe samples, too.
    """

    def described(self, name: str, data: bytes, names: Texts) -> Described:
        """The samples among files.

        Args:
            name: of the file that describes all of them.
            data: its bytes.
            names: of all wanted files, sorted.

        Raises:
            CorruptSample: the file is damaged.
            ConfigError: it does not fit the files.
        """

    def manifest(self, described: Described, texts: Sequence[bytes]) -> Manifest:
        """The manifest that the files make, called in a separate process.

        Args:
            described: the n samples.
            texts: n, the description of each; empty if there is none.

        Raises:
            CorruptSample: one of them is damaged; names it, and the line.
        """
