"""Folders that another library describes: read as it says, or refused by name.

Next to the files with samples are copies that a cache keeps, files that a table's log has removed,
or chunks with a header of that library. No pattern tells them apart; the library's own files do.

| in the folder | written by | Gyre |
|---|---|---|
| `state.json` | `Dataset.save_to_disk` of Hugging Face | reads the files that it lists |
| `dataset_dict.json` | `DatasetDict.save_to_disk` | names the folders of the splits |
| `dataset_info.json`, copies | the cache of `load_dataset` and `map` | leaves `cache-*.arrow` out |
| `index.json` | MosaicML Streaming, or wids | reads the shards that it lists |
| `index.json` | LitData | refuses chunks, reads the Parquet files that it lists |
| `_delta_log/`, `.hoodie/`, `metadata/*.metadata.json` | Delta Lake, Hudi, Iceberg | refuses |
| `_spark_metadata/` | streams of Spark | refuses |
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from gyre_daemon.datasets.known_formats import FORMATS
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.storage.patterns import check_one_set, matches_any

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
    found = sorted(name for name in names if matches_any(name, pattern))
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


# Takes a file that has the key.
_READERS: Mapping[str, Callable[[_Source], FolderDescription | None]] = {
    "__kind__": _wids,
    "shardlist": _wids,
    "_data_files": _saved_dataset,
    "splits": _splits,
    "shards": _streaming,
    "chunks": _litdata,
}
