"""Finds the format of a location, where none is named, and lists its files.

A folder of folders named `KEY=VALUE` is one table, as Hive, Spark, pandas and pyarrow write it: its
keys are columns. A folder whose only folder is named as a split is that split.

Single files are joined to one shard. A manifest may name them: a table, or, as for YOLO, files that
describe the samples next to them. One that is parsed at once, as JSON is, would keep the daemon's
interpreter for seconds: 5.5 s for 460 MB of annotations. Labels of many images are parsed in
Python, which takes turns of it from all others as long. So a compute worker does that.
"""

import asyncio
import fnmatch
import glob
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import ListedFormat, SampleIndex
from gyre_daemon.datasets.formats.base import (
    PRESENT_SUFFIX,
    Arrays,
    Described,
    DescribedFormat,
    FieldSpec,
    Manifest,
    ManifestColumn,
    ManifestFormat,
    ManifestPlace,
    check_names,
    may_be_array,
    renamed,
)
from gyre_daemon.datasets.formats.concat import IndexedField
from gyre_daemon.datasets.known_formats import (
    FORMATS,
    PATTERNS,
    SINGLE_FILES,
    installed_names,
    make_format,
)
from gyre_daemon.datasets.scanning import Scanner
from gyre_daemon.errors import ConfigError, CorruptSample, InvalidRequest, ShardMissing
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.location import (
    Location,
    check_one_tree,
    is_beside,
    matches_any,
    matching,
    no_match,
    patterns_of,
    possible_shards,
)
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.reads import ConcatenatedFiles, Storage, read_ranges
from gyre_daemon.storage.shard import FileTable, Shard, Texts
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeWorkers

_AT_ONCE = 2  # each may take the memory of one process
_LABELS, _TEXTS_AT_ONCE = "labels", 1000
# Files to read at a time: of an object storage as requests that wait, and each with the
# cost of a plan. All of them stay in memory until they are parsed, so their size has a limit.
_FILES_AT_ONCE = 1000
_MAX_BYTES = 1 << 30
# A manifest is read whole, and its rows take some ten times its bytes while that is done.
_MAX_MANIFEST_BYTES = 1 << 30
OpenFiles = Callable[..., Awaitable[tuple[Storage, FileTable]]]  # see `StorageOpener.open_files`


class ManifestReader:
    """Reads the manifests of all datasets of a daemon."""

    def __init__(self, processes: ComputeWorkers) -> None:
        """See `Scanner`."""
        self._processes = processes
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def read(self, listed: ManifestFormat, storage: Storage) -> Manifest:
        """The manifest, the only shard of a storage.

        Raises:
            CorruptSample: it is damaged, or takes too much memory.
            ConfigError: it lacks columns.
            GyreError: it cannot be read.
        """
        if not listed.reads_apart:
            shard = storage.shards[0]
            (data,) = await read_ranges(storage, [0], [0], [shard.size_bytes])
            return await compute(listed.read_manifest, shard.name, data)
        run, name = partial(_run, listed), storage.shards[0].name
        return await self._scanned(name, lambda scanner: scanner.scan(run, storage, 0))

    async def parse(
        self, listed: DescribedFormat, described: Described, texts: Sequence[bytes]
    ) -> Manifest:
        """The manifest that the texts of samples make.

        Raises:
            CorruptSample: one is damaged, or they take too much memory.
        """
        sizes = np.array([len(text) for text in texts], np.int64)
        run = partial(_run_described, listed, described, sizes)
        return await self._scanned(
            _LABELS, lambda scanner: scanner.scan_stream(run, _LABELS, _portions(texts))
        )

    async def _scanned(self, name: str, scan: Callable[[Scanner], Awaitable[Arrays]]) -> Manifest:
        """The manifest that a compute worker makes."""
        scanner = Scanner(self._processes)
        try:
            async with self._turns:
                arrays = await scan(scanner)
        finally:
            scanner.kill()
        try:
            return await compute(_from_arrays, arrays)
        except (KeyError, ValueError, TypeError) as error:
            reason = "the process that read it has failed"
            raise CorruptSample(
                f"the manifest {name}: {reason}", {"shard": name, "reason": reason}
            ) from error


