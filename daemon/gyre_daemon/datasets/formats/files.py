"""The format of single files: each file below a folder is one sample, such as an image.

In: the names and sizes of all files, and perhaps a manifest: a CSV, TSV or JSONL file that lists
files and says more of each. Out: the place of each file in the one shard that they make, the class
of its folder, and its values in the manifest.
"""

import csv
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_daemon.datasets.formats.base import (
    AUDIO,
    IMAGES,
    CodecName,
    FieldSpec,
    Manifest,
    ManifestColumn,
    ManifestPlace,
    check_names,
    media_type_of,
    renamed,
)
from gyre_daemon.datasets.formats.sample_table import SampleTable
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.shard import FileTable, Texts

# The names of classes are part of a dataset's description, which is one message.
_MAX_CHARS = 1 << 20


def class_numbers(paths: Texts, *, is_last: bool) -> tuple[tuple[str, ...], npt.NDArray[np.int32]]:
    """The names of all classes, sorted, and int32 [n], the class of each of n files there.

    Args:
        paths: of the n files.
        is_last: whether the class is the folder of the file itself, and not the first folder of
            its path.

    Raises:
        ConfigError: a file is in no folder, or the names are too many.
    """
    names: dict[bytes, int] = {}
    numbers = np.empty(len(paths), np.int32)
    for number, (begin, end) in enumerate(itertools.pairwise(paths.ends.tolist())):
        path = paths.data[begin:end]
        folders, slash, _ = path.rpartition(b"/")
        if not slash:
            raise ConfigError(
                f"the file {path.decode()} is in no folder, so it has no class; move it, or leave "
                '`class` out of `fields`: fields = ["file"]'
            )
        name = folders.rpartition(b"/")[2] if is_last else folders.partition(b"/")[0]
        numbers[number] = names.setdefault(name, len(names))
    ordered = sorted(names)
    if sum(map(len, ordered)) > _MAX_CHARS:
        raise ConfigError(
            f"the files have {len(names)} classes, whose names are longer than {_MAX_CHARS} "
            'characters together. Leave `class` out of `fields`: fields = ["file", "path"].'
        )
    place = np.empty(len(names), np.int32)
    place[[names[name] for name in ordered]] = np.arange(len(names), dtype=np.int32)
    return tuple(name.decode() for name in ordered), place[numbers]


TYPES = ("text", "class", "int64", "float64")
# Default names of the column with a row's file, and of columns whose texts are classes.
_PATHS = ("path", "file", "file_name", "filename")
_LABELS = ("label", "class")
_MAX_CELL_BYTES = 1 << 24  # a longer cell is a quote without its end
_MARK = b"\xef\xbb\xbf"
_INT64_RANGE = range(-(1 << 63), 1 << 63)


class _BadRow(ValueError):
    """A row is invalid; has its number, counted from 1."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row} {reason}")


def read_manifest(
    name: str, data: bytes, *, path_column: str = "", types: Mapping[str, str] | None = None
) -> Manifest:
    """The files that a manifest lists, in its order, and its other columns.

    Args:
        name: of the manifest; its ending says how it is written.
        data: all of it.
        path_column: the column with paths, relative to the manifest; empty for `path`, `file`,
            `file_name` or `filename`.
        types: of other columns, by name: `text`, `class`, `int64` or `float64`.

    Raises:
        CorruptSample: it is damaged; names the row.
        ConfigError: it has no such column.
    """
    try:
        data = data.removeprefix(_MARK)
        is_json = name.endswith((".jsonl", ".ndjson"))
        if is_json:
            columns = _from_lines(data)
        else:
            delimiter = "\t" if name.endswith(".tsv") else ","
            columns = _from_table(io.StringIO(data.decode(), newline=""), delimiter)
        return _manifest(columns, path_column, types or {}, is_json=is_json)
    except ConfigError:
        raise
    except (ValueError, csv.Error) as error:
        raise CorruptSample(
            f"the manifest {name} is damaged: {error}", {"shard": name, "reason": str(error)}
        ) from error


def _from_table(file: io.StringIO, delimiter: str) -> dict[str, list[Any]]:
    limit = csv.field_size_limit(_MAX_CELL_BYTES)
    try:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        names = next(rows, [])
        if len(set(names)) < len(names):
            raise ValueError("its first row names a column twice")
        columns: list[list[str]] = [[] for _ in names]
        for number, row in enumerate(rows, 2):
            if len(row) != len(names):
                if not row:
                    continue  # an empty line
                raise _BadRow(number, f"has {len(row)} cells, and the first one {len(names)}")
            for column, cell in zip(columns, row, strict=True):
                column.append(cell)
        return dict(zip(names, columns, strict=True))
    finally:
        csv.field_size_limit(limit)


def _from_lines(data: bytes) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _BadRow(number, f"is no JSON: {error}") from error
        if not isinstance(row, dict) or (columns and row.keys() != columns.keys()):
            keys = f"the keys {', '.join(row)}" if isinstance(row, dict) else "no keys"
            first = f"; the first one has {', '.join(columns)}" if columns else ""
            raise _BadRow(number, f"has {keys:.200}{first:.200}")
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    return columns


def _manifest(
    columns: dict[str, list[Any]], path_column: str, types: Mapping[str, str], *, is_json: bool
) -> Manifest:
    candidates = [path_column] if path_column else [each for each in _PATHS if each in columns]
    if not candidates or candidates[0] not in columns:
        wanted = path_column or " or ".join(_PATHS)
        raise ConfigError(
            f"the manifest has no column {wanted:.100}; it has {', '.join(columns):.300}: name the "
            "one with the paths of the files as `path_column`"
        )
    for name in types:
        if name not in columns:
            raise ConfigError(
                f"`types` names the column {name!r:.100}, which the manifest does not have; it has "
                f"{', '.join(columns):.300}"
            )
    names = Texts.of(checked_path(row, path) for row, path in enumerate(columns[candidates[0]], 1))
    others = tuple(
        _column(name, values, types.get(name, ""), is_json=is_json)
        for name, values in columns.items()
        if name != candidates[0]
    )
    return Manifest(names, others)


def check_in_folder(name: str, key: str, path: str) -> None:
    """Refuse a path of a format's option that leaves the dataset's folder.

    Raises:
        ConfigError: names the format and the key.
    """
    if not path or path.startswith("/") or ".." in path.split("/") or "://" in path:
        raise ConfigError(
            f"`{key}` of a {name} dataset has {path!r:.200}; it must be a path in the folder of "
            "the dataset, without `..`"
        )


def checked_path(row: int, path: Any) -> bytes:
    """A path relative to the manifest, without `.` and `..`."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise _BadRow(row, f"has the path {path!r:.200}, which is none")
    parts = [part for part in path.split("/") if part != "."]
    if path.startswith("/") or "://" in path or ".." in parts or "" in parts:
        raise _BadRow(
            row,
            f"has the path {path!r:.200}; paths must be relative to the manifest, without `..`",
        )
    try:
        return "/".join(parts).encode()
    except UnicodeEncodeError as error:
        raise _BadRow(row, f"has the path {path!a:.200}, which is no UTF-8") from error


