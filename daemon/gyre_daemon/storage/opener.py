"""Which driver serves which scheme, and the listing of a location's shards."""

import asyncio
import functools
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

from gyre_daemon.copiers import NO_COPIERS, Copiers
from gyre_daemon.errors import ConfigError, GyreError, InvalidRequest, NotAllowed, ShardMissing, StorageUnavailable, first_error
from gyre_daemon.monitoring.metrics import Metrics, Outcome, RequestLabels
from gyre_daemon.runtime.fair import FairExecutor
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.storage.answer import failure, told
from gyre_daemon.storage.base import Storage
from gyre_daemon.storage.engine.endpoint import Endpoint, Terms
from gyre_daemon.storage.engine.remote import RemoteStorage
from gyre_daemon.storage.local.local import LocalStorage, list_files, stat_shard
from gyre_daemon.storage.local.openfiles import OpenFiles
from gyre_daemon.storage.location import Location, endpoints_in, redact, relative_names
from gyre_daemon.storage.patterns import matches_any, patterns_of
from gyre_daemon.storage.shard import Shard
from gyre_daemon.storage.source import Source
from gyre_daemon.storage.sources.connections import Connections
from gyre_daemon.storage.sources.drivers import DriverSource
from gyre_daemon.storage.splits import check_one_set, check_subfolders

_OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "http", "https")
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}  # of the others' driver: s3
_LISTING_DEADLINE_S = 60.0
_SHARE_OF_LISTINGS = 4  # of all connections, while one dataset is listed

_Entries = list[tuple[str, dict[str, Any]]]