async def _portions(texts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        yield b"".join(texts[begin : begin + _TEXTS_AT_ONCE])


def _run_described(
    listed: DescribedFormat,
    described: Described,
    sizes: npt.NDArray[np.int64],
    name: str,
    file: BinaryIO,
) -> Arrays:
    texts = Texts.joined([file.read()], sizes)
    return _as_arrays(listed.manifest(described, [texts[row] for row in range(len(texts))]))


def _run(listed: ManifestFormat, name: str, file: BinaryIO) -> Arrays:
    return _as_arrays(listed.read_manifest(name, file.read()))


def _as_arrays(manifest: Manifest) -> Arrays:
    columns = manifest.columns
    about = [[column.name, column.kind, column.categories] for column in columns]
    arrays: dict[str, Any] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    values = [manifest.names, *(column.values for column in columns)]
    for number, each in enumerate(values):
        if isinstance(each, Texts):
            arrays[f"data{number}"] = np.frombuffer(each.data, np.uint8)
            arrays[f"ends{number}"] = each.ends
        else:
            arrays[f"values{number}"] = each
    return arrays


def _from_arrays(arrays: Arrays) -> Manifest:
    names = _texts(arrays, 0)
    columns = []
    about = json.loads(arrays["about"].tobytes())
    for number, (name, kind, categories) in enumerate(about, 1):
        is_text = f"ends{number}" in arrays
        values = _texts(arrays, number) if is_text else arrays[f"values{number}"]
        if len(values) != len(names):
            raise ValueError(f"the column {name} has {len(values)} values")
        columns.append(ManifestColumn(name, kind, values, tuple(categories)))
    return Manifest(names, tuple(columns))


def _texts(arrays: Arrays, number: int) -> Texts:
    data, ends = arrays[f"data{number}"].tobytes(), arrays[f"ends{number}"]
    if ends[0] != 0 or ends[-1] != len(data) or (np.diff(ends) < 0).any():
        raise ValueError("texts are not where they are said to be")
    return Texts(data, ends)


async def _read_described(
    open_files: OpenFiles,
    location: Location,
    listed: DescribedFormat,
    about: Storage,
    manifests: ManifestReader,
) -> Manifest:
    """The manifest of a folder whose samples are described by files next to them."""
    (shard,) = about.shards
    (data,) = await read_ranges(about, [0], [0], [shard.size_bytes])
    files, table = await open_files(location)
    described = await compute(listed.described, shard.name, data, table.names)
    sizes = np.where(described.texts < 0, 0, table.sizes[described.texts])
    if (total := int(sizes.sum())) > _MAX_BYTES:
        raise InvalidRequest(
            f"the files that describe those of {location.text} have {total} bytes, more than "
            f"{_MAX_BYTES}; split it into several datasets"
        )
    texts = [b""] * len(sizes)
    wanted = np.flatnonzero(sizes)  # empty files are not read
    for begin in range(0, len(wanted), _FILES_AT_ONCE):
        some = wanted[begin : begin + _FILES_AT_ONCE]
        numbers = described.texts[some].tolist()
        found = await read_ranges(files, numbers, [0] * len(some), sizes[some].tolist())
        for row, text in zip(some.tolist(), found, strict=True):
            texts[row] = text
    return await manifests.parse(listed, described, texts)


class FileListing(Struct, frozen=True):
    """The single files of a dataset; the `Format` of the one shard that they make.

    Attributes:
        storage: the shard.
        format: of the files.
        table: of the files.
        columns: a manifest's columns of them.
    """

    storage: ConcatenatedFiles
    format: ListedFormat
    table: FileTable
    columns: Sequence[ManifestColumn]
    pattern = "*"
    unpacks_gzip = False
    inspection = None

    def assemble(self, shards: Sequence[Shard], inspected: Sequence[Arrays]) -> SampleIndex:
        """See `Format.assemble`; the list says it all."""
        return self.format.index_of(self.table, self.columns)


async def list_files(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    listed: ListedFormat,
    manifests: ManifestReader,
) -> FileListing:
    """The files of a location.

    Raises:
        CorruptSample: the manifest is damaged.
        InvalidRequest: the folder holds several datasets, or the manifest is too long; otherwise
            see `StorageOpener.open_files`.
    """
    open_files = partial(
        opener.open_files,
        settings=config.storage,
        is_wanted=listed.is_wanted,
        follow_links=config.follow_links,
    )
    manifest: Manifest | None = None
    place = listed.manifest_of(location.paths[0]) if len(location.paths) == 1 else None
    if place:
        storage = await _open_manifest(opener, open_files, location, config, place)
        if isinstance(listed, DescribedFormat):
            manifest = await _read_described(open_files, location, listed, storage, manifests)
        else:
            assert isinstance(listed, ManifestFormat)
            manifest = await manifests.read(listed, storage)
        if not len(manifest.names):
            raise ShardMissing(f"{place.path} lists no files")
        location = replace(location, paths=(place.folder,))
    files, table = await open_files(location, names=manifest.names if manifest else None)
    columns = manifest.columns if manifest else ()
    if manifest is None:
        check_one_tree(location.text, table.top_folders())
    texts = [column.values for column in columns if isinstance(column.values, Texts)]
    heads = await compute(Texts.merged, [table.names, *texts])  # a tenth of a second
    joined = await compute(ConcatenatedFiles, files, table, heads, location.text)
    return FileListing(joined, listed, table, columns)


async def _open_manifest(
    opener: StorageOpener,
    open_files: OpenFiles,
    location: Location,
    config: DatasetConfig,
    place: ManifestPlace,
) -> Storage:
    """The manifest as the only shard; below the folder, links lead nowhere else than in it."""
    name = place.path.removeprefix(place.folder.rstrip("/") + "/")
    if "/" in name:
        at, names = replace(location, paths=(place.folder,)), Texts.of([name.encode()])
        storage, _ = await open_files(at, names=names)
    else:
        at = replace(location, paths=(place.path,))
        storage = await opener.open(at, config.storage, "*", follow_links=config.follow_links)
    if len(storage.shards) != 1:  # a folder or a pattern stands for many files
        raise InvalidRequest(
            f"{place.path} is {len(storage.shards)} files; name the one that describes the dataset"
        )
    if (size := storage.shards[0].size_bytes) > _MAX_MANIFEST_BYTES:
        raise InvalidRequest(
            f"the manifest {place.path} has {size} bytes, more than {_MAX_MANIFEST_BYTES}; split "
            "it into several datasets"
        )
    return storage


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
    follow_links = config.follow_links
    try:
        if location.scheme == "file" and len(location.paths) == 1:
            # names are there ten times sooner than the size and times of each file
            entries = await opener.names_in(location, config.storage, follow_links=follow_links)
            shards = possible_shards([name for name in entries if not name.endswith("/")])
            if by_name := _format_by_name(location.text, shards):
                return FoundFormat(by_name)
        listed = await opener.open(location, config.storage, "*", follow_links=follow_links)
        names = [shard.name.rpartition("/")[2] for shard in listed.shards]
        shards = possible_shards(names)
        if by_name := _format_by_name(location.text, shards):
            return FoundFormat(by_name)
        if all(map(may_be_array, shards)):  # more likely facts about the data in the folders
            await _check_no_data_below(opener, location, config)
        by_head = await _format_by_head(location, listed, names, shards)
        return FoundFormat(by_head, _pattern_of(shards))
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
    """Refuse a folder that has shards only in its folders."""
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


def _format_by_name(location: str, names: Sequence[str]) -> str | None:
    """The one format that the names of possible shards have; None if they have none."""
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


async def _format_by_head(
    location: Location, listed: Storage, names: list[str], shards: list[str]
) -> str:
    """The one format whose signature begins evenly chosen shards."""
    wanted = set(shards[:: -(-len(shards) // _MAX_HEADS)] if shards else ())
    numbers = [number for number, name in enumerate(names) if name in wanted]
    sizes = [
        min(
            _JSON_HEAD_BYTES if may_be_array(names[number]) else _HEAD_BYTES,
            listed.shards[number].size_bytes,
        )
        for number in numbers
    ]
    read = await read_ranges(listed, numbers, [0] * len(numbers), sizes)
    heads = {names[number]: head for number, head in zip(numbers, read, strict=True) if head}
    found = {shard: _recognised(shard, head) for shard, head in heads.items()}
    if not any(found.values()):
        looked_for = ", ".join(f"{pattern} ({name})" for name, pattern in PATTERNS.items())
        others = f" It has {len(shards)} other files, such as {next(iter(heads))}." if heads else ""
        if any(map(may_be_array, heads)):
            others += (
                " A .json file counts if it has an array of objects, or an object in each line."
            )
        packages = ", ".join(installed_names())
        enabled = f" Formats of installed packages must be named: {packages}." if packages else ""
        raise ShardMissing(
            f"no file of {location.text} has a name of a known format, or begins like one.{others}"
            f"{enabled} Looked for {looked_for}; if the files are of one of these, say so as "
            "`format`, and name them by a pattern"
        )
    if len(set(found.values())) > 1:
        each = ", ".join(f"{shard} ({name or 'unknown'})" for shard, name in found.items())
        raise InvalidRequest(
            f"the files of {location.text} begin differently: {each}; say which are meant, by a "
            "pattern or a list"
        )
    return next(iter(found.values()))


def _recognised(name: str, head: bytes) -> str:
    """The format of a file that begins so; empty if it is not known."""
    if may_be_array(name):
        # names alone tell the format of most datasets, without the module of any other one
        from gyre_daemon.datasets.formats.jsonl import has_records  # noqa: PLC0415

        return "jsonl" * has_records(head, is_whole=len(head) < _JSON_HEAD_BYTES)
    return next((name for name, entry in FORMATS.items() if entry.recognises(head)), "")


def _pattern_of(shards: Sequence[str]) -> str:
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
        pairs: the served fields, each with its key.
    """

    values: Mapping[str, Sequence[str | None]]
    pairs: Sequence[tuple[str, str]] = ()

    def chosen(self, config: DatasetConfig) -> "tuple[DatasetConfig, Partitions]":
        """The configuration without the keys that `columns` has, and the columns to serve.

        Raises:
            ConfigError: all of `columns` are keys, or no field can have the name of one.
        """
        wanted = config.options.get("columns")
        if not isinstance(wanted, Sequence) or not wanted or isinstance(wanted, str):
            check_names(list(self.values), "columns")
            return config, Partitions(self.values, [(key, key) for key in self.values])
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
        config = replace(config, options={**config.options, "columns": rest})
        return config, Partitions(self.values, chosen)

    def fields(self, shards: Sequence[int]) -> list[IndexedField]:
        """The served fields of a dataset of some of the shards, which are numbered anew."""
        return [each for pair in self.pairs for each in self._fields(*pair, shards)]

    def _fields(self, field: str, key: str, shards: Sequence[int]) -> Iterator[IndexedField]:
        """The values of a key, and which shards have one if some have none."""
        found = [self.values[key][shard] for shard in shards]
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
