"""Opens the shards that a list names: of wids, or of a library that describes its folder.

A list says which shards there are, in which order. What it says of their samples is compared with
what the shards have; a difference is an error. Paths are relative to the list, and lead to nothing
outside of its folder.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.indexing.format_search import is_named_like_a_shard
from gyre_daemon.datasets.known_formats import FORMATS
from gyre_daemon.errors import CorruptSample, InvalidRequest, ShardMissing
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.beneath import LocalFile, Root
from gyre_daemon.storage.location import Location, check_one_set, matches_any, matching
from gyre_daemon.storage.reads import Storage, read_ranges
from gyre_daemon.storage.sources.opener import StorageOpener, stat_local

_FORMAT_OF_LISTS = "webdataset"
# A list is parsed as a whole; the names and numbers of a million shards take about as much.
_MAX_BYTES = 256 << 20
# Enough to see that a file of JSON has samples, and is no list.
_HEAD_BYTES = 64 << 10
_RECORDS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[|.*\}[ \t\r]*\n\s*\{", re.DOTALL)
# Folders of a table's parts, no datasets: partitions, and those of Iceberg's files.
_PART_OF_TABLE = "{*=*,data}"
_MAX_NAMED = 5  # files in a message
_MAX_LISTED = 64  # folders of an object storage listed for a pattern, each by a request
# Formats of single files take all files, whatever a library says of them.
_DESCRIBED_FORMATS = frozenset(FORMATS) - {"files"}
_MAGIC = re.compile(r"[*?\[]")
Shard = TypeVar("Shard")
_WIDS = "wids-shard-index-v1"
_STREAMING = "a dataset of MosaicML Streaming"
# The folders in which a table's files are, below the folder that its log is in.
_LOGS = {
    "_delta_log/": ("a Delta Lake table", "`DeltaTable(...).file_uris()` lists"),
    ".hoodie/": ("a Hudi table", "its newest snapshot has"),
    ".hoodie_partition_metadata": ("a part of a Hudi table", "its newest snapshot has"),
    "_spark_metadata/": ("the output of a stream of Spark", "Spark reads"),
    "metadata/": ("an Iceberg table", "`Table.inspect.files()` of pyiceberg lists"),
}
_OF_ICEBERG = "{*.metadata.json,*.metadata.json.gz,version-hint.text}"
# Files of JSON that may describe a folder, in the order in which they are looked at.
DESCRIPTIONS = ("state.json", "dataset_dict.json", "index.json")
_CACHE_INFO, _CACHE_COPIES = "dataset_info.json", "cache-*.arrow"
_COPY = re.compile(r"cache-[0-9a-f]{16}(_\d{5}_of_\d{5})?\.arrow")  # also without that file


class ListedShard(msgspec.Struct, frozen=True):
    """One shard of a list.

    Attributes:
        url: its path.
        nsamples: that it has; None if the list does not say.
        filesize: its bytes, likewise.
    """

    url: str
    nsamples: int | None = None
    filesize: int | None = None


@dataclass(frozen=True, slots=True)
class FolderDescription:
    """Which files of a folder have samples.

    Attributes:
        library: whose folder it is, for messages.
        source: the file that says so.
        format: of the files.
        shards: in the order of the dataset.
        raw_names: of the same shards before they were compressed, which some folders have instead;
            empty if there are none.
    """

    library: str
    source: str
    format: str
    shards: Sequence[ListedShard]
    raw_names: Sequence[str] = ()

    def unlisted(self, names: Sequence[str]) -> list[str]:
        """Files of the format, relative to the folder, that the library does not count."""
        listed = {shard.url for shard in self.shards}.union(self.raw_names)
        pattern = FORMATS[self.format].pattern
        return [
            name
            for name in names
            if name not in listed and matches_any(name.rpartition("/")[2], pattern)
        ]


@dataclass(frozen=True, slots=True)
class ShardList:
    """The shards that a list names.

    Attributes:
        storage: the shards, in the order of the list.
        listed: the list's facts of each.
        format: of the shards.
    """

    storage: Storage
    listed: Sequence[ListedShard]
    format: str

    def check(self, shard: int, num_samples: int) -> None:
        """Compare a shard with the list's facts of it.

        Raises:
            CorruptSample: they differ.
        """
        listed, found = self.listed[shard], self.storage.shards[shard]
        for what, wanted, has in (
            ("samples", listed.nsamples, num_samples),
            ("bytes", listed.filesize, found.size_bytes),
        ):
            if wanted is not None and wanted != has:
                reason = f"it has {has} {what}, and the list of shards says {wanted}"
                raise CorruptSample(
                    f"shard {found.name} does not fit: {reason}; restore the shard, or make the "
                    "list again",
                    {"shard": found.name, "reason": reason},
                )


async def find_shard_list(
    opener: StorageOpener, location: Location, config: DatasetConfig
) -> ShardList | None:
    """The shards that a list names, or a library describes in a folder; else None.

    Raises:
        InvalidRequest: Gyre does not read what the library wrote, or the list names what is not in
            its folder, or the dataset has another format.
        ShardMissing, NotAllowed, StorageUnavailable: a shard cannot be read.
    """
    if len(location.paths) != 1 or config.format not in {"", *_DESCRIBED_FORMATS}:
        return None
    path = location.paths[0]
    if path.endswith(".json") and config.format in ("", _FORMAT_OF_LISTS):
        folder, name = _split(path)
        found = await _read(opener, location, config, folder, name)
        if found is None and config.format:
            raise InvalidRequest(
                f"{location.text} is no list of shards as wids has it; name the shards, or their "
                "folder"
            )
        return await _opened(opener, location, config, folder, found) if found else None
    if _MAGIC.search(path) or is_named_like_a_shard(_split(path)[1]):
        return None
    found = await _description_of(opener, location, config, path)
    if found is None:
        return None
    if config.format and config.format != found.format:
        raise InvalidRequest(
            f"{location.text} is {found.library} ({found.source}), of the format {found.format} "
            f"(got {config.format}). Leave the format out, or name the files as a brace list"
        )
    return await _opened(opener, location, config, path, found)


async def check_pattern(
    opener: StorageOpener, location: Location, config: DatasetConfig, shards: Storage
) -> None:
    """Refuse files that a pattern names, and that the library whose folder it is does not count.

    Raises:
        InvalidRequest: with the first of them.
    """
    is_pattern = any(map(_MAGIC.search, location.paths))
    if not is_pattern or config.format not in {"", *_DESCRIBED_FORMATS}:
        return
    paths = [
        str(local) if (local := shards.local_file(number)) else shards.path(number)
        for number in range(len(shards.shards))
    ]
    prefixes = [_split(_MAGIC.split(path)[0])[0] for path in location.paths]
    folders = list(dict.fromkeys([*prefixes, *(_split(path)[0] for path in paths)]))
    for folder in folders if location.scheme == "file" else folders[:_MAX_LISTED]:
        found = await _description_of(opener, location, config, folder)
        if found is None:
            continue
        root = folder.rstrip("/") + "/"
        names = [path.removeprefix(root) for path in paths if path.startswith(root)]
        if unlisted := found.unlisted(names):
            raise InvalidRequest(
                f"{folder} is {found.library}, and {found.source} does not list {unlisted[0]}. "
                f"Name the folder: {folder}"
            )


async def _description_of(
    opener: StorageOpener, location: Location, config: DatasetConfig, folder: str
) -> FolderDescription | None:
    """A library's description of a folder; None if there is none."""
    names = await _names_in(opener, location, config, folder)
    refuse_tables(folder, names, await _metadata_in(opener, location, config, folder, names))
    above = folder.rstrip("/")
    while matches_any(_split(above)[1], _PART_OF_TABLE):
        above = _split(above)[0]
        its = await _names_in(opener, location, config, above)
        refuse_tables(above, its, await _metadata_in(opener, location, config, above, its))
    found = None
    for name in DESCRIPTIONS:
        if name in names and (found := await _read(opener, location, config, folder, name)):
            break
    found = found or describe_cache(folder, names)
    if found and (left := found.unlisted(names)):
        facts = {"path": folder, "list": found.source, "num_files": len(left)}
        log_event(
            "files that a list of shards leaves out are passed over",
            {**facts, "names": ", ".join(left[:_MAX_NAMED])},
            logging.WARNING,
        )
    return found


