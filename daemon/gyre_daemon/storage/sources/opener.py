"""Which driver serves which scheme, and how the shards of a location are listed."""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.errors import (
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
    first_error,
)
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.runtime.threads import FairExecutor, compute, in_thread
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile, Root
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.listing import (
    list_all_files,
    list_folder,
    list_shards,
    names_in_folder,
    stat_files,
    stat_named,
)
from gyre_daemon.storage.location import (
    ARCHIVES,
    Location,
    archive_of,
    endpoint_name,
    relative_names,
)
from gyre_daemon.storage.mounts import MOUNTS, Mount
from gyre_daemon.storage.open_shards import OpenFiles
from gyre_daemon.storage.response import Source, words
from gyre_daemon.storage.shard import FilePaths, FileShards, FileTable, Shard, Texts, Validators
from gyre_daemon.storage.sources.drivers import (
    LISTING_DEADLINE_S,
    Drivers,
    Entries,
    as_folder,
    entries_of,
    list_tree,
    listing_error,
    look_again,
    stat_names,
)
from gyre_daemon.storage.sources.fsspec_drivers import ThreadedFileSystem, open_archive
from gyre_daemon.storage.sources.http_source import (
    CA_FILE,
    HttpOptions,
    WebFileSystem,
    take_http_options,
)
from gyre_daemon.storage.sources.hub import HubUnreachable, cached_digest
from gyre_daemon.storage.sources.local import LocalStorage, SlowReads
from gyre_daemon.storage.sources.single_files import SingleFiles
from gyre_daemon.workers.copy_workers import NO_COPY_WORKERS, CopyWorkers

# A listing may use one in this many of the daemon's connections: jobs read at the same time.
_SHARE_OF_LISTINGS = 4

