"""Lists the single files of a dataset, and joins them to one shard."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.formats import ListedFormat, SampleIndex
from gyre_daemon.datasets.formats.base import Arrays
from gyre_daemon.datasets.formats.listed import (
    Described,
    DescribedFormat,
    Manifest,
    ManifestColumn,
    ManifestFormat,
    ManifestPlace,
)
from gyre_daemon.datasets.indexing.discovery.described import read_described
from gyre_daemon.errors import InvalidRequest, ShardMissing
from gyre_daemon.runtime.threads import compute
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.file_table import FileTable, Texts
from gyre_daemon.storage.location import Location
from gyre_daemon.storage.opening.opener import StorageOpener
from gyre_daemon.storage.patterns import check_one_tree
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.unions import ConcatenatedFiles

# A manifest is read whole, and its rows take some ten times its bytes while that is done.
_MAX_MANIFEST_BYTES = 1 << 30


class Manifests(Protocol):
    """The reader of manifests; see `ManifestReader`."""

    async def read(self, listed: ManifestFormat, storage: Storage) -> Manifest:
        """The manifest, the only shard of a storage."""

    async def parse(
        self, listed: DescribedFormat, described: Described, texts: Sequence[bytes]
    ) -> Manifest:
        """The manifest that the texts of samples make."""


@dataclass(frozen=True, slots=True)
class FileListing:
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
    manifests: Manifests,
) -> FileListing:
    """The files of a location.

    Args:
        opener: of storages.
        location: of a folder, or of a manifest.
        config: of the dataset.
        listed: its format.
        manifests: reads them.

    Raises:
        CorruptSample: the manifest is damaged.
        InvalidRequest: the folder holds several datasets, or the manifest is too long; otherwise
            see `StorageOpener.open_files`.
    """
    manifest: Manifest | None = None
    place = listed.manifest_of(location.paths[0]) if len(location.paths) == 1 else None
    if place:
        storage = await _open_manifest(opener, location, config, listed, place)
        _check_one(place.path, storage)
        if isinstance(listed, DescribedFormat):
            manifest = await read_described(
                opener, location, config, listed, storage, manifests.parse
            )
        else:
            assert isinstance(listed, ManifestFormat)
            manifest = await manifests.read(listed, storage)
        if not len(manifest.names):
            raise ShardMissing(f"{place.path} lists no files")
        location = replace(location, paths=(place.folder,))
    files, table = await opener.open_files(
        location,
        config.storage,
        listed.is_wanted,
        manifest.names if manifest else None,
        follow_links=config.follow_links,
    )
    columns = manifest.columns if manifest else ()
    if manifest is None:
        check_one_tree(location.text, table.top_folders())
    texts = [column.values for column in columns if isinstance(column.values, Texts)]
    heads = await compute(Texts.merged, [table.names, *texts])  # a tenth of a second
    joined = await compute(ConcatenatedFiles, files, table, heads, location.text)
    return FileListing(joined, listed, table, columns)


async def _open_manifest(
    opener: StorageOpener,
    location: Location,
    config: DatasetConfig,
    listed: ListedFormat,
    place: ManifestPlace,
) -> Storage:
    """The manifest as the only shard; below the folder, links lead nowhere else than in it."""
    settings, follow_links = config.storage, config.follow_links
    name = place.path.removeprefix(place.folder.rstrip("/") + "/")
    if "/" not in name:
        at = replace(location, paths=(place.path,))
        return await opener.open(at, settings, "*", follow_links=follow_links)
    at, names = replace(location, paths=(place.folder,)), Texts.of([name.encode()])
    storage, _ = await opener.open_files(
        at, settings, listed.is_wanted, names, follow_links=follow_links
    )
    return storage


def _check_one(path: str, storage: Storage) -> None:
    """Refuse a manifest that is none, since a folder or a pattern stands for many files."""
    if len(storage.shards) != 1:
        raise InvalidRequest(
            f"{path} is {len(storage.shards)} files; name the one that describes the dataset"
        )
    (shard,) = storage.shards
    if shard.size_bytes > _MAX_MANIFEST_BYTES:
        raise InvalidRequest(
            f"the manifest {path} has {shard.size_bytes} bytes, more than "
            f"{_MAX_MANIFEST_BYTES}; split it into several datasets"
        )
