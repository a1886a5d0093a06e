"""Opens locations that fsspec's drivers, web servers or the hub serve; see `opener`.

A private daemon of local data starts without this module and all that it imports.
"""

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from gyre_daemon.runtime.threads import compute, in_thread
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.location import (
    ARCHIVES,
    Location,
    archive_of,
    endpoint_name,
    relative_names,
)
from gyre_daemon.storage.mounts import MOUNTS
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
from gyre_daemon.storage.sources.hub import HubUnreachable

# A listing may use one in this many of the daemon's connections: jobs read at the same time.
_SHARE_OF_LISTINGS = 4

Result = TypeVar("Result")
_ListAll = Callable[[AsyncFileSystem], Awaitable[tuple[Sequence[str], Sequence[Shard]]]]
_OpenLocation = Callable[[Location, Mapping[str, Any], str], Awaitable[Storage]]


class RemoteOpener:
    """Opens locations with one daemon's threads, limits and counters.

    Where there is no way to the hub, each method returns the snapshot of the location in the hub's
    cache, which is a local folder.
    """

    def __init__(
        self,
        endpoints: dict[str, Endpoint],
        options: EndpointOptions,
        metrics: Metrics,
        open_location: _OpenLocation,
    ) -> None:
        """Connect to nothing yet.

        Args:
            endpoints: by name; those of remote locations are added.
            options: of each endpoint.
            metrics: of the daemon.
            open_location: opens an archive with these settings, as a location by itself.
        """
        self._endpoints = endpoints
        self._options = options
        self._metrics = metrics
        self._open_location = open_location
        self._max_requests = descriptor_shares().connections  # over all endpoints
        max_at_once = max(1, self._max_requests // _SHARE_OF_LISTINGS)
        self._max_listings = min(options.max_requests, max_at_once)
        self._drivers = Drivers(self._max_requests, options.hub_requests_per_s)
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()

    async def open(
        self,
        location: Location,
        settings: Mapping[str, Any],
        pattern: str,
        *,
        may_be_absent: bool = False,
    ) -> RemoteStorage | Location:
        """See `StorageOpener.open`."""
        settings, options = await _http_options(settings)

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
            return await self._cached(location, settings, options, str(error))

    async def open_files(
        self,
        location: Location,
        settings: Mapping[str, Any],
        is_wanted: Callable[[str], bool],
        names: Texts | None,
    ) -> tuple[Storage, FileTable] | Location:
        """See `StorageOpener.open_files`."""
        settings, options = await _http_options(settings)
        folder = as_folder(location.paths[0])

        async def list_files(filesystem: AsyncFileSystem) -> tuple[FilePaths, FileShards]:
            if names is None:
                table = await list_tree(filesystem, folder, is_wanted)
            else:
                table = await stat_names(filesystem, folder, names, self._max_listings)
            return FilePaths(folder, table), FileShards(table)

        try:
            storage = await self._open_remote(location, settings, list_files, options)
        except HubUnreachable as error:
            return await self._cached(location, settings, options, str(error))
        return storage, cast("FileShards", storage.shards).table

    async def names_in(
        self, location: Location, settings: Mapping[str, Any]
    ) -> list[str] | Location:
        """See `StorageOpener.names_in`."""
        settings, options = await _http_options(settings)
        folder = location.paths[0].rstrip("/")
        try:
            filesystem = await self._filesystem(location, settings, options)
            async with asyncio.timeout(LISTING_DEADLINE_S):
                entries = await filesystem._ls(folder, detail=True)
        except HubUnreachable as error:
            try:
                return await self._cached(location, settings, options, str(error), is_logged=False)
            except (ShardMissing, StorageUnavailable):
                return []
        except Exception:
            return []
        _count_listing(self._metrics, location.scheme, 1, "ok")
        return sorted(
            entry["name"].rstrip("/").rpartition("/")[2] + "/" * (entry["type"] == "directory")
            for entry in entries
        )

    async def check(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings that cannot be used.

        Raises:
            ConfigError: see `take_http_options`.
        """
        await _http_options(settings)

    def close(self) -> None:
        """Close all connections."""
        for source in list(self._sources):
            source.close()
        self._drivers.close()

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

    def _endpoint(self, name: str, scheme: str, max_requests: int) -> Endpoint:
        """The endpoint that all datasets of one bucket, or of one server, share."""
        if name not in self._endpoints:
            options = replace(self._options, max_requests=max_requests)
            self._endpoints[name] = Endpoint(name, scheme, options, self._metrics)
            for endpoint in self._endpoints.values():
                endpoint.lower_ceiling(max(1, self._max_requests // len(self._endpoints)))
        return self._endpoints[name]

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
        num_endpoints = len(self._endpoints)
        name = endpoint_name(location.scheme, settings, paths[0])
        max_requests = self._options.max_requests
        if isinstance(filesystem, ThreadedFileSystem):
            max_requests = min(max_requests, filesystem.max_reads)
        endpoint = self._endpoint(name, location.scheme, max_requests)
        num_connections = endpoint.limit.limit if len(self._endpoints) > num_endpoints else 0
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
        archive = await self._open_location(archive_of(path), {**settings, **options.given}, "*")
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
            _count_listing(self._metrics, location.scheme, len(location.paths), outcome)

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


def _count_listing(metrics: Metrics, scheme: str, num_requests: int, outcome: Outcome) -> None:
    """Count the requests of a listing."""
    metrics.count_requests(RequestLabels(scheme, "list", outcome), num_requests, 0)


async def _http_options(settings: Mapping[str, Any]) -> tuple[dict[str, Any], HttpOptions]:
    """See `take_http_options`."""
    ca_file = settings.get(CA_FILE)
    if not isinstance(ca_file, str) or not ca_file:
        return await compute(take_http_options, settings)
    return await MOUNTS.run(ca_file, take_http_options, settings)
