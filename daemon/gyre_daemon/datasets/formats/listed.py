"""The seam between formats of single files and the rest of the daemon.

The daemon lists the files below a folder, at any depth, or reads a manifest. To all other code they
are one shard, in which each file comes after its *head*: its path, and the texts that the manifest
has of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt

from gyre_daemon.datasets.formats.base import SampleIndex
from gyre_daemon.storage.file_table import FileTable, Texts


@dataclass(frozen=True, slots=True)
class ManifestColumn:
    """What a manifest says of each of n files.

    Attributes:
        name: of the column.
        kind: `text`, `json`, `number` or `class`.
        values: of text and JSON the bytes; else int64, float64 or int32 [n].
        categories: what the values of a class stand for, or numbers in JSON.
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
        columns: what else is known of them.
    """

    names: Texts
    columns: tuple[ManifestColumn, ...]


class ManifestPlace(NamedTuple):
    """Where a manifest lies.

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
        """The files that are usually meant; see `Format.pattern`."""

    @property
    def reads_apart(self) -> bool:
        """Whether a process of its own reads a manifest: parsed at once, it would block others."""

    def is_wanted(self, name: str) -> bool:
        """Whether a file of this name, without its folder, is one of the dataset."""

    def manifest_of(self, path: str) -> ManifestPlace | None:
        """Where the manifest of a location of this path lies; None if its files are listed."""

    def read_manifest(self, name: str, data: bytes) -> Manifest:
        """A manifest of this name and these bytes.

        Raises:
            CorruptSample: it is damaged.
            ConfigError: it lacks columns.
        """

    def index_of(self, table: FileTable, columns: Sequence[ManifestColumn]) -> SampleIndex:
        """The index of files, and of the columns that a manifest has of them.

        Raises:
            ConfigError: the options do not fit the files.
        """
