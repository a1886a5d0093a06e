"""Lists of shards as wids has them: JSON that names tar files, and the samples of each.

A list says which shards there are, in which order. What it says of their samples is compared with
what the shards have; a difference is an error. Paths are relative to the list, and lead to nothing
outside of its folder.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.indexing.shard_files import read_ranges
from gyre_daemon.errors import CorruptSample, InvalidRequest
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile, Root
from gyre_daemon.storage.local.listing import stat_shards
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opener import StorageOpener

FORMAT = "webdataset"
_KIND = "wids-shard-index-v1"
# A list is parsed as a whole; the names and numbers of a million shards take about as much.
_MAX_BYTES = 256 << 20


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


class _ShardList(msgspec.Struct):
    kind: str = msgspec.field(default="", name="__kind__")
    shardlist: list[ListedShard] | None = None


_DECODER = msgspec.json.Decoder(_ShardList)


@dataclass(frozen=True, slots=True)
class ShardList:
    """The shards that a list names.

    Attributes:
        storage: the shards, in the order of the list.
        listed: what the list says of each.
    """

    storage: Storage
    listed: Sequence[ListedShard]

    def check(self, shard: int, num_samples: int) -> None:
        """Compare a shard with what the list says of it.

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


def may_be_list(location: Location, format_name: str) -> bool:
    """Whether a location is a list of shards, by its name and the format that is asked for."""
    is_json = len(location.paths) == 1 and location.paths[0].endswith(".json")
    return is_json and format_name in ("", FORMAT)


async def open_shard_list(
    opener: StorageOpener, location: Location, config: DatasetConfig
) -> ShardList:
    """The shards of a list.

    Raises:
        InvalidRequest: it is no such list, or names what is not in its folder.
        ShardMissing, NotAllowed, StorageUnavailable: it, or a shard, cannot be read.
    """
    storage = await opener.open(location, config.storage, "*", follow_links=config.follow_links)
    if storage.shards[0].size_bytes > _MAX_BYTES:
        raise InvalidRequest(
            f"{location.text} has {storage.shards[0].size_bytes} bytes, more than a list of shards "
            f"may have ({_MAX_BYTES})"
        )
    (data,) = await read_ranges(storage, [0], [0], [storage.shards[0].size_bytes])
    folder = location.paths[0].rpartition("/")[0]
    listed, names = await asyncio.to_thread(_parse, location.text, folder, data)
    if location.scheme == "file":
        root = Root(Path(folder or "."), config.follow_links)
        files = [LocalFile(root, name) for name in names]
        shards = await asyncio.to_thread(stat_shards, files)
        return ShardList(opener.local(files, shards, None), listed)
    paths = tuple(f"{folder}/{name}" for name in names)
    them = Location(location.scheme, paths, location.text)
    return ShardList(await opener.open(them, config.storage, "*"), listed)


def _parse(text: str, folder: str, data: bytes) -> tuple[list[ListedShard], list[str]]:
    """The shards of a list, and the path of each relative to the folder."""
    try:
        found = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{text} is no list of shards: {error!s:.300}") from error
    if found.kind != _KIND or not found.shardlist:
        raise InvalidRequest(
            f"{text} is no list of shards as wids has it: its `__kind__` is {found.kind!r:.99} "
            f"and not {_KIND}, or it has no `shardlist`; name the shards, or their folder"
        )
    names = [_relative(text, folder, shard.url) for shard in found.shardlist]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{text} lists the shard {twice!r:.200} twice")
    return found.shardlist, names


def _relative(text: str, folder: str, url: str) -> str:
    """The path of a shard relative to the folder of its list."""
    name = url.removeprefix("file://")
    if "://" in name or name.startswith("/"):
        name = name.removeprefix(f"{folder}/")
    parts = name.split("/")
    is_inside = name.isprintable() and not {"", ".", ".."} & set(parts) and "://" not in name
    if not is_inside or any(letter in name for letter in "*?[#"):
        raise InvalidRequest(
            f"{text} lists {url!r:.200}, which is no path below its own folder; write the list "
            "with relative paths"
        )
    return name
