"""Finds the format of a location, where none is named, and shards in folders of a folder.

A folder of folders named `KEY=VALUE` is one table, as Hive, Spark, pandas and pyarrow write it: its
keys are columns. A folder whose only folder is named as a split is that split.
"""

import fnmatch
import glob
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import numpy as np
from msgspec import Struct

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import ListedFormat
from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    FieldSpec,
    check_names,
    may_be_array,
    renamed,
)
from gyre_daemon.datasets.formats.concat import IndexedField
from gyre_daemon.datasets.formats.installed import installed_names
from gyre_daemon.datasets.indexing.listing import FileListing, ManifestReader, list_files
from gyre_daemon.datasets.known_formats import FORMATS, PATTERNS, SINGLE_FILES, make_format
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import (
    Location,
    check_one_tree,
    is_beside,
    matches_any,
    matching,
    no_match,
    patterns_of,
)
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.shard_files import read_ranges
from gyre_daemon.storage.sources.opener import StorageOpener

_MAX_HEADS = 16  # files whose first bytes are read
_MAX_FOLDERS = 16  # searched for a message
_MANIFESTS = {"metadata.jsonl", "metadata.csv"}  # of `ImageFolder` and `AudioFolder`
_HEAD_BYTES = 512  # a tar header; other signatures are shorter
_JSON_HEAD_BYTES = 64 << 10  # a file whose first line is longer is taken for one with lines
_MAGIC = re.compile(r"[*?\[]")
_PARTITION = re.compile(r"([^=/]+)=([^/]*)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_MAX_INTEGER = (1 << 63) - 1
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_ONLY_FOLDERS = {"data", "train", "training", "val", "valid", "validation", "test"}


class FoundFormat(Struct, frozen=True):
    """The result of a search.

    Attributes:
        name: of the format.
        pattern: of the names of the shards, where their bytes decided; empty for the format's own.
        files: the list of single files, if that is the format.
    """

    name: str
    pattern: str = ""
    files: FileListing | None = None


async def find_format(
    opener: StorageOpener, location: Location, config: DatasetConfig, manifests: ManifestReader
) -> FoundFormat:
    """The format that the names of files say, else their first bytes.

    Single files may lie in folders of folders. These are listed then, and returned.

    Raises:
        ShardMissing: nothing there has a known format.
        InvalidRequest: several formats fit.
    """
    try:
        listed = await opener.open(location, config.storage, "*", follow_links=config.follow_links)
        names = [shard.name.rpartition("/")[2] for shard in listed.shards]
        shards = possible_shards(names)
        if by_name := format_by_name(location.text, shards):
            return FoundFormat(by_name)
        if all(map(may_be_array, shards)):  # more likely facts about the data in the folders
            await _check_no_data_below(opener, location, config)
        by_head = await _by_head(location, listed, names, shards)
        return FoundFormat(by_head, pattern_of(shards))
    except ShardMissing as missing:
        path = Path(location.paths[0])
        if location.scheme == "file" and await MOUNTS.run(path, path.is_file):
            raise
        files = replace(config, format=SINGLE_FILES)
        try:
            single = cast("ListedFormat", make_format(location.text, files))
            return FoundFormat(
                SINGLE_FILES, files=await list_files(opener, location, files, single, manifests)
            )
        except (ShardMissing, InvalidRequest, ConfigError):
            raise missing from None


async def _check_no_data_below(
    opener: StorageOpener, location: Location, config: DatasetConfig
) -> None:
    """Refuse a folder that has shards only in its folders.

    Raises:
        ShardMissing: names them.
    """
    if len(location.paths) != 1:
        return

    async def names_in(path: str) -> list[str]:
        at = replace(location, paths=(path,))
        return await opener.names_in(at, config.storage, follow_links=config.follow_links)

    root = location.paths[0].rstrip("/")
    folders = [name for name in await names_in(root) if name.endswith("/") and not is_beside(name)]
    for folder in folders[:_MAX_FOLDERS]:
        names = possible_shards(await names_in(f"{root}/{folder.rstrip('/')}"))
        if found := [name for name in names if is_named_like_a_shard(name)]:
            raise no_match(location.text, "*", [], [folder + name for name in found])


async def _by_head(location: Location, listed: Storage, names: list[str], shards: list[str]) -> str:
    """The format that the first bytes of evenly chosen shards say."""
    wanted = set(shards[:: -(-len(shards) // _MAX_HEADS)] if shards else ())
    numbers = [number for number, name in enumerate(names) if name in wanted]
    sizes = [min(head_bytes(names[number]), listed.shards[number].size_bytes) for number in numbers]
    heads = await read_ranges(listed, numbers, [0] * len(numbers), sizes)
    by_name = {names[number]: head for number, head in zip(numbers, heads, strict=True) if head}
    return format_by_head(location.text, len(shards), by_name)


def possible_shards(names: Sequence[str]) -> list[str]:
    """The files that may hold samples."""
    return [name for name in names if not is_beside(name)]


def format_by_name(location: str, names: Sequence[str]) -> str | None:
    """The one format that the names of some of the files have; None if they have none.

    Args:
        location: for messages.
        names: of possible shards, without folders.

    Raises:
        InvalidRequest: several formats fit.
    """
    found = {name: its for name, each in PATTERNS.items() if (its := matching(names, each))}
    if len(found) > 1:
        each = ", ".join(f"{its[0]} ({name}, {len(its)} such)" for name, its in found.items())
        raise InvalidRequest(
            f"the files of {location} have several formats: {each}. Say which one is meant, as "
            f"`format`, or name the files by a pattern."
        )
    if manifest := next((names[0] for names in found.values() if _MANIFESTS.issuperset(names)), ""):
        path = f"{location.rstrip('/')}/{manifest}"
        if not location.endswith(f"/{manifest}"):
            raise InvalidRequest(
                f"{path} says more of files, as image folders of Hugging Face have it. Name it "
                '(with format="files" for the files that it lists, else for its lines), or name '
                "the files with samples by a pattern"
            )
    return next(iter(found), None)


def is_named_like_a_shard(name: str) -> bool:
    """Whether a known format has files of this name, and other files hardly have it."""
    return any(matches_any(name, pattern) for pattern in PATTERNS.values())


def format_by_head(location: str, num_files: int, heads: Mapping[str, bytes]) -> str:
    """The one format whose signature begins all of the files.

    Args:
        location: for messages.
        num_files: how many possible shards there are.
        heads: the first `head_bytes` of some of them, by name.

    Raises:
        ShardMissing: no known format begins so.
        InvalidRequest: they begin differently.
    """
    found = {shard: _recognised(shard, head) for shard, head in heads.items()}
    if not any(found.values()):
        looked_for = ", ".join(f"{pattern} ({name})" for name, pattern in PATTERNS.items())
        others = f" It has {num_files} other files, such as {next(iter(heads))}." if heads else ""
        if any(map(may_be_array, heads)):
            others += (
                " A .json file counts if it has an array of objects, or an object in each line."
            )
        packages = ", ".join(installed_names())
        enabled = f" Formats of installed packages must be named: {packages}." if packages else ""
        raise ShardMissing(
            f"no file of {location} has a name of a known format, or begins like one.{others}"
            f"{enabled} Looked for {looked_for}; if the files are of one of these, say so as "
            "`format`, and name them by a pattern"
        )
    if len(set(found.values())) > 1:
        each = ", ".join(f"{shard} ({name or 'unknown'})" for shard, name in found.items())
        raise InvalidRequest(
            f"the files of {location} begin differently: {each}; say which are meant, by a pattern "
            "or a list"
        )
    return next(iter(found.values()))


def head_bytes(name: str) -> int:
    """How many first bytes of a file of this name tell its format."""
    return _JSON_HEAD_BYTES if may_be_array(name) else _HEAD_BYTES


def _recognised(name: str, head: bytes) -> str:
    """The format of a file that begins so; empty if it is not known."""
    if may_be_array(name):
        # names alone tell the format of most datasets, without the module of any other one
        from gyre_daemon.datasets.formats.jsonl import has_records  # noqa: PLC0415

        return "jsonl" * has_records(head, is_whole=len(head) < _JSON_HEAD_BYTES)
    return next((name for name, entry in FORMATS.items() if entry.recognises(head)), "")


def pattern_of(shards: Sequence[str]) -> str:
    """A pattern of the names of possible shards, for a format that was found by their bytes."""
    if all(map(may_be_array, shards)):
        return FORMATS["jsonl"].ambiguous_pattern
    pairs = zip(min(shards), max(shards), strict=False)
    prefix = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return glob.escape(prefix) + "*" if prefix and "{" not in prefix else "[!._]*"


class Nested(Struct, frozen=True):
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


class Partitions(Struct, frozen=True):
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
