"""The options of `files`, and the index of all files."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import CodecName, FieldSpec
from gyre_daemon.datasets.formats.files.classes import class_numbers
from gyre_daemon.datasets.formats.files.manifest import TYPES, read_manifest
from gyre_daemon.datasets.formats.indexes.table import SampleTable
from gyre_daemon.datasets.formats.listed import Manifest, ManifestColumn, ManifestPlace
from gyre_daemon.datasets.formats.media import AUDIO, IMAGES, media_type_of
from gyre_daemon.datasets.formats.names import check_names, renamed
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.file_table import FileTable, Texts

_FILE, _PATH, _CLASS = "file", "path", "class"
_UINT8, _INT64 = np.dtype(np.uint8), np.dtype("<i8")
_MANIFESTS = (".csv", ".tsv", ".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class FilesOptions:
    """The keys of a `files` dataset.

    Attributes:
        extensions: of the files that count, without a dot, in upper or lower case; images and audio
            if empty.
        fields: of `file`, `class`, `path` and the columns of a manifest, those to serve;
            `image=file` serves the files under the name `image`. If empty, `file`, and all columns
            of the manifest, or `class` if the files of a folder are in subfolders.
        class_folder: which folder on the way to a file is its class: `last`, the innermost one,
            or `first`, the one in the dataset's folder.
        path_column: of a manifest, the column with the paths; `path`, `file`, `file_name` or
            `filename` if empty.
        types: of other columns of a manifest, by name: `text`, `class`, `int64` or `float64`.
    """

    extensions: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    class_folder: str = "last"
    path_column: str = ""
    types: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject options that fit no dataset."""
        renamed(self.fields, "fields")
        for name, kind in self.types.items():
            if kind not in TYPES:
                raise ConfigError(
                    f"`types` of a files dataset calls {name!r:.100} {kind!r:.100}; it must be one "
                    f"of {', '.join(TYPES)}"
                )
        if self.class_folder not in ("first", "last"):
            raise ConfigError(
                f"`class_folder` of a files dataset is {self.class_folder!r:.100}; it must be "
                "first or last"
            )
        if any(not each or "." in each or "/" in each for each in self.extensions):
            raise ConfigError(
                "`extensions` of a files dataset must be the ends of names behind their last dot, "
                'such as ["jpg", "png"]'
            )


class FilesFormat:
    """A `ManifestFormat`: nothing but the list of files is read."""

    reads_apart = False
    pattern = "*.{" + ",".join(f"{name},{name.upper()}" for name in IMAGES + AUDIO) + "}"

    def __init__(self, options: FilesOptions, *, covers_texts: bool = False) -> None:
        """Take the options of a dataset.

        Args:
            options: the keys of the dataset.
            covers_texts: whether an index differs where texts of a manifest do, and not only their
                sizes. Fingerprints of `files` and `coco` were taken without.
        """
        self._options, self._covers_texts = options, covers_texts
        self._extensions = frozenset(each.lower() for each in options.extensions or IMAGES + AUDIO)

    def index_of(self, table: FileTable, columns: Sequence[ManifestColumn]) -> SampleTable:
        """See `ListedFormat.index_of`."""
        options = self._options
        available = _columns_of(table, columns, is_last=options.class_folder == "last")
        wanted = renamed(options.fields, "fields") or self._usual_fields(table, columns)
        found: list[tuple[str, _Column]] = []
        for field_name, name in wanted:
            if name not in available:
                raise ConfigError(
                    f"`fields` of a files dataset names {name!r:.100}, which it does not have; "
                    f"choose from {', '.join(available):.300}"
                )
            found.append((field_name, available[name]()))
        check_names([each for each, _ in found], "fields")
        found.sort(key=lambda each: each[1].codec == "indexed")
        stored = [column for _, column in found if column.codec != "indexed"]
        if not stored:
            raise ConfigError(f"`fields` of a files dataset must have {_FILE}, {_PATH} or a text")
        fields = [column.spec(each) for each, column in found]
        meaning = json.dumps([[spec.name, spec.codec, spec.categories] for spec in fields])
        identity = meaning.encode() + table.names.data
        if self._covers_texts:
            identity += b"".join(_digest(column) for column in columns)
        return SampleTable(
            fields,
            [len(table)],
            np.stack([column.values for column in stored], axis=1),
            np.stack([column.size for column in stored], axis=1),
            identity=identity,
            indexed=[column.values for _, column in found if column.codec == "indexed"],
        )

    def is_wanted(self, name: str) -> bool:
        """See `ListedFormat.is_wanted`."""
        stem, dot, extension = name.rpartition(".")
        return bool(stem and dot) and extension.lower() in self._extensions

    def manifest_of(self, path: str) -> ManifestPlace | None:
        """See `ListedFormat.manifest_of`."""
        if not path.endswith(_MANIFESTS):
            return None
        return ManifestPlace(path, path.rpartition("/")[0] or ".")

    def read_manifest(self, name: str, data: bytes) -> Manifest:
        """See `ManifestFormat.read_manifest`."""
        return read_manifest(
            name, data, path_column=self._options.path_column, types=self._options.types
        )

    def _usual_fields(
        self, table: FileTable, columns: Sequence[ManifestColumn]
    ) -> list[tuple[str, str]]:
        names = [_FILE, *(column.name for column in columns)]
        if not columns and b"/" in table.names.data:
            names.append(_CLASS)
        return [(name, name) for name in names]