async def _names_in(
    opener: StorageOpener, location: Location, config: DatasetConfig, folder: str
) -> list[str]:
    at = replace(location, paths=(folder,))
    return await opener.names_in(at, config.storage, follow_links=config.follow_links)


async def _metadata_in(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    folder: str,
    names: Sequence[str],
) -> list[str]:
    """The names in the folder `metadata` of a folder; none if it has none."""
    if "metadata/" not in names:
        return []
    return await _names_in(opener, location, config, f"{folder.rstrip('/')}/metadata")


async def _read(
    opener: StorageOpener, location: Location, config: DatasetConfig, folder: str, name: str
) -> FolderDescription | None:
    """A JSON file's list of the folder's files; None if it has none."""
    at = replace(location, paths=(f"{folder.rstrip('/')}/{name}" if folder else name,))
    storage = await opener.open(at, config.storage, "*", follow_links=config.follow_links)
    size = storage.shards[0].size_bytes
    (head,) = await read_ranges(storage, [0], [0], [min(size, _HEAD_BYTES)])
    if size > _MAX_BYTES or _RECORDS.match(head):
        return None
    (data,) = await read_ranges(storage, [0], [0], [size])
    return await compute(describe, folder, name, data)


async def _opened(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    folder: str,
    found: FolderDescription,
) -> ShardList:
    """The shards of a description."""
    names = [shard.url for shard in found.shards]
    try:
        storage = await _open(opener, location, config, folder, names)
        return ShardList(storage, found.shards, found.format)
    except ShardMissing:
        if not found.raw_names:
            raise
        storage = await _open(opener, location, config, folder, found.raw_names)
        listed = [
            ListedShard(name, shard.nsamples)
            for name, shard in zip(found.raw_names, found.shards, strict=True)
        ]
        return ShardList(storage, listed, found.format)


