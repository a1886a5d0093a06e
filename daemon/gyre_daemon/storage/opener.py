"""Which driver serves which scheme, and how the shards of a location are listed."""

import asyncio
import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from gyre_daemon.config.secrets import hide
from gyre_daemon.copy_workers import NO_COPY_WORKERS, CopyWorkers
from gyre_daemon.errors import (
    ConfigError,
    GyreError,
    InvalidRequest,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
    first_error,
)
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.beneath import LocalFile
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.local.listing import list_files, stat_shard
from gyre_daemon.storage.local.local import LocalStorage
from gyre_daemon.storage.local.open_files import OpenFiles
from gyre_daemon.storage.location import Location, endpoints_in, redact, relative_names
from gyre_daemon.storage.patterns import matches_any, patterns_of
from gyre_daemon.storage.response import access_error, describe, response_from_error
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.source import Source
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.driver_source import DriverSource
from gyre_daemon.storage.sources.http_options import HttpOptions, take_http_options
from gyre_daemon.storage.sources.web_files import SCHEMES as WEB_SCHEMES
from gyre_daemon.storage.sources.web_files import WebFileSystem, check_no_proxy
from gyre_daemon.storage.splits import check_one_set, check_subfolders

_OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "http", "https")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}  # all others: s3
_LISTING_DEADLINE_S = 60.0
# A listing may use one in this many of the daemon's connections: jobs read at the same time.
_SHARE_OF_LISTINGS = 4

_Entries = list[tuple[str, dict[str, Any]]]


