"""Finds the format of a location, where the configuration names none."""

import glob
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import ListedFormat
from gyre_daemon.datasets.formats.installed import installed_names
from gyre_daemon.datasets.formats.jsonl import has_records, may_be_array
from gyre_daemon.datasets.indexing.listing import FileListing, ManifestReader, list_files
from gyre_daemon.datasets.known_formats import FORMATS, SINGLE_FILES, make_format
from gyre_daemon.errors import ConfigError, InvalidRequest, ShardMissing
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.location import Location, is_beside, matches_any, no_match
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.opener import StorageOpener
from gyre_daemon.storage.shard_files import read_ranges

_MAX_HEADS = 16  # files whose first bytes are read
_MAX_FOLDERS = 16  # searched for a message
_MANIFESTS = {"metadata.jsonl", "metadata.csv"}  # of `ImageFolder` and `AudioFolder`
_HEAD_BYTES = 512  # a tar header; other signatures are shorter
_JSON_HEAD_BYTES = 64 << 10  # a file whose first line is longer is taken for one with lines


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
    found = {
        name: its
        for name, entry in FORMATS.items()
        if (its := [shard for shard in names if matches_any(shard, entry.pattern)])
    }
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
    return any(entry.pattern and matches_any(name, entry.pattern) for entry in FORMATS.values())


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
        looked_for = ", ".join(
            f"{entry.pattern} ({name})" for name, entry in FORMATS.items() if entry.pattern
        )
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
        return "jsonl" * has_records(head, is_whole=len(head) < _JSON_HEAD_BYTES)
    return next((name for name, entry in FORMATS.items() if entry.recognises(head)), "")


def pattern_of(shards: Sequence[str]) -> str:
    """A pattern of the names of possible shards, for a format that was found by their bytes."""
    if all(map(may_be_array, shards)):
        return FORMATS["jsonl"].ambiguous_pattern
    pairs = zip(min(shards), max(shards), strict=False)
    prefix = "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return glob.escape(prefix) + "*" if prefix and "{" not in prefix else "[!._]*"