async def _open(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    folder: str,
    names: Sequence[str],
) -> Storage:
    """Files of a folder, in this order."""
    if location.scheme == "file":
        root = Root(Path(folder or "."), config.follow_links)
        files = [LocalFile(root, name) for name in names]
        return opener.local(files, await stat_local(files), None)
    paths = tuple(f"{folder.rstrip('/')}/{name}" for name in names)
    return await opener.open(replace(location, paths=paths), config.storage, "*")


def _split(path: str) -> tuple[str, str]:
    """The folder of a path, and its last name."""
    folder, slash, name = path.rpartition("/")
    return folder or slash, name


def refuse_tables(folder: str, names: Sequence[str], in_metadata: Sequence[str]) -> None:
    """Refuse a table whose log says which of its files count.

    Args:
        folder: as written; shown in the error.
        names: in the folder; those of folders end with a slash.
        in_metadata: of the files in its folder `metadata`.

    Raises:
        InvalidRequest: names the library, and how to name the files.
    """
    for log, (what, source) in _LOGS.items():
        if log not in names:
            continue
        if log == "metadata/" and not any(matches_any(name, _OF_ICEBERG) for name in in_metadata):
            continue
        raise InvalidRequest(
            f"{folder} is {what}: its log ({log.rstrip('/')}) says which files count, and Gyre "
            f"does not read that. Name the files that {source}, as a brace list: "
            f"{folder.rstrip('/')}/{{a,b}}.parquet"
        )


def describe_cache(folder: str, names: Sequence[str]) -> FolderDescription | None:
    """What a folder has next to copies that `map` and `filter` keep; None if it has no copies.

    Raises:
        InvalidRequest: it has several splits.
    """
    source = _CACHE_INFO if _CACHE_INFO in names else "the library"
    pattern = FORMATS["arrow"].pattern
    found = sorted(matching(names, pattern))
    shards = [
        name
        for name in found
        if not _COPY.fullmatch(name)
        and (source != _CACHE_INFO or not matches_any(name, _CACHE_COPIES))
    ]
    if not shards or len(shards) == len(found):
        return None
    check_one_set(folder, shards, "*.arrow")
    listed = [ListedShard(name) for name in shards]
    return FolderDescription("a cache of Hugging Face datasets", source, "arrow", listed)


