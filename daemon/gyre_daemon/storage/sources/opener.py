"""Which driver serves which scheme, and how the shards of a location are listed."""

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gyre_daemon.errors import (
    InvalidRequest,
    NotAllowed,
    ShardMissing,
)
from gyre_daemon.monitoring.metrics import Metrics, RequestLabels
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.beneath import LocalFile, Root
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions
from gyre_daemon.storage.listing import (
    list_all_files,
    list_folder,
    names_in_folder,
    stat_files,
    stat_named,
)
from gyre_daemon.storage.location import (
    Location,
    relative_names,
)
from gyre_daemon.storage.mounts import MOUNTS, Mount
from gyre_daemon.storage.open_shards import OpenFiles
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.shard import FileTable, Shard, Texts
from gyre_daemon.storage.sources.local import LocalStorage, SingleFiles, SlowMounts
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers

if TYPE_CHECKING:
    from gyre_daemon.storage.sources.remote_opener import RemoteOpener


class StorageOpener:
    """Opens locations with one daemon's threads, limits and counters.

    Attributes:
        endpoints: by name.
        options: of each endpoint.
    """

    def __init__(
        self,
        workers: FairExecutor,
        options: EndpointOptions,
        metrics: Metrics,
        copy_workers: CopyWorkers = NO_COPY_WORKERS,
    ) -> None:
        self.workers = workers
        self.options = options
        self._metrics = metrics
        self._copy_workers = copy_workers
        self.endpoints: dict[str, Endpoint] = {}
        self._open_files = OpenFiles()
        self._remote_opener: RemoteOpener | None = None  # until the first remote location
        self._fair: weakref.WeakKeyDictionary[Mount, FairExecutor] = weakref.WeakKeyDictionary()

    def close_idle_files(self) -> None:
        """Close local shards that no job reads any more, soon."""
        self._open_files.close_idle()

    def expire_files(self) -> None:
        """Let `close_idle_files` close all local shards not read until then."""
        self._open_files.expire()

    async def open(
        self,
        location: Location,
        settings: Mapping[str, Any],
        pattern: str,
        *,
        follow_links: bool = False,
        may_be_absent: bool = False,
    ) -> Storage:
        """List the shards of a location, and make them readable.

        Args:
            location: where they lie.
            settings: of the driver: endpoint, region, credentials.
            pattern: which files of a folder count.
            follow_links: whether links among local files may leave the location's folder.
            may_be_absent: do not count a failed request if nothing is there.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: there is no shard, or it cannot be listed.
            ConfigError: no driver for the scheme is installed, or it does not know a setting.
        """
        if location.scheme == "file":
            await self._check_settings(settings)
            files, shards = await _list_local(location.paths, pattern, follow_links=follow_links)
            self._count_listing(len(location.paths))
            return self.local(files, shards, None)
        opened = await self._remote.open(location, settings, pattern, may_be_absent=may_be_absent)
        if isinstance(opened, Location):
            return await self._open_cached(opened, pattern)
        return opened

    async def _open_cached(self, local: Location, pattern: str) -> Storage:
        """A snapshot of the hub's cache, whose links lead to the cache's files."""
        files, shards = await _list_local(local.paths, pattern, follow_links=True)
        digests = await MOUNTS.run(
            local.paths[0], lambda: [_cached_digest(file.path) for file in files]
        )
        self._count_listing(len(local.paths))
        described = zip(shards, digests, strict=True)
        return self.local(files, [replace(each, digest=digest) for each, digest in described], None)

    async def open_files(
        self,
        location: Location,
        settings: Mapping[str, Any],
        is_wanted: Callable[[str], bool],
        names: Texts | None = None,
        *,
        follow_links: bool = False,
    ) -> tuple[Storage, FileTable]:
        """List all files below a folder, at any depth, or some; and make them readable.

        Args:
            location: the folder.
            settings: see `open`.
            is_wanted: whether a file of this name, without its folder, counts.
            names: of the only files that count, relative to the folder; None for all.
            follow_links: see `open`.

        Returns:
            A storage of which each shard is a file, and all files.

        Raises:
            InvalidRequest: the location is several folders, or cannot be listed.
            ShardMissing, NotAllowed, StorageUnavailable, ConfigError: see `open`.
        """
        if len(location.paths) > 1 or any(letter in location.paths[0] for letter in "*?["):
            raise InvalidRequest(
                f"{location.text} is a pattern; the single files of one folder are a dataset, with "
                "those of all folders below it. Name that folder, or a manifest."
            )
        path = location.paths[0]
        if location.scheme == "file":
            await self._check_settings(settings)
            root = Root(Path(path), follow_links)
            if names is None:
                table = await MOUNTS.run(path, list_folder, root, is_wanted)
            else:
                table = await MOUNTS.run(path, stat_files, root, names)
            self._count_listing(1)
            if not len(table):
                raise ShardMissing(
                    f"no file below {path} has an extension that counts; see `extensions`"
                )
            mount = await MOUNTS.of(root.folder)
            readers, slow = self._readers(mount), SlowMounts([mount], self._mount_endpoint)
            return SingleFiles(root, table, readers, self._metrics, slow), table
        opened = await self._remote.open_files(location, settings, is_wanted, names)
        if isinstance(opened, Location):
            return await self.open_files(opened, {}, is_wanted, names, follow_links=True)
        return opened

    async def names_in(
        self, location: Location, settings: Mapping[str, Any], *, follow_links: bool = False
    ) -> list[str]:
        """The names in a folder, sorted; those of folders end with a slash.

        Returns:
            Nothing if the location is no folder, or one that cannot be listed: what opens it says
            why.
        """
        if location.scheme == "file":
            root = Root(Path(location.paths[0]), follow_links)
            return await MOUNTS.run(root.folder, names_in_folder, root)
        found = await self._remote.names_in(location, settings)
        if isinstance(found, Location):
            return await self.names_in(found, {}, follow_links=True)
        return found

    def local(
        self, files: Sequence[LocalFile], shards: Sequence[Shard], owner: object
    ) -> LocalStorage:
        """A storage of files whose listing is known already.

        Args:
            files: the shards.
            shards: as listed.
            owner: keeps the files alive as long as the storage refers to it; None if nobody does.
        """
        folders = {(file.root.folder, file.name.rpartition("/")[0]) for file in files}
        mounts = [*dict.fromkeys(MOUNTS.at(root / name) for root, name in sorted(folders))]
        return LocalStorage(
            files,
            shards,
            self._readers(mounts[0]) if mounts else self.workers,
            self._metrics,
            self._copy_workers,
            self._open_files,
            owner,
            SlowMounts(mounts, self._mount_endpoint),
        )

    async def open_beside(
        self, storage: Storage, shards: Sequence[int], suffix: str, settings: Mapping[str, Any]
    ) -> Storage | None:
        """Open the files that lie beside some shards and differ only in their suffix.

        Args:
            storage: of the shards.
            shards: numbers of some shards, in the order of the files.
            suffix: replaces that of the shards.
            settings: see `open`.

        Returns:
            None if one of the files does not exist, or if the storage does not show it.

        Raises:
            NotAllowed, StorageUnavailable: the files cannot be looked at.
        """
        files = [file for shard in shards if (file := storage.local_file(shard)) is not None]
        try:
            if files:
                beside = [file.sibling(file.path.stem + suffix) for file in files]
                found = await stat_local(beside)
                self._count_listing(len(beside))
                return self.local(beside, found, None)
            paths = [storage.path(shard).rpartition(".")[0] + suffix for shard in shards]
            location = Location(paths[0].partition("://")[0], tuple(paths), paths[0])
            return await self.open(location, settings, "*" + suffix, may_be_absent=True)
        except ShardMissing:
            return None
        except NotAllowed:
            if files:
                raise
            return None  # S3 forbids to read absent keys where keys may not be listed

    def close(self) -> None:
        """Close all connections."""
        if self._remote_opener:
            self._remote_opener.close()

    def _readers(self, mount: Mount) -> FairExecutor:
        """The threads that read from a mount; if it hangs, those of the others go on."""
        if mount not in self._fair:
            self._fair[mount] = FairExecutor(mount.readers, self.workers.num_threads)
        return self._fair[mount]

    def _mount_endpoint(self, mount: Mount) -> Endpoint:
        """The endpoint that all datasets on one mount share."""
        if mount.path not in self.endpoints:
            num, options = self.options.mount_threads, self.options
            # as many again for reads that were given up, whose threads go on
            mount.readers.max_threads = max(2 * num, self.workers.num_threads)
            options = replace(options, max_requests=num)
            self.endpoints[mount.path] = Endpoint(mount.path, "file", options, self._metrics)
        return self.endpoints[mount.path]

    @property
    def _remote(self) -> "RemoteOpener":
        if self._remote_opener is None:
            # imports fsspec and the clients of servers, a tenth of a start
            from gyre_daemon.storage.sources.remote_opener import RemoteOpener  # noqa: PLC0415

            self._remote_opener = RemoteOpener(
                self.endpoints, self.options, self._metrics, self.open
            )
        return self._remote_opener

    async def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings of a local location that make no sense of a remote one either."""
        if settings:
            await self._remote.check(settings)

    def _count_listing(self, num_requests: int) -> None:
        self._metrics.count_requests(RequestLabels("file", "list", "ok"), num_requests, 0)


def _cached_digest(file: Path) -> str:
    """The digest by which the hub's cache names a file; empty where it is no link of it."""
    name = file.readlink().name if file.is_symlink() else ""
    return name if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name) else ""


