"""Opens locations that fsspec's drivers, web servers or the hub serve; see `opener`.

Which driver lists and reads which scheme, and how it lists. A private daemon of local data starts
without this module and all that it imports.
"""

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from msgspec import Struct

from gyre_daemon.config.schema import hide
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
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.limits import descriptor_shares
from gyre_daemon.runtime.threads import compute, in_thread
from gyre_daemon.storage.engine.endpoint import Endpoint, EndpointOptions, RemoteStorage
from gyre_daemon.storage.location import (
    ARCHIVES,
    Location,
    archive_of,
    check_one_set,
    encoded_name,
    endpoint_name,
    matches_any,
    no_match,
    patterns_of,
    redact,
    relative_names,
    without_beside,
)
from gyre_daemon.storage.mounts import MOUNTS
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.response import Source, access_error, describe, response_from_error, words
from gyre_daemon.storage.shard import Computed, FileShards, FileTable, Shard, Texts, Validators
from gyre_daemon.storage.sources.fsspec_drivers import (
    MAX_READS,
    DriverSource,
    EndpointThreads,
    ThreadedFileSystem,
    driver_of,
    open_archive,
)
from gyre_daemon.storage.sources.http_source import (
    CA_FILE,
    HttpOptions,
    WebFileSystem,
    ask_all,
    check_no_proxy,
    take_http_options,
)
from gyre_daemon.storage.sources.http_source import SCHEMES as WEB_SCHEMES
from gyre_daemon.storage.sources.hub import HubBudget, HubClient, HubFileSystem, HubUnreachable
from gyre_daemon.storage.sources.plain_http import ConnectionBudget

HUB_SCHEME = "hf"
OBJECT_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "http", "https")

# How long a listing may take: of a few paths, or of one page of a folder with any number.
LISTING_DEADLINE_S = 60.0
# A listing may use one in this many of the daemon's connections: jobs read at the same time.
_SHARE_OF_LISTINGS = 4
# Up to this many files are asked for one by one, at any storage; more are found by listing their
# folder, where that can be done, a thousand with each request.
_MAX_ASKED = 1000

Result = TypeVar("Result")
Entries = list[tuple[str, dict[str, Any]]]
_ListAll = Callable[[AsyncFileSystem], Awaitable[tuple[Sequence[str], Sequence[Shard]]]]
_OpenLocation = Callable[[Location, Mapping[str, Any], str], Awaitable[Storage]]