def describe(folder: str, source: str, data: bytes) -> FolderDescription | None:
    """A JSON file's list of the folder's files; None if it has none.

    Args:
        folder: as written; shown in errors.
        source: the name of the file.
        data: of the file.

    Raises:
        InvalidRequest: Gyre does not read such folders, or the file names missing shards.
    """
    try:
        keys = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if source not in DESCRIPTIONS:
            return None
        raise InvalidRequest(
            f"{folder.rstrip('/')}/{source} is damaged ({error!s:.200}). Restore it: it says which "
            "files have samples; or name these by a brace list"
        ) from error
    if not isinstance(keys, dict):
        return None
    for key, read in _READERS.items():
        if key in keys:
            return read(_Source(folder, source, keys))
    return None


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that describes its folder.

    Attributes:
        folder: as written.
        name: of the file.
        keys: its keys.
    """

    folder: str
    name: str
    keys: Mapping[str, Any] = field(repr=False)

    @property
    def path(self) -> str:
        return f"{self.folder.rstrip('/')}/{self.name}"

    def listed(
        self, library: str, format_name: str, shards: Sequence[ListedShard]
    ) -> FolderDescription:
        """A description of these shards, whose names are made relative to the folder."""
        if not shards:
            raise InvalidRequest(f"{self.path} lists no shards; write {library} again")
        named = [msgspec.structs.replace(each, url=self.relative(each.url)) for each in shards]
        names = [each.url for each in named]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequest(f"{self.path} lists the shard {twice!r:.200} twice")
        return FolderDescription(library, self.name, format_name, named)

    def relative(self, url: str) -> str:
        """The path of a shard relative to the folder."""
        name = url.removeprefix("file://")
        if "://" in name or name.startswith("/"):
            name = name.removeprefix(f"{self.folder.rstrip('/')}/")
        parts = name.split("/")
        is_inside = name.isprintable() and not {"", ".", ".."} & set(parts) and "://" not in name
        if not is_inside or any(letter in name for letter in "*?[#"):
            raise InvalidRequest(
                f"{self.path} lists {url!r:.200}, which is no path below its own folder; write the "
                "list with relative paths"
            )
        return name

    def refusal(self, what: str, fix: str) -> InvalidRequest:
        return InvalidRequest(f"{self.folder} is {what} ({self.name}). {fix}")

    def shards_of(self, key: str, kind: type[Shard]) -> list[Shard]:
        """The shards under a key, checked.

        Raises:
            InvalidRequest: they are none.
        """
        try:
            return [msgspec.convert(each, kind) for each in self.keys[key]]
        except (TypeError, msgspec.ValidationError) as error:
            raise InvalidRequest(f"{self.path} is no list of shards: {error!s:.300}") from error


def _wids(source: _Source) -> FolderDescription:
    kind = source.keys.get("__kind__", "")
    if kind != _WIDS or not source.keys.get("shardlist"):
        raise InvalidRequest(
            f"{source.path} is no list of shards as wids has it: its `__kind__` is {kind!r:.99} "
            f"and not {_WIDS}, or it has no `shardlist`. Name the shards."
        )
    shards = source.shards_of("shardlist", ListedShard)
    return source.listed("the list of wids", "webdataset", shards)


class _DataFile(msgspec.Struct):
    filename: str


def _saved_dataset(source: _Source) -> FolderDescription:
    what = "a dataset of Hugging Face"
    if source.keys.get("_indices_data_files"):
        raise source.refusal(
            f"{what} that selects rows of its files",
            "Save it again after `flatten_indices()`, with `save_to_disk`.",
        )
    files = source.shards_of("_data_files", _DataFile)
    return source.listed(what, "arrow", [ListedShard(each.filename) for each in files])


def _splits(source: _Source) -> None:
    splits = source.keys["splits"]
    if source.name != "dataset_dict.json" or not isinstance(splits, list):
        return
    root = source.folder.rstrip("/")
    folders = " or ".join(f"{root}/{name}" for name in splits)
    named = ", ".join(map(str, splits))
    raise source.refusal(
        f"a DatasetDict of Hugging Face with the splits {named:.300}", f"Name one: {folders:.1000}."
    )


class _StreamingFile(msgspec.Struct):
    basename: str
    num_bytes: int = msgspec.field(name="bytes")


class _StreamingShard(msgspec.Struct):
    format: str
    samples: int
    compression: str | None = None
    raw_data: _StreamingFile | None = None
    zip_data: _StreamingFile | None = None


def _streaming(source: _Source) -> FolderDescription | None:
    shards = source.keys["shards"]
    if not isinstance(shards, list) or not all(
        isinstance(each, dict) and "format" in each for each in shards
    ):
        return None
    listed, raw_names = [], []
    for shard in source.shards_of("shards", _StreamingShard):
        kind, compression = shard.format, (shard.compression or "").partition(":")[0]
        if kind != "mds":
            raise source.refusal(
                f"{_STREAMING} in its format {kind!r:.50}", "Gyre reads only its format mds."
            )
        if compression not in ("", "zstd"):
            raise source.refusal(
                f"{_STREAMING} with the compression {compression!r:.50}",
                "Gyre reads zstd, or none: write it so.",
            )
        file = shard.zip_data or shard.raw_data
        if file is None:
            raise InvalidRequest(f"{source.path} is no list of shards: one has no file")
        listed.append(ListedShard(file.basename, shard.samples, file.num_bytes))
        raw_names.append((shard.raw_data or file).basename)
    found = source.listed(_STREAMING, "mds", listed)
    names = [source.relative(name) for name in raw_names]
    compressed = [shard.url for shard in found.shards]
    return replace(found, raw_names=names) if names != compressed else found


def _litdata(source: _Source) -> FolderDescription | None:
    chunks = source.keys["chunks"]
    if not isinstance(chunks, list) or not all(
        isinstance(each, dict) and "chunk_bytes" in each for each in chunks
    ):
        return None
    files = source.shards_of("chunks", _DataFile)
    if all(each.filename.endswith(".parquet") for each in files):
        return source.listed(
            "an index of LitData", "parquet", [ListedShard(each.filename) for each in files]
        )
    raise source.refusal(
        "a dataset that LitData optimized",
        "Gyre does not read its chunks. Write the samples in one of Gyre's formats, such as "
        "Parquet, MDS, or flat files of token ids.",
    )


# Takes a file with the key.
_READERS: Mapping[str, Callable[[_Source], FolderDescription | None]] = {
    "__kind__": _wids,
    "shardlist": _wids,
    "_data_files": _saved_dataset,
    "splits": _splits,
    "shards": _streaming,
    "chunks": _litdata,
}