def _column(name: str, values: Sequence[Any], kind: str, *, is_json: bool) -> ManifestColumn:
    kind = kind or _kind_of(name, values, is_json=is_json)
    if kind == "int64":
        return ManifestColumn(name, "number", np.array(_parsed(name, values, _integer), np.int64))
    if kind == "float64":
        return ManifestColumn(name, "number", np.array(_parsed(name, values, float), np.float64))
    if kind == "json":
        return ManifestColumn(name, "json", Texts.of(json.dumps(each).encode() for each in values))
    texts = [each if isinstance(each, str) else json.dumps(each) for each in values]
    if kind == "text":
        return ManifestColumn(name, "text", Texts.of(text.encode() for text in texts))
    classes = tuple(sorted(set(texts)))
    place = {text: number for number, text in enumerate(classes)}
    numbers = np.array([place[text] for text in texts], np.int32)
    return ManifestColumn(name, "class", numbers, classes)


def _kind_of(name: str, values: Sequence[Any], *, is_json: bool) -> str:
    """The type of a column, if the options give none."""
    types = set(map(type, values))
    if types == {int}:
        return "int64"
    if types and types <= {int, float}:
        return "float64"
    if types - {str}:
        return "json"
    if name not in _LABELS:
        return "text"
    is_number = not is_json and all(value.isdecimal() and len(value) < 19 for value in values)
    return "int64" if is_number else "class"


def _parsed(name: str, values: Sequence[Any], parse: Callable[[Any], Any]) -> list[Any]:
    parsed = []
    for row, value in enumerate(values, 1):
        try:
            parsed.append(parse(value))
        except (ValueError, TypeError, OverflowError) as error:
            raise _BadRow(row, f"has {value!r:.100} as its {name:.100}: {error}") from error
    return parsed


def _integer(value: Any) -> int:
    number = int(value)
    if number not in _INT64_RANGE or isinstance(value, float):
        raise ValueError("it is no integer of 64 bits")
    return number


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
    class_folder: Literal["first", "last"] = "last"
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
            for column in columns:  # an index covers numbers itself
                texts = column.values.data if isinstance(column.values, Texts) else b""
                identity += hashlib.blake2b(texts, digest_size=16).digest()
        return SampleTable(
            fields,
            [len(table)],
            np.stack([column.values for column in stored], axis=1),
            np.stack([column.size for column in stored], axis=1),
            identity=identity,
            indexed=[column.values for _, column in found if column.codec == "indexed"],
        )

    def is_wanted(self, name: str) -> bool:
        stem, dot, extension = name.rpartition(".")
        return bool(stem and dot) and extension.lower() in self._extensions

    def manifest_of(self, path: str) -> ManifestPlace | None:
        if not path.endswith(_MANIFESTS):
            return None
        return ManifestPlace(path, path.rpartition("/")[0] or ".")

    def read_manifest(self, name: str, data: bytes) -> Manifest:
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
    """The source of a field."""

    codec: CodecName
    values: npt.NDArray[Any]  # int64 [n], where samples begin; of an indexed field its values
    size: npt.NDArray[np.int64]  # [n], their bytes; nothing of an indexed field
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


_NOTHING = np.empty(0, np.int64)