class _Asked(Struct, frozen=True):
    """A location, the settings of its driver, and ours."""

    location: Location
    settings: Mapping[str, Any]
    options: HttpOptions

    @classmethod
    async def of(cls, location: Location, settings: Mapping[str, Any]) -> "_Asked":
        """See `take_http_options`."""
        return cls(location, *await _http_options(settings))

    @property
    def scheme(self) -> str:
        return self.location.scheme


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
        self._connections = ConnectionBudget(self._max_requests)
        self._hub = HubBudget(options.hub_requests_per_s)
        self._threads: dict[str, EndpointThreads] = {}  # of synchronous drivers, by endpoint
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
        asked = await _Asked.of(location, settings)

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

        opening = self._open_remote(asked, list_all_shards, may_be_absent=may_be_absent)
        return await self._or_cached(asked, opening)

    async def open_files(
        self,
        location: Location,
        settings: Mapping[str, Any],
        is_wanted: Callable[[str], bool],
        names: Texts | None,
    ) -> tuple[Storage, FileTable] | Location:
        """See `StorageOpener.open_files`."""
        asked, folder = await _Asked.of(location, settings), as_folder(location.paths[0])

        async def list_files(filesystem: AsyncFileSystem) -> tuple[Sequence[str], FileShards]:
            if names is None:
                table = await list_tree(filesystem, folder, is_wanted)
            else:
                table = await stat_names(filesystem, folder, names, self._max_listings)
            return Computed(len(table), lambda each: folder + table.name(each)), FileShards(table)

        storage = await self._or_cached(asked, self._open_remote(asked, list_files))
        if isinstance(storage, Location):
            return storage
        return storage, cast("FileShards", storage.shards).table

    async def names_in(
        self, location: Location, settings: Mapping[str, Any]
    ) -> list[str] | Location:
        """See `StorageOpener.names_in`."""
        asked = await _Asked.of(location, settings)
        try:
            filesystem = await self._filesystem(asked)
            async with asyncio.timeout(LISTING_DEADLINE_S):
                entries = await filesystem._ls(location.paths[0].rstrip("/"), detail=True)
        except HubUnreachable as error:
            try:
                return await self._cached(asked, str(error), is_logged=False)
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
        self._hub.close()

    async def _or_cached(self, asked: _Asked, opening: Awaitable[Result]) -> Result | Location:
        """The result of opening a location, or its snapshot if there is no way to the hub."""
        try:
            return await opening
        except HubUnreachable as error:
            return await self._cached(asked, str(error))

    async def _cached(self, asked: _Asked, why: str, *, is_logged: bool = True) -> Location:
        """The snapshot of a location in the hub's cache, which the log names."""
        location = asked.location
        client = await self._hub_client(asked)
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

    async def _hub_client(self, asked: _Asked) -> HubClient:
        make = partial(HubClient, asked.settings, asked.options, self._hub)  # reads files
        return await in_thread(make, "gyre-hub")

    async def _open_remote(
        self, asked: _Asked, list_all: _ListAll, *, may_be_absent: bool = False
    ) -> RemoteStorage:
        """List the files of a location, and make them readable."""
        filesystem = await self._filesystem(asked)
        try:
            listing = list_all(filesystem)
            paths, shards = await self._listed(asked.location, listing, may_be_absent=may_be_absent)
        except BaseException:
            if isinstance(filesystem, WebFileSystem):
                filesystem.source.close()
            raise
        num_endpoints = len(self._endpoints)
        name = endpoint_name(asked.scheme, asked.settings, paths[0])
        max_requests = self._options.max_requests
        if isinstance(filesystem, ThreadedFileSystem):
            max_requests = min(max_requests, filesystem.threads.reading.max_threads)
        endpoint = self._endpoint(name, asked.scheme, max_requests)
        num_connections = endpoint.limit.limit if len(self._endpoints) > num_endpoints else 0
        source = await self._source(filesystem, asked, paths[0], num_connections)
        self._sources.add(source)
        return RemoteStorage(source, endpoint, paths, shards, partial(look_again, filesystem))

    async def _filesystem(self, asked: _Asked) -> AsyncFileSystem:
        """A file system for one dataset; a shared one would share credentials."""
        scheme, settings, path = asked.scheme, asked.settings, asked.location.paths[0]
        try:
            if scheme in WEB_SCHEMES and check_no_proxy(path, asked.options.redirects):
                return WebFileSystem(settings, asked.options, self._connections)
            if scheme == HUB_SCHEME:
                client = await self._hub_client(asked)
                return HubFileSystem(client, asked.options, self._connections)
            if scheme in OBJECT_SCHEMES:
                # obstore is an extra, which local files do not need.
                from gyre_daemon.storage.sources.object_source import open_objects  # noqa: PLC0415

                return open_objects(scheme, settings, path, asked.options.roots)
            make = self._archive if scheme in ARCHIVES else self._driver
            filesystem = await make(asked)
            if isinstance(filesystem, ThreadedFileSystem):
                async with asyncio.timeout(LISTING_DEADLINE_S):
                    await filesystem.connect()
            return filesystem
        except ImportError as error:
            raise no_driver(scheme, error) from error
        except GyreError:
            raise
        except (TypeError, ValueError) as error:
            if scheme in ARCHIVES:  # its bytes are at fault
                raise listing_error(asked.location.text, error) from error
            raise ConfigError(
                f"the storage settings of a {scheme}:// dataset cannot be used: "
                f"{words(hide(str(error), settings))}"
            ) from error
        except Exception as error:
            raise listing_error(asked.location.text, error) from error

    async def _archive(self, asked: _Asked) -> AsyncFileSystem:
        """The members of an archive, which is opened as a location by itself."""
        path = asked.location.paths[0]
        settings = {**asked.settings, **asked.options.given}
        archive = await self._open_location(archive_of(path), settings, "*")
        address = f"{asked.scheme}://{path.partition('://')[2].partition('/')[0]}"
        return open_archive(asked.scheme, address, archive)

    async def _driver(self, asked: _Asked) -> AsyncFileSystem:
        """Any other driver of fsspec."""
        scheme = asked.scheme
        find = partial(driver_of, scheme, asked.settings)  # imports its package
        driver, settings = await in_thread(find, f"gyre-import {scheme}")
        address, told = _server_in(driver, asked.location)
        arguments = {**settings, **told, "skip_instance_cache": True}
        if isinstance(arguments.get("auth"), list):  # TOML has no tuples
            arguments["auth"] = tuple(arguments["auth"])
        # The names that a driver has for files lack the server: `ThreadedFileSystem` adds it.
        if driver.async_impl and not told:
            return driver(**arguments, asynchronous=True)
        name = endpoint_name(scheme, settings, asked.location.paths[0])
        threads = self._threads.setdefault(name, EndpointThreads(name, MAX_READS))
        return ThreadedFileSystem(address, partial(driver, **arguments), threads)

    async def _source(
        self, filesystem: AsyncFileSystem, asked: _Asked, path: str, num_connections: int
    ) -> Source:
        """The carrier of a listed dataset's reads; opens this many connections at once."""
        if isinstance(filesystem, WebFileSystem):
            filesystem.source.connect(urlsplit(path), num_connections)
            return filesystem.source
        if isinstance(filesystem, HubFileSystem | ThreadedFileSystem):
            return cast("Source", filesystem.source)
        if asked.scheme not in OBJECT_SCHEMES:
            return DriverSource(filesystem)
        from gyre_daemon.storage.sources.object_source import (  # noqa: PLC0415
            ObjectSource,
            plain_source,
        )

        scheme, settings, options = asked.scheme, asked.settings, asked.options
        general = ObjectSource(scheme, settings, path, options.roots)
        return await plain_source(
            general, scheme, settings, path, self._connections, num_connections, options
        )

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
        async with asyncio.timeout(LISTING_DEADLINE_S):
            found = await ask_all(
                lambda path: entries_of(filesystem, path, pattern),
                location.paths,
                min(self._max_listings, len(location.paths)),
            )
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


