"""Drivers of fsspec: asynchronous ones, synchronous ones in threads, archives, those of scripts.

[Note: Drivers and threads]

Most synchronous drivers are not safe for threads: one of SFTP or FTP has one connection, one of
archives a position in its file. So a call takes a driver that is idle, or makes another one, which
connects. There are never more than calls at once. A call that fails on a driver that was used
before is tried again with a new one: a server may have closed connections that were idle for long.

The threads belong to one endpoint, and the process never joins them. A driver that hangs keeps its
own threads and delays nothing else. A thread cannot be stopped, so a cancelled read still counts
among those in flight until its thread returns.

An archive is a shard like any other, so it is opened and read by the rules of its own location: a
local one beneath its folder, another one by the ranges that are needed.
"""

import asyncio
import contextlib
import functools
import io
import operator
import tarfile
import threading
import time
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from gyre_daemon.errors import ConfigError, InvalidRequest
from gyre_daemon.runtime.plug_ins import load_script_object
from gyre_daemon.runtime.threads import DaemonThreads, LoopThreads
from gyre_daemon.storage.listing import StorageFile
from gyre_daemon.storage.location import CLASS
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.response import (
    OnResponse,
    Response,
    SentRequest,
    Source,
    response_from_error,
)

Result = TypeVar("Result")

# Reads in flight to one endpoint, each with a thread and a connection. More take more of a server
# that has a process for each connection; fewer hide less latency.
MAX_READS = 64
# Threads for listings, and for looking at files again.
_NUM_LOOKING = 8
# Drivers that connect at once. A server of SSH drops connections while ten of them log in.
_MAX_CONNECTING = 8
# fsspec has no method that closes a driver: its connections by its module. Those of other drivers
# end with their objects.
_CONNECTIONS = {
    "fsspec.implementations.ftp": ("ftp",),
    "fsspec.implementations.sftp": ("ftp", "client"),
    "fsspec.implementations.webhdfs": ("session",),
    "webdav4.fsspec": ("client.http",),
}
_IDLE_S = 30.0  # a driver without a call for this long is closed
# Answers of a server, after which the connection is as good as before.
_ANSWERS = (
    FileNotFoundError, IsADirectoryError, NotADirectoryError, NotImplementedError, PermissionError,
)  # fmt: skip

# Each driver keeps a directory of the archive, of some 3 KB for each member.
_NUM_DRIVERS, _MAX_MEMBERS = 4, 100_000
_BUFFER_BYTES = 128 << 10  # of the archive that one read asks for, at least


class NotConnected(Exception):
    """A driver could not connect; its exception is the cause."""


class EndpointThreads:
    """The threads of one endpoint.

    Attributes:
        reading: threads for reads, one for each at once.
        looking: threads for all else.
        connecting: limits the drivers that connect at once.
    """

    def __init__(self, name: str, max_reads: int) -> None:
        """Start none yet.

        Args:
            name: of the endpoint.
            max_reads: reads at once.
        """
        self.reading = DaemonThreads(max_reads, f"gyre-read {name}")
        self.looking = DaemonThreads(_NUM_LOOKING, f"gyre-look {name}")
        self.connecting = threading.Semaphore(_MAX_CONNECTING)