async def _list_local(
    paths: Sequence[str], pattern: str, *, follow_links: bool
) -> tuple[list[LocalFile], list[Shard]]:
    """See `list_files`; each path is listed in a thread of its mount."""
    runs = [(await MOUNTS.of(paths[0]), slice(None))] if len(paths) == 1 else await _by_mount(paths)
    files: list[LocalFile] = []
    for mount, some in runs:
        files += await mount.run(list_all_files, paths[some], pattern, follow_links=follow_links)
    return files, await stat_local(files)


async def stat_local(files: Sequence[LocalFile]) -> list[Shard]:
    """The files as shards, whose names are relative to the deepest folder with all of them."""
    paths = [str(file) for file in files]
    names, shards = relative_names(paths), []
    for mount, some in await _by_mount(paths):
        shards += await mount.run(stat_named, files[some], names[some])
    return shards


async def _by_mount(paths: Sequence[str]) -> list[tuple[Mount, slice]]:
    """Cut paths into runs that lie on one mount each; links are followed once for each folder."""
    mounts: dict[tuple[Mount, str], Mount] = {}
    found: list[tuple[Mount, slice]] = []
    for number, path in enumerate(paths):
        folder = str(Path(path).parent)
        nearest = MOUNTS.at(path)
        if (key := (nearest, folder)) not in mounts:
            is_mounted_there = MOUNTS.at(folder) is not nearest
            mounts[key] = await MOUNTS.of(path if is_mounted_there else folder)
        if not found or found[-1][0] is not mounts[key]:
            found.append((mounts[key], slice(number, number)))
        found[-1] = mounts[key], slice(found[-1][1].start, number + 1)
    return found
