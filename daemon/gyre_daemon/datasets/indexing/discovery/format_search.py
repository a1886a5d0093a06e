"""Finds the format of a location, where the configuration names none."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import ListedFormat
from gyre_daemon.datasets.formats.jsonl import may_be_array
from gyre_daemon.datasets.indexing.discovery.detection import (
    format_by_head,
    format_by_name,
    head_bytes,
    is_named_like_a_shard,
    pattern_of,
    possible_shards,
)
from gyre_daemon.datasets.indexing.discovery.listing import FileListing, Manifests, list_files
from gyre_daemon.datasets.known_formats import SINGLE_FILES, make_format
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.opening.opener import StorageOpener
from gyre_daemon.storage.opening.shard_files import read_ranges
from gyre_daemon.storage.patterns import is_beside, no_match

_MAX_HEADS = 16  # files whose first bytes are read
_MAX_FOLDERS = 16  # searched for a message


@dataclass(frozen=True, slots=True)
class FoundFormat:
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
    opener: StorageOpener, location: Location, config: DatasetConfig, manifests: Manifests
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