def _server_in(driver: type[AbstractFileSystem], location: Location) -> tuple[str, dict[str, Any]]:
    """The server of a location's URL.

    Returns:
        The beginning of the URL, outside of a driver's own paths; and host, port and user,
        as the driver takes them.

    Raises:
        InvalidRequest: a brace list names several servers.
    """
    scheme = location.scheme
    first = location.paths[0].partition("://")[2].partition("/")[0]
    told = driver._get_kwargs_from_urls(f"{scheme}://{first}/")
    address = f"{scheme}://{first}"
    if not told:
        return f"{scheme}://", {}
    others = (each for each in location.paths if not f"{each}/".startswith(f"{address}/"))
    if other := next(others, None):
        raise InvalidRequest(
            f"the shards of {location.text} are on several servers (got {redact(other)} too). Make "
            "each a dataset, and mix these"
        )
    is_in_path = driver._strip_protocol(f"{address}/x").strip("/") != "x"
    return f"{scheme}://" if is_in_path else address, told


async def entries_of(filesystem: AsyncFileSystem, path: str, pattern: str) -> Entries:
    """Path and info of every file that a path, a folder or a glob stands for, sorted by path."""
    scheme = path.partition("://")[0]
    may_be_glob = path.partition("://")[2].partition("/")[2] if scheme in WEB_SCHEMES else path
    if any(letter in may_be_glob for letter in "*?["):
        found = await filesystem._glob(path, detail=True)
    else:
        info = await filesystem._info(path)
        if info["type"] != "directory":
            return [(path, info)]
        found = await _in_folder(filesystem, as_folder(path), pattern)
        await _check_folder(filesystem, path, found, pattern)
    return [
        (f"{scheme}://{name.removeprefix(scheme + '://')}", info)
        for name, info in sorted(found.items())
        if info["type"] == "file"
    ]


