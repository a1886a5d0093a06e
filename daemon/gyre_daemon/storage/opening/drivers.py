"""Which driver lists and reads which scheme."""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from gyre_daemon.config.tables import hide
from gyre_daemon.errors import ConfigError, GyreError, InvalidRequest
from gyre_daemon.runtime.threads import in_thread
from gyre_daemon.storage.location import Location, endpoint_name, redact
from gyre_daemon.storage.opening.remote_listing import (
    LISTING_DEADLINE_S,
    OBJECT_SCHEMES,
    listing_error,
    no_driver,
)
from gyre_daemon.storage.response import words
from gyre_daemon.storage.source import Source
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.driver_source import DriverSource
from gyre_daemon.storage.sources.driver_threads import (
    MAX_READS,
    EndpointThreads,
    ThreadedFileSystem,
)
from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.hub import HubClient
from gyre_daemon.storage.sources.hub_budget import HubBudget
from gyre_daemon.storage.sources.hub_files import HubFileSystem
from gyre_daemon.storage.sources.script_driver import driver_of
from gyre_daemon.storage.sources.tls_relay import TlsRelay, needs_relay
from gyre_daemon.storage.sources.web_files import SCHEMES as WEB_SCHEMES
from gyre_daemon.storage.sources.web_files import WebFileSystem, check_no_proxy

HUB_SCHEME = "hf"


class Drivers:
    """Makes the objects that list and read the shards of one dataset."""

    def __init__(self, max_connections: int, hub_requests_per_s: float) -> None:
        """Connect to nothing yet.

        Args:
            max_connections: of all datasets together.
            hub_requests_per_s: see `EndpointOptions`.
        """
        self._connections = ConnectionBudget(max_connections)
        self._hub = HubBudget(hub_requests_per_s)
        self._relays: dict[str, tuple[TlsRelay, str]] = {}  # by the roots that they trust
        self._threads: dict[str, EndpointThreads] = {}  # of synchronous drivers, by endpoint

    def close(self) -> None:
        """Begin nothing more."""
        self._hub.close()
        for relay, _ in self._relays.values():
            relay.close()

    def hub(self, settings: Mapping[str, Any], options: HttpOptions) -> HubClient:
        """The client of the hub's API; see `HubClient` for errors. Reads files."""
        return HubClient(settings, options, self._hub)

    async def filesystem(
        self, location: Location, settings: Mapping[str, Any], options: HttpOptions
    ) -> AsyncFileSystem:
        """A file system for one dataset; a shared one would share credentials."""
        scheme = location.scheme
        try:
            if scheme in WEB_SCHEMES and check_no_proxy(location.paths[0], options.redirects):
                return WebFileSystem(settings, options, self._connections)
            if scheme == HUB_SCHEME:
                client = await in_thread(functools.partial(self.hub, settings, options), "gyre-hub")
                return HubFileSystem(client, options, self._connections)
            if scheme in OBJECT_SCHEMES:
                # See `_make_source`.
                from gyre_daemon.storage.sources.object_source import open_objects  # noqa: PLC0415

                relay = await self._relay(settings, options)
                return open_objects(scheme, settings, location.paths[0], options.roots, relay)
            find = functools.partial(driver_of, scheme, settings)  # imports its package
            driver, settings = await in_thread(find, f"gyre-import {scheme}")
            address, told = _server_in(driver, location)
            arguments = {**settings, **told}
            if isinstance(arguments.get("auth"), list):  # TOML has no tuples
                arguments["auth"] = tuple(arguments["auth"])
            # The names that a driver has for files lack the server: `ThreadedFileSystem` adds it.
            if driver.async_impl and not told:
                return driver(**arguments, asynchronous=True, skip_instance_cache=True)
            name = endpoint_name(scheme, settings, location.paths[0])
            threads = self._threads.setdefault(name, EndpointThreads(name, MAX_READS))
            connect = functools.partial(driver, **arguments, skip_instance_cache=True)
            filesystem = ThreadedFileSystem(address, connect, threads)
            async with asyncio.timeout(LISTING_DEADLINE_S):
                await filesystem.connect()
            return filesystem
        except ImportError as error:
            raise no_driver(scheme, error) from error
        except GyreError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the storage settings of a {scheme}:// dataset cannot be used: "
                f"{words(hide(str(error), settings))}"
            ) from error
        except Exception as error:
            raise listing_error(location.text, error) from error

    async def source(
        self,
        filesystem: AsyncFileSystem,
        scheme: str,
        settings: Mapping[str, Any],
        path: str,
        num_connections: int,
        options: HttpOptions,
    ) -> Source:
        """The carrier of a listed dataset's reads; opens this many connections at once."""
        if isinstance(filesystem, WebFileSystem):
            filesystem.source.connect(urlsplit(path), num_connections)
            return filesystem.source
        if scheme == HUB_SCHEME or isinstance(filesystem, ThreadedFileSystem):
            return cast("Source", filesystem.source)
        if scheme not in OBJECT_SCHEMES:
            return DriverSource(filesystem)
        # Drivers of object storages are an extra, which local files do not need.
        from gyre_daemon.storage.sources.object_source import (  # noqa: PLC0415
            ObjectSource,
            plain_source,
        )

        general = ObjectSource(scheme, settings, path, options.roots)
        return await plain_source(
            general,
            scheme,
            settings,
            path,
            self._connections,
            num_connections,
            options,
            await self._relay(settings, options),
        )

    async def _relay(self, settings: Mapping[str, Any], options: HttpOptions) -> str:
        """The URL of a `TlsRelay`, if obstore needs one; each set of roots has one."""
        if not await in_thread(functools.partial(needs_relay, settings, options), "gyre-relay"):
            return ""
        if options.roots not in self._relays:
            relay = TlsRelay(options.tls)
            self._relays[options.roots] = relay, await relay.start()
        return self._relays[options.roots][1]


def _server_in(driver: type[AbstractFileSystem], location: Location) -> tuple[str, dict[str, Any]]:
    """The server of a location's URL.

    Returns:
        The beginning of the URL that is not part of a driver's own paths; and host, port and user,
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
