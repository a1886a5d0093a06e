"""Finds the format of a location, where the configuration names none."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import SINGLE_FILES, ListedFormat, make_format
from gyre_daemon.datasets.indexing.discovery.detection import (
    format_by_head,
    format_by_name,
    head_bytes,
    pattern_of,
    possible_shards,
)
from gyre_daemon.datasets.indexing.discovery.listing import FileListing, Manifests, list_files
from gyre_daemon.datasets.indexing.shard_files import read_ranges
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opener import StorageOpener

_MAX_HEADS = 16  # files whose first bytes are read


@dataclass(frozen=True, slots=True)
class FoundFormat:
    """What was found.

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
        by_head = await _by_head(location, listed, names, shards)
        return FoundFormat(by_head, pattern_of(shards))
    except ShardMissing as missing:
        if location.scheme == "file" and await asyncio.to_thread(Path(location.paths[0]).is_file):
            raise
        files = replace(config, format=SINGLE_FILES)
        try:
            single = cast("ListedFormat", make_format(location.text, files))
            return FoundFormat(
                SINGLE_FILES, files=await list_files(opener, location, files, single, manifests)
            )
        except (ShardMissing, InvalidRequest, ConfigError):
            raise missing from None


async def _by_head(location: Location, listed: Storage, names: list[str], shards: list[str]) -> str:
    """The format that the first bytes of evenly chosen shards say."""
    wanted = set(shards[:: -(-len(shards) // _MAX_HEADS)] if shards else ())
    numbers = [number for number, name in enumerate(names) if name in wanted]
    sizes = [min(head_bytes(names[number]), listed.shards[number].size_bytes) for number in numbers]
    heads = await read_ranges(listed, numbers, [0] * len(numbers), sizes)
    by_name = {names[number]: head for number, head in zip(numbers, heads, strict=True) if head}
    return format_by_head(location.text, len(shards), by_name)