class StorageOpener:
    """Opens locations with one daemon's threads, limits and counters.

    Attributes:
        endpoints: by name.
    """

    def __init__(
        self,
        workers: FairExecutor,
        options: EndpointOptions,
        metrics: Metrics,
        copy_workers: CopyWorkers = NO_COPY_WORKERS,
    ) -> None:
        self._workers = workers
        self._options = options
        self._metrics = metrics
        self._copy_workers = copy_workers
        self.endpoints: dict[str, Endpoint] = {}
        self._max_requests = descriptor_shares().connections  # over all endpoints
        self._budget = ConnectionBudget(self._max_requests)
        self._open_files = OpenFiles()
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()

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
        scheme = location.scheme
        loop = asyncio.get_running_loop()
        settings, options = await loop.run_in_executor(
            self._workers.executor, take_http_options, settings
        )
        if scheme == "file":
            list_all = functools.partial(_list_local, location, pattern, follow_links=follow_links)
            files, shards = await loop.run_in_executor(self._workers.executor, list_all)
            self._count_listing("file", len(location.paths), "ok")
            return self.local(files, shards, None)
        filesystem = await self._make_filesystem(location, settings, options)
        try:
            names, shards = await self._list_remote(
                filesystem, location, pattern, may_be_absent=may_be_absent
            )
        except BaseException:
            if isinstance(filesystem, WebFileSystem):
                filesystem.source.close()
            raise
        num_endpoints = len(self.endpoints)
        endpoint = self._endpoint(scheme, settings, names[0])
        num_connections = endpoint.limit.limit if len(self.endpoints) > num_endpoints else 0
        source = await self._make_source(
            filesystem, scheme, settings, names[0], num_connections, options
        )
        self._sources.add(source)
        return RemoteStorage(source, endpoint, names, shards)

    def local(
        self, files: Sequence[LocalFile], shards: Sequence[Shard], owner: object
    ) -> LocalStorage:
        """A storage of files whose listing is known already.

        Args:
            files: the shards.
            shards: as listed.
            owner: keeps the files alive as long as the storage refers to it; None if nobody does.
        """
        return LocalStorage(
            files, shards, self._workers, self._metrics, self._copy_workers, self._open_files, owner
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
                loop, threads = asyncio.get_running_loop(), self._workers.executor
                found = await loop.run_in_executor(threads, _stat_all, beside)
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

    async def _make_source(
        self,
        filesystem: AsyncFileSystem,
        scheme: str,
        settings: Mapping[str, Any],
        path: str,
        num_connections: int,
        options: HttpOptions,
    ) -> Source:
        """What carries the reads of a listed dataset; opens this many connections at once."""
        if isinstance(filesystem, WebFileSystem):
            filesystem.source.connect(urlsplit(path), num_connections)
            return filesystem.source
        if scheme not in _OBJECT_SCHEMES:
            return DriverSource(filesystem)
        # Drivers of object storages are an extra, which local files do not need.
        from gyre_daemon.storage.sources.object_source import (  # noqa: PLC0415
            ObjectSource,
            plain_source,
        )

        general = ObjectSource(scheme, settings, path, options.roots)
        return await plain_source(
            general, scheme, settings, path, self._budget, num_connections, options
        )

    def _endpoint(self, scheme: str, settings: Mapping[str, Any], path: str) -> Endpoint:
        """The endpoint that all datasets of one bucket, or of one web server, share."""
        where = next((endpoint.rstrip("/") for endpoint in endpoints_in(settings)), f"{scheme}:/")
        name = f"{where}/{path.partition('://')[2].partition('/')[0]}"
        if name not in self.endpoints:
            self.endpoints[name] = Endpoint(name, scheme, self._options, self._metrics)
            for endpoint in self.endpoints.values():
                endpoint.lower_ceiling(max(1, self._max_requests // len(self.endpoints)))
        return self.endpoints[name]

    async def _make_filesystem(
        self, location: Location, settings: Mapping[str, Any], options: HttpOptions
    ) -> AsyncFileSystem:
        """A file system for one dataset; a shared one would share credentials."""
        scheme = location.scheme
        try:
            if scheme in WEB_SCHEMES and check_no_proxy(location.paths[0], options.redirects):
                return WebFileSystem(settings, options, self._budget)
            if scheme in _OBJECT_SCHEMES:
                # See `_make_source`.
                from gyre_daemon.storage.sources.object_source import open_objects  # noqa: PLC0415

                return open_objects(scheme, settings, location.paths[0], options.roots)
            driver = fsspec.get_filesystem_class(scheme)
            if driver.async_impl:
                return driver(**settings, asynchronous=True, skip_instance_cache=True)
            # Some drivers connect to their server here.
            connect = functools.partial(driver, **settings, skip_instance_cache=True)
            async with asyncio.timeout(_LISTING_DEADLINE_S):
                return AsyncFileSystemWrapper(await asyncio.to_thread(connect), asynchronous=True)
        except ImportError as error:
            raise _no_driver(scheme, error) from error
        except GyreError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the storage settings of a {scheme}:// dataset cannot be used: "
                f"{hide(str(error), settings)}"
            ) from error
        except Exception as error:
            raise listing_error(location.text, error) from error

    async def _list_remote(
        self, filesystem: AsyncFileSystem, location: Location, pattern: str, *, may_be_absent: bool
    ) -> tuple[list[str], list[Shard]]:
        outcome: Outcome = "error"
        try:
            entries = await self._entries_of(filesystem, location, pattern)
            outcome = "ok"
        except ExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, GyreError):
                raise error from errors
            if isinstance(error, ValueError | NotImplementedError):
                raise InvalidRequest(
                    f"the storage cannot list {location.text}: {error}"
                ) from errors
            listing = listing_error(location.text, error)
            if may_be_absent and isinstance(listing, ShardMissing | NotAllowed):
                outcome = "ok"
            raise listing from errors
        except TimeoutError as error:
            raise listing_error(location.text, error) from error
        except asyncio.CancelledError:
            outcome = "abandoned"
            raise
        finally:
            self._count_listing(location.scheme, len(location.paths), outcome)
        if not entries:
            raise ShardMissing(
                f"no shard at {location.text}: check the dataset's URI and that it matches "
                f"{pattern}"
            )
        paths = [path for path, _ in entries]
        shards = [
            Shard(name, int(info["size"]), _version(info))
            for name, (_, info) in zip(relative_names(paths), entries, strict=True)
        ]
        return paths, shards

    async def _entries_of(
        self, filesystem: AsyncFileSystem, location: Location, pattern: str
    ) -> _Entries:
        """The entries of all paths of a location, a few of which are listed at once."""
        found: list[_Entries] = [[] for _ in location.paths]
        waiting = iter(enumerate(location.paths))

        async def list_next() -> None:
            for index, path in waiting:
                found[index] = await _entries(filesystem, path, pattern)

        max_at_once = max(1, self._max_requests // _SHARE_OF_LISTINGS)
        async with asyncio.timeout(_LISTING_DEADLINE_S), asyncio.TaskGroup() as group:
            for _ in range(min(self._options.max_requests, max_at_once, len(location.paths))):
                group.create_task(list_next())
        return [entry for of_path in found for entry in of_path]

    def _count_listing(self, scheme: str, num_requests: int, outcome: Outcome) -> None:
        self._metrics.count_requests(RequestLabels(scheme, "list", outcome), num_requests, 0)


def _no_driver(scheme: str, error: ImportError) -> ConfigError:
    if scheme in _OBJECT_SCHEMES:
        install = f'pip install "gyre-ml[{_EXTRAS.get(scheme, "s3")}]"'
        return ConfigError(
            f"reading {scheme}:// needs {error.name}, which is not installed: {install}"
        )
    return ConfigError(f"no driver for {scheme}:// is installed: {error}")


def _list_local(
    location: Location, pattern: str, *, follow_links: bool
) -> tuple[list[LocalFile], list[Shard]]:
    files = [
        file
        for path in location.paths
        for file in list_files(Path(path), pattern, follow_links=follow_links)
    ]
    return files, _stat_all(files)


def _stat_all(files: Sequence[LocalFile]) -> list[Shard]:
    """The files as shards, whose names are relative to the deepest folder with all of them."""
    names = relative_names([str(file) for file in files])
    return [stat_shard(file, name) for file, name in zip(files, names, strict=True)]


async def _entries(filesystem: AsyncFileSystem, path: str, pattern: str) -> _Entries:
    """Path and info of every file that a path, a folder or a glob stands for, sorted by path."""
    scheme = path.partition("://")[0]
    may_be_glob = path.partition("://")[2].partition("/")[2] if scheme in WEB_SCHEMES else path
    if any(letter in may_be_glob for letter in "*?["):
        found = await filesystem._glob(path, detail=True)
    else:
        info = await filesystem._info(path)
        if info["type"] != "directory":
            return [(path, info)]
        found = await _in_folder(filesystem, path.rstrip("/"), pattern)
        await _check_folder(filesystem, path, found, pattern)
    return [
        (f"{scheme}://{name.removeprefix(scheme + '://')}", info)
        for name, info in sorted(found.items())
        if info["type"] == "file"
    ]


async def _in_folder(
    filesystem: AsyncFileSystem, folder: str, pattern: str
) -> dict[str, dict[str, Any]]:
    """The files of a folder that match, by one listing."""
    if len(patterns_of(pattern)) == 1:
        return dict(await filesystem._glob(f"{folder}/{pattern}", detail=True))
    found = await filesystem._glob(f"{folder}/*", detail=True)
    return {
        path: info for path, info in found.items() if matches_any(path.rpartition("/")[2], pattern)
    }


async def _check_folder(
    filesystem: AsyncFileSystem, path: str, found: Mapping[str, Any], pattern: str
) -> None:
    """A folder means all of its files, so they must be one dataset; see `splits`."""
    shown = redact(path)
    check_one_set(shown, [name.rpartition("/")[2] for name in sorted(found)], pattern)
    if not found:
        entries = await filesystem._ls(path, detail=True)
        folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
        check_subfolders(shown, [name.rstrip("/").rpartition("/")[2] for name in folders], pattern)


def listing_error(location: str, error: Exception) -> GyreError:
    """The error for a driver's exception about a location."""
    response, facts = response_from_error(error), {"location": location}
    if response.refused:
        return NotAllowed(f"{location} is refused: {response.refused}", facts)
    if (known := access_error(location, response.status, facts)) is not None:
        return known
    if isinstance(error, TimeoutError):
        return StorageUnavailable(
            f"the storage did not answer for {location} within {_LISTING_DEADLINE_S:g} s", facts
        )
    return StorageUnavailable(f"the storage failed for {location}: {describe(response)}", facts)


def _version(info: Mapping[str, Any]) -> str:
    """What changes with an object: its etag, or the time of its last change."""
    etags = ("e_tag", "ETag", "etag", "version")
    times = ("last_modified", "LastModified", "mtime", "created")
    return next((str(info[key]) for key in (*etags, *times) if info.get(key)), "")
