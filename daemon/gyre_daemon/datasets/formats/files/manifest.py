"""Reads a manifest: a CSV, TSV or JSONL file that lists single files and says more of each."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from gyre_daemon.datasets.formats.listed import Manifest, ManifestColumn
from gyre_daemon.errors import ConfigError, CorruptSample
from gyre_daemon.storage.file_table import Texts

TYPES = ("text", "class", "int64", "float64")
# Default names of the column with a row's file, and of columns whose texts are classes.
_PATHS = ("path", "file", "file_name", "filename")
_LABELS = ("label", "class")
_MAX_CELL_BYTES = 1 << 24  # a longer cell is a quote without its end
_MARK = b"\xef\xbb\xbf"
_INT64 = range(-(1 << 63), 1 << 63)


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
    for number, line in _lines(data):
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


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(io.BytesIO(data), 1):
        if line.strip():
            yield number, line


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
    if types == {int} and all(value in _INT64 for value in values):
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
        except (ValueError, TypeError) as error:
            raise _BadRow(row, f"has {value!r:.100} as its {name:.100}: {error}") from error
    return parsed


def _integer(value: Any) -> int:
    number = int(value)
    if number not in _INT64 or isinstance(value, float):
        raise ValueError("it is no integer of 64 bits")
    return number