def as_folder(url: str) -> str:
    """The URL with one slash at its end, or that of a root: `scheme://`."""
    return url if url.endswith("://") else url.rstrip("/") + "/"


async def _in_folder(
    filesystem: AsyncFileSystem, folder: str, pattern: str
) -> dict[str, dict[str, Any]]:
    """The files of a folder that match, by one listing."""
    is_one = len(patterns_of(pattern)) == 1
    found = dict(await filesystem._glob(f"{folder}{pattern if is_one else '*'}", detail=True))
    paths = [path for path in found if is_one or matches_any(path.rpartition("/")[2], pattern)]
    paths = without_beside(redact(folder), paths, pattern, lambda path: path.rpartition("/")[2])
    return {path: found[path] for path in paths}


async def _check_folder(
    filesystem: AsyncFileSystem, path: str, found: Mapping[str, Any], pattern: str
) -> None:
    """A folder means all of its files, so they must be one dataset; see `check_one_set`."""
    shown = redact(path)
    check_one_set(shown, [name.rpartition("/")[2] for name in sorted(found)], pattern)
    if not found:
        entries = await filesystem._ls(path, detail=True)
        names = [entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file"]
        folder, below = as_folder(path), []
        async for page in _pages(filesystem, folder):
            below = [name.removeprefix(folder.partition("://")[2]) for name, _ in page]
            break  # for a message, the first are enough
        raise no_match(shown, pattern, names, [name for name in below if "/" in name])


async def list_tree(
    filesystem: AsyncFileSystem,
    folder: str,
    is_wanted: Callable[[str], bool],
    *,
    with_hidden: bool = False,
) -> FileTable:
    """All files below a folder, sorted by path.

    Args:
        filesystem: of the folder.
        folder: with its scheme, and a slash at its end.
        is_wanted: whether a file of this name, without its folder, counts.
        with_hidden: whether hidden files count too, and files in hidden folders.

    Raises:
        ShardMissing: there is none.
        Exception: of the driver.
    """
    prefix = folder.partition("://")[2]
    names: list[bytes] = []
    sizes: list[int] = []
    validators: list[bytes] = []
    pages = aiter(_pages(filesystem, folder))
    while True:
        async with asyncio.timeout(LISTING_DEADLINE_S):
            page = await anext(pages, None)
        if page is None:
            break
        for path, info in page:
            name = path.removeprefix(prefix)
            parts = name.split("/")
            is_hidden = not with_hidden and any(part.startswith(".") for part in parts)
            if parts[-1] and is_wanted(parts[-1]) and not is_hidden:
                names.append(encoded_name(name))
                sizes.append(int(info["size"]))
                validators.append(Validators.in_info(info).encoded())
    if not names:
        raise ShardMissing(f"no file below {redact(folder)} is one of those asked for")
    if any(before > after for before, after in itertools.pairwise(names)):
        order = sorted(range(len(names)), key=names.__getitem__)
        names = [names[number] for number in order]
        sizes = [sizes[number] for number in order]
        validators = [validators[number] for number in order]
    return FileTable(Texts.of(names), np.array(sizes, np.int64), Texts.of(validators))


async def stat_names(
    filesystem: AsyncFileSystem, folder: str, names: Texts, max_at_once: int
) -> FileTable:
    """Some files below a folder, in the order of their names.

    Args:
        filesystem: of the folder.
        folder: with its scheme, and a slash at its end.
        names: of the files, relative to the folder.
        max_at_once: how many may be asked for at once.

    Raises:
        ShardMissing: one of them is not there; otherwise see `listing_error`.
    """
    if len(names) > _MAX_ASKED and not folder.startswith(WEB_SCHEMES):
        table = await list_tree(filesystem, folder, lambda _: True, with_hidden=True)
        row_of = {table.names[number]: number for number in range(len(table))}
        rows = [row_of.get(names[number], -1) for number in range(len(names))]
        if -1 in rows:
            raise _missing(names[rows.index(-1)].decode())
        assert table.validators
        told = Texts.of(table.validators[row] for row in rows)
        return FileTable(names, table.sizes[rows], told)

    async def ask(number: int) -> tuple[int, bytes]:
        name = names[number].decode()
        try:
            async with asyncio.timeout(LISTING_DEADLINE_S):
                info = await filesystem._info(folder + name)
        except Exception as error:
            failure = listing_error(redact(folder + name), error)
            missing = isinstance(failure, ShardMissing)
            raise (_missing(name) if missing else failure) from error
        return int(info["size"]), Validators.in_info(info).encoded()

    found = await ask_all(ask, range(len(names)), min(max_at_once, len(names)))
    sizes = np.array([size for size, _ in found], np.int64)
    return FileTable(names, sizes, Texts.of(told for _, told in found))


def _missing(name: str) -> ShardMissing:
    return ShardMissing(
        f"the manifest names {name}, which does not exist beside it; restore the file, or remove "
        "its row",
        {"shard": name},
    )


async def _pages(filesystem: AsyncFileSystem, folder: str) -> AsyncIterator[Entries]:
    """The files below a folder, a page at a time: each with its path without a scheme."""
    if hasattr(filesystem, "pages_below"):  # object storages
        async for page in filesystem.pages_below(folder):
            yield page
        return
    found = await filesystem._find(folder, detail=True)
    yield [(path.rpartition("://")[2].lstrip("/"), info) for path, info in found.items()]


async def look_again(filesystem: AsyncFileSystem, path: str) -> tuple[int, Validators]:
    """Size and validators of an object as it is now, past the driver's cache.

    Raises:
        GyreError: see `listing_error`.
    """
    try:
        async with asyncio.timeout(LISTING_DEADLINE_S):
            if isinstance(filesystem, ThreadedFileSystem):
                info = await filesystem.look(path)
            else:
                filesystem.invalidate_cache(filesystem._parent(path))
                info = await filesystem._info(path)
        return int(info["size"]), Validators.in_info(info)
    except GyreError:
        raise
    except Exception as error:
        raise listing_error(redact(path), error) from error


def listing_error(location: str, error: Exception) -> GyreError:
    """The error for a driver's exception about a location."""
    response, facts = response_from_error(error), {"location": location}
    if response.error:
        return response.error
    if response.refused:
        return NotAllowed(f"{location} is refused: {response.refused}", facts)
    if (known := access_error(location, response, facts)) is not None:
        return known
    if isinstance(error, TimeoutError):
        return StorageUnavailable(
            f"the storage did not answer for {location} within {LISTING_DEADLINE_S:g} s", facts
        )
    return StorageUnavailable(f"the storage failed for {location}: {describe(response)}", facts)


def no_driver(scheme: str, error: ImportError) -> ConfigError:
    """The error for a scheme whose driver is not installed."""
    if scheme in OBJECT_SCHEMES:
        return ConfigError(
            f"{scheme}:// needs {error.name}, which is not installed. "
            'Run pip install "gyre-ml[objects]".'
        )
    return ConfigError(f"no driver for {scheme}:// is installed: {error}")