class StorageOpener:
    """Opens locations with one daemon's threads, limits and counters."""

    def __init__(self, workers: FairExecutor, terms: Terms, metrics: Metrics, copiers: Copiers = NO_COPIERS) -> None:
        self._workers = workers
        self._terms = terms
        self._metrics = metrics
        self._copiers = copiers
        self.endpoints: dict[str, Endpoint] = {}
        self._max_requests = descriptor_shares().connections  # over all endpoints
        self._connections = Connections(self._max_requests)
        self._open_files = OpenFiles()
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()

    async def open(
        self, location: Location, settings: Mapping[str, Any], pattern: str, *, may_be_absent: bool = False
    ) -> Storage:
        """List the shards of a location and stand ready to read them.

        Args:
            location: where.
            settings: the driver's: endpoint, region, credentials.
            pattern: which files count where the location is a folder.
            may_be_absent: that nothing is there is no failed request.

        Raises:
            ShardMissing, NotAllowed, StorageUnavailable: nothing is there, or it cannot be listed.
            ConfigError: no driver is installed for the scheme, or it does not know a setting.
        """
        if location.scheme == "file":
            loop = asyncio.get_running_loop()
            paths, shards = await loop.run_in_executor(self._workers.executor, _list_local, location, pattern)
            self._count_listing("file", len(location.paths), "ok")
            return self.local(paths, shards, None)
        filesystem = await self._make_filesystem(location, settings)
        names, shards = await self._list_remote(filesystem, location, pattern, may_be_absent=may_be_absent)
        num_endpoints = len(self.endpoints)
        endpoint = self._endpoint(location.scheme, settings, names[0])
        num_connections = endpoint.limit.limit if len(self.endpoints) > num_endpoints else 0
        source = await self._make_source(filesystem, location.scheme, settings, names[0], num_connections)
        self._sources.add(source)
        return RemoteStorage(source, endpoint, names, shards)

    def local(self, paths: Sequence[Path], shards: Sequence[Shard], owner: object) -> LocalStorage:
        """Files of this machine that are known already.

        Args:
            paths: of the shards.
            shards: as they are.
            owner: keeps them for as long as somebody reads; None where nobody does.
        """
        return LocalStorage(paths, shards, self._workers, self._metrics, self._copiers, self._open_files, owner)

    async def open_beside(
        self, storage: Storage, shards: Sequence[int], suffix: str, settings: Mapping[str, Any]
    ) -> Storage | None:
        """Stand ready to read the files that lie beside some shards and have their names, but for the suffix.

        Args:
            storage: of the shards.
            shards: some, by index; their order is that of the files.
            suffix: in place of theirs.
            settings: as in `open`.

        Returns:
            None where one of the files is not there, or where the storage says so of what it does not show.

        Raises:
            NotAllowed, StorageUnavailable: nobody can tell.
        """
        paths = [_path(storage, shard).rpartition(".")[0] + suffix for shard in shards]
        scheme = paths[0].partition("://")[0] if "://" in paths[0] else "file"
        try:
            return await self.open(Location(scheme, tuple(paths), paths[0]), settings, "*" + suffix, may_be_absent=True)
        except ShardMissing:
            return None
        except NotAllowed:
            if scheme == "file":
                raise
            return None  # where keys may not be listed, S3 says so of absent ones

    def close(self) -> None:
        """Hang up everywhere."""
        for source in list(self._sources):
            source.close()

    async def _make_source(
        self, filesystem: AsyncFileSystem, scheme: str, settings: Mapping[str, Any], path: str, num_connections: int
    ) -> Source:
        """What carries the reads of a dataset that was listed; it may make so many connections already."""
        if scheme not in _OBJECT_SCHEMES:
            return DriverSource(filesystem)
        from gyre_daemon.storage.sources.objects import ObjectSource  # noqa: PLC0415  an extra, which local files do without
        from gyre_daemon.storage.sources.plainsources import plain_source  # noqa: PLC0415

        return await plain_source(
            ObjectSource(scheme, settings, path), scheme, settings, path, self._connections, num_connections
        )

    def _endpoint(self, scheme: str, settings: Mapping[str, Any], path: str) -> Endpoint:
        """What datasets share that lie in one bucket, or on one web server."""
        where = next((endpoint.rstrip("/") for endpoint in endpoints_in(settings)), f"{scheme}:/")
        name = f"{where}/{path.partition('://')[2].partition('/')[0]}"
        if name not in self.endpoints:
            self.endpoints[name] = Endpoint(name, scheme, self._terms, self._metrics)
            for endpoint in self.endpoints.values():
                endpoint.lower_ceiling(max(1, self._max_requests // len(self.endpoints)))
        return self.endpoints[name]

    async def _make_filesystem(self, location: Location, settings: Mapping[str, Any]) -> AsyncFileSystem:
        """A file system of its own for one dataset: an instance shared between datasets would share credentials."""
        scheme = location.scheme
        try:
            if scheme in _OBJECT_SCHEMES:
                from gyre_daemon.storage.sources.objects import open_objects  # noqa: PLC0415  an extra, which local files do without

                return open_objects(scheme, settings, location.paths[0])
            driver = fsspec.get_filesystem_class(scheme)
            if driver.async_impl:
                return driver(**settings, asynchronous=True, skip_instance_cache=True)
            connect = functools.partial(driver, **settings, skip_instance_cache=True)  # some wait for their server
            async with asyncio.timeout(_LISTING_DEADLINE_S):
                return AsyncFileSystemWrapper(await asyncio.to_thread(connect), asynchronous=True)
        except ImportError as error:
            raise _no_driver(scheme, error) from error
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the storage settings of a {scheme}:// dataset cannot be used: {error}") from error
        except Exception as error:
            raise listing_error(location.text, error) from error

    async def _list_remote(
        self, filesystem: AsyncFileSystem, location: Location, pattern: str, *, may_be_absent: bool
    ) -> tuple[list[str], list[Shard]]:
        outcome: Outcome = "error"
        found: list[_Entries] = [[] for _ in location.paths]
        waiting = iter(enumerate(location.paths))

        async def list_next() -> None:
            for index, path in waiting:
                found[index] = await _entries(filesystem, path, pattern)

        try:
            async with asyncio.timeout(_LISTING_DEADLINE_S), asyncio.TaskGroup() as group:
                most = min(self._terms.max_requests, max(1, self._max_requests // _SHARE_OF_LISTINGS))
                for _ in range(min(most, len(location.paths))):
                    group.create_task(list_next())
            outcome = "ok"
        except ExceptionGroup as errors:
            error = first_error(errors)
            if isinstance(error, GyreError):
                raise error from errors
            if isinstance(error, ValueError | NotImplementedError):
                raise InvalidRequest(f"the storage cannot list {location.text}: {error}") from errors
            listing = listing_error(location.text, error)
            if may_be_absent and isinstance(listing, ShardMissing | NotAllowed):
                outcome = "ok"
            raise listing from errors
        except TimeoutError as error:
            raise listing_error(location.text, error) from error
        finally:
            self._count_listing(location.scheme, len(location.paths), outcome)
        entries = [entry for of_path in found for entry in of_path]
        if not entries:
            raise ShardMissing(f"no shard at {location.text}: check the dataset's URI and that it matches {pattern}")
        paths = [path for path, _ in entries]
        shards = [
            Shard(name, int(info["size"]), _version(info))
            for name, (_, info) in zip(relative_names(paths), entries, strict=True)
        ]
        return paths, shards

    def _count_listing(self, scheme: str, num_requests: int, outcome: Outcome) -> None:
        self._metrics.count_requests(RequestLabels(scheme, "list", outcome), num_requests, 0)


def _no_driver(scheme: str, error: ImportError) -> ConfigError:
    if scheme in _OBJECT_SCHEMES:
        install = f'pip install "gyre-ml[{_EXTRAS.get(scheme, "s3")}]"'
        return ConfigError(f"reading {scheme}:// needs {error.name}, which is not installed: {install}")
    return ConfigError(f"no driver for {scheme}:// is installed: {error}")


def _path(storage: Storage, shard: int) -> str:
    """Where a shard lies, with scheme but for local files."""
    return storage.path(shard) if isinstance(storage, RemoteStorage) else str(storage.local_path(shard))


def _list_local(location: Location, pattern: str) -> tuple[list[Path], list[Shard]]:
    paths = [file for path in location.paths for file in list_files(Path(path), pattern)]
    names = relative_names([str(path) for path in paths])
    return paths, [stat_shard(path, name) for path, name in zip(paths, names, strict=True)]


async def _entries(filesystem: AsyncFileSystem, path: str, pattern: str) -> _Entries:
    """Path and info of every file that one path, folder or glob stands for, sorted by path."""
    scheme = path.partition("://")[0]
    if any(letter in path for letter in "*?["):
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


async def _in_folder(filesystem: AsyncFileSystem, folder: str, pattern: str) -> dict[str, dict[str, Any]]:
    """What a folder has of the files that count, by one listing."""
    if len(patterns_of(pattern)) == 1:
        return dict(await filesystem._glob(f"{folder}/{pattern}", detail=True))
    found = await filesystem._glob(f"{folder}/*", detail=True)
    return {path: info for path, info in found.items() if matches_any(path.rpartition("/")[2], pattern)}


async def _check_folder(filesystem: AsyncFileSystem, path: str, found: Mapping[str, Any], pattern: str) -> None:
    """Whoever names a folder means all its files; see `splits`."""
    shown = redact(path)
    check_one_set(shown, [name.rpartition("/")[2] for name in sorted(found)], pattern)
    if not found:
        entries = await filesystem._ls(path, detail=True)
        folders = [entry["name"] for entry in entries if entry["type"] == "directory"]
        check_subfolders(shown, [name.rstrip("/").rpartition("/")[2] for name in folders], pattern)


def listing_error(place: str, error: Exception) -> GyreError:
    """What a driver's exception about a location means."""
    answer, facts = failure(error), {"location": place}
    if answer.status == 404:
        return ShardMissing(f"{place} does not exist; restore it or correct the dataset's URI", facts)
    if answer.status in (401, 403):
        return NotAllowed(f"the storage refused access to {place}; check the daemon's credentials", facts)
    if isinstance(error, TimeoutError):
        return StorageUnavailable(f"the storage did not answer for {place} within {_LISTING_DEADLINE_S:g} s", facts)
    return StorageUnavailable(f"the storage failed for {place}: {told(answer)}", facts)


def _version(info: Mapping[str, Any]) -> str:
    """What the driver knows that changes with the object: an etag, or a time."""
    for key in ("e_tag", "ETag", "etag", "version", "last_modified", "LastModified", "mtime", "created"):
        if info.get(key):
            return str(info[key])
    return ""