Result = TypeVar("Result")
_ListAll = Callable[[AsyncFileSystem], Awaitable[tuple[Sequence[str], Sequence[Shard]]]]


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
        self._max_requests = descriptor_shares().connections  # over all endpoints
        max_at_once = max(1, self._max_requests // _SHARE_OF_LISTINGS)
        self._max_listings = min(options.max_requests, max_at_once)
        self._drivers = Drivers(self._max_requests, options.hub_requests_per_s)
        self._open_files = OpenFiles()
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
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
        settings, options = await _http_options(settings)
        if location.scheme == "file":
            files, shards = await _list_local(location.paths, pattern, follow_links=follow_links)
            self._count_listing("file", len(location.paths), "ok")
            return self.local(files, shards, None)

        async def list_all_shards(
            filesystem: AsyncFileSystem,
        ) -> tuple[Sequence[str], Sequence[Shard]]:
            entries = await self._entries_of(filesystem, location, pattern)
            if not entries:
                raise ShardMissing(
                    f"no shard at {location.text}: check the dataset's URI and that it matches "
                    f"{pattern}"
                )
            paths = [path for path, _ in entries]
            shards = []
            for name, (_, info) in zip(relative_names(paths), entries, strict=True):
                told = Validators.in_info(info)
                shards.append(Shard(name, int(info["size"]), told.text, told.digest, told))
            return paths, shards

        try:
            return await self._open_remote(
                location, settings, list_all_shards, options, may_be_absent=may_be_absent
            )
        except HubUnreachable as error:
            local = await self._cached(location, settings, options, str(error))
            return await self._open_cached(local, pattern)

    async def _open_cached(self, local: Location, pattern: str) -> Storage:
        """A snapshot of the hub's cache, whose links lead to the cache's files."""

        def list_all() -> tuple[Sequence[LocalFile], Sequence[Shard]]:
            files, shards = list_shards(local.paths, pattern, follow_links=True)
            digests = [cached_digest(file.path) for file in files]
            return files, [
                replace(shard, digest=digest) for shard, digest in zip(shards, digests, strict=True)
            ]

        files, shards = await MOUNTS.run(local.paths[0], list_all)
        self._count_listing("file", len(local.paths), "ok")
        return self.local(files, shards, None)

    async def _cached(
        self,
        location: Location,
        settings: Mapping[str, Any],
        options: HttpOptions,
        why: str,
        *,
        is_logged: bool = True,
    ) -> Location:
        """The snapshot of a location in the hub's cache, which the log names."""
        client = await in_thread(partial(self._drivers.hub, settings, options), "gyre-hub")
        try:
            work = partial(client.snapshot, location, why)
            local, folder = await in_thread(work, "gyre-hub")
        except ShardMissing as missing:
            if client.is_offline:
                raise
            raise StorageUnavailable(str(missing), missing.facts) from missing  # it may come back
        facts = {"location": location.text, "commit": folder.name, "folder": folder}
        if is_logged:
            log_event("read from the hub's cache", facts | {"reason": why}, logging.WARNING)
        return local

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
        settings, options = await _http_options(settings)
        path = location.paths[0]
        if location.scheme == "file":
            root = Root(Path(path), follow_links)
            if names is None:
                table = await MOUNTS.run(path, list_folder, root, is_wanted)
            else:
                table = await MOUNTS.run(path, stat_files, root, names)
            self._count_listing("file", 1, "ok")
            if not len(table):
                raise ShardMissing(
                    f"no file below {path} has an extension that counts; see `extensions`"
                )
            mount = await MOUNTS.of(root.folder)
            readers, slow = self._readers(mount), self._slow_reads([mount])
            return SingleFiles(root, table, readers, self._metrics, slow), table
        folder = as_folder(path)

        async def list_files(filesystem: AsyncFileSystem) -> tuple[FilePaths, FileShards]:
            if names is None:
                table = await list_tree(filesystem, folder, is_wanted)
            else:
                table = await stat_names(filesystem, folder, names, self._max_listings)
            return FilePaths(folder, table), FileShards(table)

        try:
            storage = await self._open_remote(location, settings, list_files, options)
        except HubUnreachable as error:
            local = await self._cached(location, settings, options, str(error))
            return await self.open_files(local, {}, is_wanted, names, follow_links=True)
        return storage, cast("FileShards", storage.shards).table

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
        settings, options = await _http_options(settings)
        folder = location.paths[0].rstrip("/")
        try:
            filesystem = await self._filesystem(location, settings, options)
            async with asyncio.timeout(LISTING_DEADLINE_S):
                entries = await filesystem._ls(folder, detail=True)
        except HubUnreachable as error:
            try:
                local = await self._cached(location, settings, options, str(error), is_logged=False)
            except (ShardMissing, StorageUnavailable):
                return []
            return await self.names_in(local, {}, follow_links=True)
        except Exception:
            return []
        self._count_listing(location.scheme, 1, "ok")
        return sorted(
            entry["name"].rstrip("/").rpartition("/")[2] + "/" * (entry["type"] == "directory")
            for entry in entries
        )

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
            self._slow_reads(mounts),
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
                self._count_listing("file", len(beside), "ok")
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
        for source in list(self._sources):
            source.close()
        self._drivers.close()

    def _readers(self, mount: Mount) -> FairExecutor:
        """The threads that read from a mount; if it hangs, those of the others go on."""
        if mount not in self._fair:
            self._fair[mount] = FairExecutor(mount.readers, self.workers.num_threads)
        return self._fair[mount]

    def _slow_reads(self, mounts: Sequence[Mount]) -> SlowReads:
        return SlowReads(mounts, self._mount_endpoint)

    def _mount_endpoint(self, mount: Mount) -> Endpoint:
        """The endpoint that all datasets on one mount share."""
        if mount.path not in self.endpoints:
            num, options = self.options.mount_threads, self.options
            # as many again for reads that were given up, whose threads go on
            mount.readers.max_threads = max(2 * num, self.workers.num_threads)
            options = replace(options, max_requests=num)
            self.endpoints[mount.path] = Endpoint(mount.path, "file", options, self._metrics)
        return self.endpoints[mount.path]

    def _endpoint(self, name: str, scheme: str, max_requests: int) -> Endpoint:
        """The endpoint that all datasets of one bucket, or of one server, share."""
        if name not in self.endpoints:
            options = replace(self.options, max_requests=max_requests)
            self.endpoints[name] = Endpoint(name, scheme, options, self._metrics)
            for endpoint in self.endpoints.values():
                endpoint.lower_ceiling(max(1, self._max_requests // len(self.endpoints)))
        return self.endpoints[name]

    async def _open_remote(
        self,
        location: Location,
        settings: Mapping[str, Any],
        list_all: _ListAll,
        options: HttpOptions,
        *,
        may_be_absent: bool = False,
    ) -> RemoteStorage:
        """List the files of a location, and make them readable."""
        filesystem = await self._filesystem(location, settings, options)
        try:
            paths, shards = await self._listed(
                location, list_all(filesystem), may_be_absent=may_be_absent
            )
        except BaseException:
            if isinstance(filesystem, WebFileSystem):
                filesystem.source.close()
            raise
        num_endpoints = len(self.endpoints)
        name = endpoint_name(location.scheme, settings, paths[0])
        max_requests = self.options.max_requests
        if isinstance(filesystem, ThreadedFileSystem):
            max_requests = min(max_requests, filesystem.max_reads)
        endpoint = self._endpoint(name, location.scheme, max_requests)
        num_connections = endpoint.limit.limit if len(self.endpoints) > num_endpoints else 0
        source = await self._drivers.source(
            filesystem, location.scheme, settings, paths[0], num_connections, options
        )
        self._sources.add(source)
        look = partial(look_again, filesystem)
        return RemoteStorage(source, endpoint, paths, shards, look)

    async def _filesystem(
        self, location: Location, settings: Mapping[str, Any], options: HttpOptions
    ) -> AsyncFileSystem:
        """The lister of a location; an archive is opened as a location by itself."""
        if location.scheme not in ARCHIVES:
            return await self._drivers.filesystem(location, settings, options)
        path = location.paths[0]
        archive = await self.open(archive_of(path), {**settings, **options.given}, "*")
        address = f"{location.scheme}://{path.partition('://')[2].partition('/')[0]}"
        filesystem = open_archive(location.scheme, address, archive)
        try:
            async with asyncio.timeout(LISTING_DEADLINE_S):
                await filesystem.connect()
        except GyreError:
            raise
        except Exception as error:
            raise listing_error(location.text, error) from error
        return filesystem

    async def _listed(
        self, location: Location, listing: Awaitable[Result], *, may_be_absent: bool
    ) -> Result:
        """The files of a listing; its errors name the location."""
        outcome: Outcome = "error"
        try:
            found = await listing
            outcome = "ok"
            return found
        except asyncio.CancelledError:
            outcome = "abandoned"
            raise
        except GyreError:
            raise
        except Exception as raised:
            error = first_error(raised) if isinstance(raised, ExceptionGroup) else raised
            if isinstance(error, GyreError | HubUnreachable):
                raise error from raised
            if isinstance(error, NotImplementedError):
                raise InvalidRequest(
                    f"the storage cannot list {location.text}: the driver of "
                    f"{location.scheme}:// lists nothing. Name every shard, for example with a "
                    "brace list."
                ) from raised
            if isinstance(error, ValueError):
                raise InvalidRequest(
                    f"the storage cannot list {location.text}: {words(str(error))}"
                ) from raised
            failure = listing_error(location.text, error)
            if may_be_absent and isinstance(failure, ShardMissing | NotAllowed):
                outcome = "ok"
            raise failure from raised
        finally:
            self._count_listing(location.scheme, len(location.paths), outcome)

    async def _entries_of(
        self, filesystem: AsyncFileSystem, location: Location, pattern: str
    ) -> Entries:
        """The entries of all paths of a location, a few of which are listed at once."""
        found: list[Entries] = [[] for _ in location.paths]
        waiting = iter(enumerate(location.paths))

        async def list_next() -> None:
            for index, path in waiting:
                found[index] = await entries_of(filesystem, path, pattern)

        async with asyncio.timeout(LISTING_DEADLINE_S), asyncio.TaskGroup() as group:
            for _ in range(min(self._max_listings, len(location.paths))):
                group.create_task(list_next())
        return [entry for of_path in found for entry in of_path]

    def _count_listing(self, scheme: str, num_requests: int, outcome: Outcome) -> None:
        self._metrics.count_requests(RequestLabels(scheme, "list", outcome), num_requests, 0)


async def _list_local(
    paths: Sequence[str], pattern: str, *, follow_links: bool
) -> tuple[list[LocalFile], list[Shard]]:
    """See `list_shards`; each path is listed in a thread of its mount."""
    if len(paths) == 1:
        return await MOUNTS.run(paths[0], list_shards, paths, pattern, follow_links=follow_links)
    files: list[LocalFile] = []
    for mount, some in await _by_mount(paths):
        files += await mount.run(list_all_files, paths[some], pattern, follow_links=follow_links)
    return files, await stat_local(files)


async def stat_local(files: Sequence[LocalFile]) -> list[Shard]:
    """See `stat_shards`; each file is looked at in a thread of its mount."""
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


async def _http_options(settings: Mapping[str, Any]) -> tuple[dict[str, Any], HttpOptions]:
    """See `take_http_options`."""
    ca_file = settings.get(CA_FILE)
    if not isinstance(ca_file, str) or not ca_file:
        return await compute(take_http_options, settings)
    return await MOUNTS.run(ca_file, take_http_options, settings)
