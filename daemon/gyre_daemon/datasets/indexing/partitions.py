"""Shards in folders of a folder: partitions of a table (`day=1/`), or the folder of a split.

A folder of folders named `KEY=VALUE` is one table, as Hive, Spark, pandas and pyarrow write it: its
keys are columns. A folder whose only folder is named as a split is that split.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import numpy as np

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats.base import PRESENT_SUFFIX, FieldSpec, check_names, renamed
from gyre_daemon.datasets.formats.union_index import IndexedField
from gyre_daemon.datasets.known_formats import FORMATS
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import (
    Location,
    check_one_tree,
    is_beside,
    matches_any,
    patterns_of,
)
from gyre_daemon.storage.opener import StorageOpener

_MAGIC = re.compile(r"[*?\[]")
_PARTITION = re.compile(r"([^=/]+)=([^/]*)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_MAX_INTEGER = (1 << 63) - 1
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_ONLY_FOLDERS = {"data", "train", "training", "val", "valid", "validation", "test"}


@dataclass(frozen=True, slots=True)
class Nested:
    """The place of shards in the folders of a folder.

    Attributes:
        location: of the shards.
        root: the folder whose folders are partitions; empty where there are none.
    """

    location: Location
    root: str = ""


async def find_nested(
    opener: StorageOpener, location: Location, config: DatasetConfig
) -> Nested | None:
    """The place of shards in the folders of a location; None if their names do not tell it.

    Raises:
        InvalidRequest: partitions are named as a training set and a held-out set.
    """
    if len(location.paths) != 1 or _MAGIC.search(location.paths[0]):
        return None
    root = location.paths[0].rstrip("/")
    names = await opener.names_in(location, config.storage, follow_links=config.follow_links)
    folders = [name[:-1] for name in names if name.endswith("/") and not is_beside(name[:-1])]
    if any(not name.endswith("/") and not is_beside(name) for name in names):
        return None  # one of these may be meant
    if len(folders) == 1 and folders[0].lower() in _ONLY_FOLDERS:
        return Nested(replace(location, paths=(f"{root}/{folders[0]}",)))
    if not folders or not all(map(_PARTITION.fullmatch, folders)):
        return None
    return Nested(replace(location, paths=(f"{root}/**/[!._]*",)), root)


@dataclass(frozen=True, slots=True)
class Partitions:
    """The columns that the folders of a dataset's shards have.

    Attributes:
        values: of each shard, by key; None where the folder says that there is no value.
    """

    values: Mapping[str, Sequence[str | None]]

    def chosen(self, config: DatasetConfig) -> "tuple[DatasetConfig, list[IndexedField]]":
        """The configuration without the keys that `columns` has, and the served fields.

        Raises:
            ConfigError: all of `columns` are keys, or no field can have the name of one.
        """
        wanted = config.options.get("columns")
        if not isinstance(wanted, Sequence) or not wanted or isinstance(wanted, str):
            check_names(list(self.values), "columns")
            return config, [each for key in self.values for each in self._fields(key, key)]
        pairs = renamed([str(each) for each in wanted], "columns")
        both = zip(wanted, pairs, strict=True)
        rest = [text for text, (_, key) in both if key not in self.values]
        if not rest:
            raise ConfigError(
                f"`columns` has only names of folders ({', '.join(wanted)!s:.200}). Name a column "
                "of the files, too"
            )
        if "*" in rest:
            pairs += [(key, key) for key in self.values if key not in [each for _, each in pairs]]
        chosen = [(field, key) for field, key in pairs if key in self.values]
        fields = [each for field, key in chosen for each in self._fields(field, key)]
        return replace(config, options={**config.options, "columns": rest}), fields

    def _fields(self, field: str, key: str) -> Iterator[IndexedField]:
        """The values of a key, and which shards have one if some have none."""
        found = self.values[key]
        texts = sorted({text for text in found if text is not None})
        categories: tuple[str, ...] = ()
        if all(_INTEGER.fullmatch(text) and abs(int(text)) <= _MAX_INTEGER for text in texts):
            numbers = [0 if text is None else int(text) for text in found]
        else:
            categories = tuple(texts)
            numbers = [0 if text is None else texts.index(text) for text in found]
        yield _of_shards(field, np.array(numbers, np.int64), categories)
        present = np.array([text is not None for text in found], np.bool_)
        if not present.all():
            yield _of_shards(field + PRESENT_SUFFIX, present)


async def open_partitions(
    opener: StorageOpener, nested: Nested, config: DatasetConfig, pattern: str
) -> Storage:
    """The shards in partitions.

    Raises:
        ShardMissing: no file there matches the pattern.
    """

    async def open_all(location: Location) -> tuple[Storage, list[str]]:
        found = await opener.open(location, config.storage, "*", follow_links=config.follow_links)
        return found, [shard.name.rpartition("/")[2] for shard in found.shards]

    storage, names = await open_all(nested.location)
    entry = FORMATS.get(config.format)
    if entry and entry.ambiguous_pattern and not any(matches_any(each, pattern) for each in names):
        pattern = entry.ambiguous_pattern
    wanted = [name for name in names if matches_any(name, pattern) and not is_beside(name)]
    if not wanted:
        raise ShardMissing(f"no file in the partitions of {nested.root} matches {pattern}")
    if len(wanted) < len(names):
        patterns = [each for each in patterns_of(pattern) if fnmatch.filter(wanted, each)]
        paths = tuple(
            f"{nested.root}/**/{'[!._]' * each.startswith('*')}{each}" for each in patterns
        )
        storage, _ = await open_all(replace(nested.location, paths=paths))
    return storage


def partitions_of(root: str, shards: Storage) -> Partitions:
    """The columns that the folders between a folder and its shards have.

    Raises:
        InvalidRequest: shards have different keys, or are two sets.
    """
    keys, depth = list[str](), len(_parts(root))
    values: dict[str, list[str | None]] = {}
    for number in range(len(shards.shards)):
        local = shards.local_file(number)
        folders = _parts(str(local.path) if local else shards.path(number))[depth:-1]
        found = [_PARTITION.fullmatch(folder) for folder in folders]
        its = {match[1]: unquote(match[2]) for match in found if match}
        if not values:
            keys, values = list(its), {key: [] for key in its}
        if list(its) != keys or len(its) < len(folders):
            raise InvalidRequest(
                f"{root} has partitions with different keys (got {'/'.join(folders):.200}, and the "
                f"keys {', '.join(keys):.200} before). Name the files by a pattern: {root}/**/*"
            )
        for key, text in its.items():
            values[key].append(None if text in (_NO_VALUE, "") else text)
    for key, its_values in values.items():
        check_one_tree(root, sorted({text for text in its_values if text}), key)
    return Partitions(values)


def _parts(path: str) -> list[str]:
    """The names in a path; drivers may write those of its beginning in another way."""
    return [part for part in path.rpartition("://")[2].split("/") if part not in ("", ".")]


def _of_shards(name: str, values: Any, categories: tuple[str, ...] = ()) -> IndexedField:
    spec = FieldSpec(name, values.dtype, (), ragged=False, codec="indexed", categories=categories)
    return IndexedField(spec, of_shards=values)
