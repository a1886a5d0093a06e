"""Opens the shards that a list names: of wids, or of a library that describes its folder.

A list says which shards there are, in which order. What it says of their samples is compared with
what the shards have; a difference is an error. Paths are relative to the list, and lead to nothing
outside of its folder.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.indexing.discovery.detection import is_named_like_a_shard
from gyre_daemon.datasets.indexing.discovery.library_folders import (
    DESCRIPTIONS,
    FolderDescription,
    ListedShard,
    describe,
    describe_cache,
    refuse_tables,
)
from gyre_daemon.datasets.known_formats import FORMATS
from gyre_daemon.errors import CorruptSample, InvalidRequest, ShardMissing
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile, Root
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opening.opener import StorageOpener, stat_local
from gyre_daemon.storage.opening.shard_files import read_ranges
from gyre_daemon.storage.patterns import matches_any

_FORMAT_OF_LISTS = "webdataset"
# A list is parsed as a whole; the names and numbers of a million shards take about as much.
_MAX_BYTES = 256 << 20
# Enough to see that a file of JSON has samples, and is no list.
_HEAD_BYTES = 64 << 10
_RECORDS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[|.*\}\s*\n\s*\{", re.DOTALL)
# Folders of a table's parts, no datasets: partitions, and those of Iceberg's files.
_PART_OF_TABLE = "{*=*,data}"
_MAX_NAMED = 5  # files in a message
_MAX_LISTED = 64  # folders of an object storage listed for a pattern, each by a request
# Formats of single files take all files, whatever a library says of them.
_DESCRIBED_FORMATS = frozenset(FORMATS) - {"files"}
_MAGIC = re.compile(r"[*?\[]")


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