@dataclass(frozen=True, slots=True)
class _Column:
    """The source of a field.

    Attributes:
        codec: of the field.
        values: int64 [n], where the bytes of each sample begin; of an indexed field its values.
        size: int64 [n], how many bytes they are; nothing of an indexed field.
        categories: see `FieldSpec`.
        media_type: see `FieldSpec`.
    """

    codec: CodecName
    values: npt.NDArray[Any]
    size: npt.NDArray[np.int64]
    categories: tuple[str, ...] = ()
    media_type: str = ""

    def spec(self, name: str) -> FieldSpec:
        if self.codec != "indexed":
            spec = FieldSpec(name, _UINT8, (), ragged=True, codec=self.codec)
            return replace(spec, categories=self.categories, media_type=self.media_type)
        dtype = np.dtype("<f8") if self.values.dtype.kind == "f" else _INT64
        return FieldSpec(name, dtype, (), ragged=False, codec="indexed", categories=self.categories)


def _columns_of(
    table: FileTable, columns: Sequence[ManifestColumn], *, is_last: bool
) -> dict[str, Callable[[], _Column]]:
    """The possible sources of fields, by name; each is made when it is called.

    The head of a file is its path and then its texts, in the order of the columns.
    """
    texts = [(column, column.values) for column in columns if isinstance(column.values, Texts)]
    heads = [table.names.sizes, *(values.sizes for _, values in texts)]
    starts = np.concatenate(([0], np.cumsum(np.sum([*heads, table.sizes], axis=0))))[:-1]
    begin = starts.astype(np.int64)
    found: dict[str, Callable[[], _Column]] = {_PATH: partial(_Column, "text", begin, heads[0])}
    begin = begin + heads[0]
    for column, values in texts:
        codec: CodecName = "json" if column.kind == "json" else "text"
        found[column.name] = partial(_Column, codec, begin, values.sizes, column.categories)
        begin = begin + values.sizes
    contents = begin

    def from_files() -> _Column:
        names = map(table.names.__getitem__, range(len(table.names)))
        ends = {os.fsdecode(name.rpartition(b".")[2]) for name in names}
        return _Column("bytes", contents, table.sizes, media_type=media_type_of(ends))

    found[_FILE] = from_files

    def from_folders() -> _Column:
        classes, numbers = class_numbers(table.names, is_last=is_last)
        return _Column("indexed", numbers, _NOTHING, classes)

    found[_CLASS] = from_folders
    for column in columns:
        if column.name in (_PATH, _FILE):
            raise ConfigError(
                f"the manifest has a column {column.name} next to the one with paths; rename it"
            )
        if not isinstance(column.values, Texts):
            found[column.name] = partial(
                _Column, "indexed", column.values, _NOTHING, column.categories
            )
    return found


def _digest(column: ManifestColumn) -> bytes:
    """Of texts; an index covers numbers itself."""
    texts = column.values.data if isinstance(column.values, Texts) else b""
    return hashlib.blake2b(texts, digest_size=16).digest()


_NOTHING = np.empty(0, np.int64)