class ThreadSource(Source):
    """Reads with the synchronous drivers of one dataset, all with the same settings; see `Source`.

    Threads that read or look call these drivers by `call`; all else belongs to the event loop.
    """

    def __init__(
        self, address: str, connect: Callable[[], AbstractFileSystem], threads: EndpointThreads
    ) -> None:
        """Connect to nothing yet; see `ThreadedFileSystem`."""
        self._idle: list[tuple[AbstractFileSystem, float]] = []  # since when; the latest are last
        self._is_closed = False
        self._address = address
        self._connect = connect
        self.threads = threads
        self._reading = LoopThreads(threads.reading, counts_cancelled=True)
        self._loop = asyncio.get_running_loop()
        self._sweeping: asyncio.TimerHandle | None = None

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        own = self.own(path)

        def read(driver: AbstractFileSystem) -> bytes:
            return bytes(driver.cat_file(own, start=start, end=stop))

        def respond() -> Response:
            try:
                return Response(206, self.call(read))
            except Exception as error:
                return _response(error)

        self.sweep_later()
        return self._reading.send(respond, on_response)

    def own(self, url: str) -> str:
        """A driver's path for a URL."""
        if url.rstrip("/") == self._address.rstrip("/"):
            return "" if self._address.endswith("://") else "/"
        return url.removeprefix(self._address)

    def url(self, path: str) -> str:
        """The URL of a driver's path."""
        slash = "" if path.startswith("/") or self._address.endswith("://") else "/"
        return f"{self._address}{slash}{path}"

    def call(self, work: Callable[[AbstractFileSystem], Result]) -> Result:
        """Call `work` with a driver that no other thread uses meanwhile.

        Raises:
            NotConnected: no driver could connect.
            Exception: of the driver.
        """
        while True:
            driver, is_new = self._take()
            try:
                result = work(driver)
            except _ANSWERS:
                self._give_back(driver)
                raise
            except Exception:
                _close(driver)
                self._close_idle()  # a server that started again has ended all connections
                if is_new:
                    raise
            else:
                self._give_back(driver)
                return result

    def sweep_later(self) -> None:
        """Close drivers that are idle for long, from now on and until none is left."""
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_IDLE_S, self._sweep)

    def close(self) -> None:
        """Close idle drivers now, and those in use once they become idle."""
        if self._sweeping:
            self._sweeping.cancel()
        self._is_closed = True
        self._close_idle()

    def __del__(self) -> None:
        """Close the drivers when no dataset reads any more."""
        self._is_closed = True
        self._close_idle()

    def _sweep(self) -> None:
        self._sweeping = None
        if self._idle:
            self.threads.looking.submit(self._close_unused)
            self.sweep_later()

    def _close_unused(self) -> None:
        """Close drivers that were idle for long."""
        before = time.monotonic() - _IDLE_S
        with contextlib.suppress(IndexError):  # another thread took the last one
            while self._idle[0][1] <= before:
                _close(self._idle.pop(0)[0])

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                _close(self._idle.pop()[0])

    def _take(self) -> tuple[AbstractFileSystem, bool]:
        """A driver, and whether it is a new one."""
        with contextlib.suppress(IndexError):  # another thread took the last one
            return self._idle.pop()[0], False
        with self.threads.connecting:
            with contextlib.suppress(IndexError):  # one became idle meanwhile
                return self._idle.pop()[0], False
            try:
                return self._connect(), True
            except Exception as error:
                raise NotConnected from error

    def _give_back(self, driver: AbstractFileSystem) -> None:
        self._idle.append((driver, time.monotonic()))
        if self._is_closed:
            self._close_idle()


class ThreadedFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """A synchronous driver as an asynchronous one, as far as listing and looking needs it.

    Attributes:
        source: reads the same files, with the same drivers.
        threads: of the endpoint.
    """

    cachable = False  # codespell:ignore cachable

    def __init__(
        self,
        address: str,
        connect: Callable[[], AbstractFileSystem],
        threads: EndpointThreads,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: the part of URLs before the driver's own paths: the scheme, and the server.
            connect: makes a driver.
            threads: of the endpoint.
            told: of every file, added to the driver's info.
        """
        super().__init__(asynchronous=True)
        self.threads = threads
        self._told = told
        self.source = ThreadSource(address, connect, threads)

    async def connect(self) -> None:
        """Make the first driver; the driver's exceptions are raised."""
        await self._run(lambda driver: None)

    async def look(self, path: str) -> dict[str, Any]:
        """The info of a file as it is now, past the driver's cache."""
        own = self.source.own(path)

        def look(driver: AbstractFileSystem) -> dict[str, Any]:
            driver.invalidate_cache(driver._parent(own))
            return self._named(driver.info(own))

        return await self._run(look)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        own = self.source.own(path)
        return await self._run(lambda driver: self._named(driver.info(own)))

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        found = await self._all(
            path, lambda driver, own: driver.ls(driver._strip_protocol(own), detail=True)
        )
        return list(found.values()) if detail else list(found)

    async def _glob(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        return await self._all(path, lambda driver, own: driver.glob(own, detail=True).values())

    async def _find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        return await self._all(path, lambda driver, own: driver.find(own, detail=True).values())

    def _named(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """An info under the file's URL, instead of the driver's own path."""
        return {**info, **self._told, "name": self.source.url(info["name"])}

    async def _all(
        self, path: str, find: Callable[[AbstractFileSystem, str], Iterable[dict[str, Any]]]
    ) -> dict[str, dict[str, Any]]:
        """Infos by URL, with links replaced by their targets."""
        own = self.source.own(path)

        def infos(driver: AbstractFileSystem) -> dict[str, dict[str, Any]]:
            named = (self._named(_behind_link(driver, info)) for info in find(driver, own))
            return {info["name"]: info for info in named}

        return await self._run(infos)

    async def _run(self, work: Callable[[AbstractFileSystem], Result]) -> Result:
        self.source.sweep_later()
        try:
            return await self.threads.looking.run(self.source.call, work)
        except NotConnected as failure:
            raise (failure.__cause__ or failure) from None


def _close(driver: AbstractFileSystem) -> None:
    """Close a driver's connection, where it is known how."""
    for path in _CONNECTIONS.get(type(driver).__module__, ()):
        with contextlib.suppress(Exception):
            operator.attrgetter(path)(driver).close()


def _response(error: BaseException) -> Response:
    """The response for a driver's exception."""
    if not isinstance(error, NotConnected):
        return response_from_error(error)
    response = response_from_error(error.__cause__ or error)
    response.unreachable = response.status == 0 and not response.refused
    return response


def _behind_link(driver: AbstractFileSystem, info: dict[str, Any]) -> dict[str, Any]:
    """The info of a link's target; of a link that leads nowhere, its own."""
    if info["type"] != "link":
        return info
    with contextlib.suppress(OSError):
        return {**driver.info(info["name"]), "name": info["name"]}
    return info


class DriverSource(Source):
    """Reads with an asynchronous fsspec file system of this event loop; see `Source`."""

    def __init__(self, filesystem: AsyncFileSystem) -> None:
        self._filesystem = filesystem

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""

        async def answer(_: AwaitedRequest) -> Response:
            data = await self._filesystem._cat_file(path, start=start, end=stop)
            return Response(206, bytes(data))

        return AwaitedRequest(answer, on_response)


class AwaitedRequest(SentRequest):
    """A request by a coroutine."""

    first_byte_at: float | None = None

    def __init__(
        self,
        answer: "Callable[[AwaitedRequest], Awaitable[Response]]",
        on_response: OnResponse,
    ) -> None:
        """Begin to wait.

        Args:
            answer: asks for the response, and sets `first_byte_at` if it can tell.
            on_response: see `Source.get`.
        """
        self._answer, self._on_response = answer, on_response
        self._is_cancelled = False
        self._task = asyncio.ensure_future(self._respond())

    def cancel(self) -> None:
        """See `SentRequest.cancel`."""
        self._is_cancelled = True  # a finished task cannot be cancelled
        self._task.cancel()

    async def _respond(self) -> None:
        try:
            response = await self._answer(self)
        except Exception as error:
            response = response_from_error(error)
        if not self._is_cancelled:
            self._on_response(response)


def open_archive(scheme: str, address: str, storage: Storage) -> ThreadedFileSystem:
    """The members of an archive; reads nothing yet.

    Args:
        scheme: of the kind of archive.
        address: the part of members' URLs before their names.
        storage: its only shard is the archive.
    """
    loop = asyncio.get_running_loop()
    return ThreadedFileSystem(
        address,
        functools.partial(_driver, scheme, storage, loop),
        EndpointThreads(address, _NUM_DRIVERS),
        # the storage notices where the archive changes
        {"version": storage.shards[0].version},
    )


def _driver(scheme: str, storage: Storage, loop: asyncio.AbstractEventLoop) -> AbstractFileSystem:
    name = storage.shards[0].name
    file = io.BufferedReader(StorageFile(storage, loop), _BUFFER_BYTES)
    try:
        make = fsspec.get_filesystem_class(scheme)
        driver = make(fo=file, skip_instance_cache=True)  # codespell:ignore fo
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise InvalidRequest(
            f"{name} is no {scheme} archive: {error}. A compressed tar has no index; name it "
            "without `tar://`, and its format is webdataset"
        ) from error
    driver.info("")  # which fills `dir_cache`
    if (num_members := len(driver.dir_cache)) > _MAX_MEMBERS:
        raise InvalidRequest(
            f"{name} has too many members (got {num_members}, at most {_MAX_MEMBERS}). Unpack it"
        )
    return driver


def driver_of(scheme: str, settings: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The driver of a scheme, and the settings that it takes.

    Raises:
        ConfigError: the settings name a class that cannot be loaded, or is no file system.
        ImportError: the driver is not installed.
    """
    if CLASS not in settings:
        return fsspec.get_filesystem_class(scheme), settings
    try:
        found, _ = load_script_object(settings[CLASS])
    except Exception as error:
        raise ConfigError(
            f"storage: the class cannot be loaded: {type(error).__name__}: {error!s:.300}"
        ) from error
    if not issubclass(found, fsspec.AbstractFileSystem):
        raise ConfigError(
            f"storage: {found.__name__} is no file system. Derive it from fsspec.AbstractFileSystem"
        )
    driver: Any = found
    if driver.protocol in ("abstract", None):
        driver.protocol = scheme
    return driver, {key: value for key, value in settings.items() if key != CLASS}
