"""Synchronous drivers of fsspec against servers that others wrote, and how many reads they get."""

import asyncio
import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem
from gyre_daemon.errors import InvalidRequest, NotAllowed, StorageUnavailable
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.sources import fsspec_drivers
from gyre_daemon.storage.sources.fsspec_drivers import MAX_READS
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import (
    LocalPlace,
    MemoryPlace,
    Place,
    Targets,
    first_of,
    noise,
    openers,
    run,
    unique,
)
from tests.contract.storage.file_servers import PASSWORD, FileServer, file_server, why_absent
from tests.contract.storage.storage_contract import StorageContract

KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(bool(why_absent(kind)), reason=why_absent(kind)))
    for kind in ("sftp", "ftp", "webdav")
]


class ServedPlace(LocalPlace):
    """A folder of a server, written to by its own machine."""

    def __init__(self, server: FileServer) -> None:
        name = f"storage-{next(unique)}"
        super().__init__(server.folder / "data" / name)
        self.root, self.settings = f"{server.root}/{name}", server.settings
        self._seconds = itertools.count(1_700_000_000)

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        os.utime(self._folder / name, (next(self._seconds),) * 2)  # servers tell whole seconds


@pytest.fixture(scope="module", params=KINDS)
def server(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FileServer]:
    with file_server(request.param, tmp_path_factory.mktemp(request.param)) as server:
        yield server


class TestServers(StorageContract):
    @pytest.fixture
    def place(self, server: FileServer) -> Place:
        return ServedPlace(server)

    def test_the_root_of_a_server(self, server: FileServer, opener: Any) -> None:
        (server.folder / "root.bin").write_bytes(b"12345")
        root = server.root.removesuffix("data").rstrip("/")
        root = f"{root}//" if root.endswith(":") else root
        for uri in (root, f"{root}/*.bin" if root[-1] != "/" else f"{root}*.bin"):
            (shard,) = run(opener(uri, server.settings)).shards
            assert (shard.name, shard.size_bytes) == ("root.bin", 5)

    def test_names_with_unusual_characters(self, place: Place, opener: Any) -> None:
        if place.root.startswith("webdav://"):
            pytest.skip("webdav4 decodes percent signs in names; docs/any-storage.md says so")
        super().test_names_with_unusual_characters(place, opener)

    def test_a_driver_that_is_used_by_many_threads(self, place: Place, opener: Any) -> None:
        data = noise(1, 1 << 20)
        place.put("0.bin", data)

        async def read() -> None:
            storage = await opener(place.root, place.settings)
            targets = Targets()
            for sample in range(300):
                targets.add(0, sample * 3000, 2500)
            await storage.read(targets.reads())
            targets.check([data])

        run(read())

    def test_a_wrong_password_is_refused_and_not_shown(self, place: Place, opener: Any) -> None:
        place.put("0.bin", b"1")
        wrong = {
            key: "hunter2" if value == PASSWORD else value for key, value in place.settings.items()
        }
        if "auth" in wrong:
            wrong["auth"] = ["gyre", "hunter2"]
        with pytest.raises(NotAllowed, match="refused access") as caught:
            run(first_of(opener(place.root, wrong)))
        assert "hunter2" not in str(caught.value)


class Session:
    """What a driver holds of its server."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class GateFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A driver whose reads wait for a test; it notices other threads in it.

    Attributes:
        gate: reads wait for it.
        uses: after so many, a driver fails, as one does whose server closed the connection.
        made: all drivers.
        arguments: of the last one.
    """

    protocol = "gate_1+x"
    gate: ClassVar[threading.Event] = threading.Event()
    uses: ClassVar[int] = 1 << 30
    made: ClassVar[list[Any]] = []
    arguments: ClassVar[dict[str, Any]] = {}

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        type(self).arguments = arguments
        self._lock = threading.Lock()
        self.session = Session()
        self._num_uses = 0
        self.made.append(self)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        user, _, host = path.partition("://")[2].partition("/")[0].rpartition("@")
        return {"user": user, "host": host} if host else {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": 1000}

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        assert self._lock.acquire(blocking=False), "two threads in one driver"
        try:
            self._num_uses += 1
            if self._num_uses > self.uses:
                raise ConnectionResetError("the server has closed the connection")
            assert self.gate.wait(60)
            return bytes(end - start)
        finally:
            self._lock.release()


class HostedFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """An asynchronous driver whose URLs name a server."""

    def __init__(self, host: str, **_: Any) -> None:
        super().__init__()
        self.host = host

    _strip_protocol = GateFileSystem._strip_protocol
    _get_kwargs_from_urls = staticmethod(GateFileSystem._get_kwargs_from_urls)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": len(self.host + path)}

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return f"{self.host}{path}".encode()[start:end]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def storage_opener(metrics: Metrics) -> Iterator[StorageOpener]:
    with ThreadPoolExecutor(2) as executor:
        terms = EndpointOptions(1024, 60.0, hedges=False)
        openers.append(StorageOpener(FairExecutor(executor, 2), terms, metrics))
        yield openers[-1]
        openers.clear()


@pytest.fixture
def opener(storage_opener: StorageOpener) -> Any:
    def open_storage(uri: str, settings: Any) -> Any:
        return storage_opener.open(parse_location(uri), settings, "*.bin")

    return open_storage


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[GateFileSystem]]:
    where = f"{__name__}.{GateFileSystem.__name__}"
    monkeypatch.setitem(known_implementations, GateFileSystem.protocol, {"class": where})
    yield GateFileSystem
    GateFileSystem.gate.set()
    GateFileSystem.gate = threading.Event()
    GateFileSystem.uses = 1 << 30
    GateFileSystem.made.clear()


def ranges(num_reads: int) -> Targets:
    targets = Targets()
    for sample in range(num_reads):
        targets.add(0, sample * 4, 4)
    return targets


async def until(is_true: Any) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_cancelled_reads_count_until_their_threads_return(
    gate: type[GateFileSystem], storage_opener: StorageOpener
) -> None:
    async def whole() -> None:
        location = parse_location("gate_1+x://me@host/0.bin")
        storage = await storage_opener.open(location, {}, "*.bin")
        (endpoint,) = storage_opener.endpoints.values()
        assert (endpoint.name, endpoint.limit.limit) == ("gate_1+x://***@host", MAX_READS)
        reading = asyncio.create_task(storage.read(ranges(100).reads()))
        await until(lambda: endpoint.queue.num_taken == MAX_READS)
        assert endpoint.queue.num_waiting == 100 - MAX_READS
        reading.cancel()
        await asyncio.wait([reading])
        assert endpoint.queue.num_taken == MAX_READS
        gate.gate.set()
        await until(lambda: endpoint.queue.num_taken == 0)
        await storage.read(ranges(100).reads())
        assert endpoint.queue.num_taken == 0
        assert len(gate.made) <= MAX_READS

    run(whole())


def test_reads_leave_nothing_for_the_collector(gate: type[GateFileSystem], opener: Any) -> None:
    gate.gate.set()

    def num_futures() -> int:
        return sum(isinstance(each, Future) for each in gc.get_objects())

    async def whole() -> None:
        storage = await opener("gate_1+x://host/0.bin", {})
        before = num_futures()
        gc.disable()
        try:
            await storage.read(ranges(100).reads())
            await until(lambda: num_futures() < before + 20)
        finally:
            gc.enable()

    run(whole())


def test_a_driver_that_hangs_delays_no_other(gate: type[GateFileSystem], opener: Any) -> None:
    place = MemoryPlace()
    place.put("0.bin", b"12345")

    async def whole() -> None:
        hanging = await opener("gate_1+x://host/0.bin", {})
        reading = asyncio.create_task(hanging.read(ranges(200).reads()))
        await asyncio.sleep(0)
        storage = await opener(place.root, {})
        targets = Targets().add(0, 1, 3)
        await storage.read(targets.reads())
        targets.check([b"12345"])
        assert not reading.done()
        reading.cancel()
        await asyncio.wait([reading])

    run(whole())


def test_a_driver_whose_server_closed_the_connection_is_replaced_at_once(
    gate: type[GateFileSystem], opener: Any, metrics: Metrics
) -> None:
    gate.gate.set()
    gate.uses = 1

    async def whole() -> None:
        storage = await opener("gate_1+x://host/0.bin", {})
        for _ in range(3):
            await storage.read(ranges(20).reads())

    run(whole())
    assert {labels.outcome for labels in metrics.storage} == {"ok"}


def test_drivers_that_are_idle_for_long_are_closed(
    gate: type[GateFileSystem], opener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec_drivers, "_IDLE_S", 0.05)
    monkeypatch.setitem(fsspec_drivers._CONNECTIONS, __name__, ("session",))
    gate.gate.set()

    async def whole() -> None:
        storage = await opener("gate_1+x://host/0.bin", {})
        await storage.read(ranges(20).reads())
        await until(lambda: gate.made and all(each.session.is_closed for each in gate.made))
        await storage.read(ranges(20).reads())

    run(whole())


def test_a_url_says_host_and_user(gate: type[GateFileSystem], opener: Any) -> None:
    run(opener("gate_1+x://me@host/{0,1}.bin", {"user": "you", "key": 1}))
    assert gate.arguments == {"user": "me", "host": "host", "key": 1}


def test_an_asynchronous_driver_whose_urls_name_a_server(
    monkeypatch: pytest.MonkeyPatch, opener: Any
) -> None:
    where = f"{__name__}.{HostedFileSystem.__name__}"
    monkeypatch.setitem(known_implementations, "hosted", {"class": where})

    async def whole() -> None:
        storage = await opener("hosted://one/{0,1}.bin", {"user": "me"})
        assert [storage.path(0), storage.path(1)] == ["hosted://one/0.bin", "hosted://one/1.bin"]
        targets = Targets().add(0, 0, 9).add(1, 2, 7)
        await storage.read(targets.reads())
        targets.check([b"one/0.bin", b"one/1.bin"])

    run(whole())


def test_the_shards_of_one_dataset_lie_on_one_server(
    gate: type[GateFileSystem], opener: Any
) -> None:
    with pytest.raises(
        InvalidRequest, match=r"are on several servers \(got gate_1\+x://b/0\.bin too"
    ):
        run(first_of(opener("gate_1+x://{a,b}/0.bin", {})))


@pytest.mark.skipif(bool(why_absent("sftp")), reason=why_absent("sftp"))
def test_a_server_that_starts_again(tmp_path: Path, opener: Any) -> None:
    with file_server("sftp", tmp_path) as server:
        port = int(server.root.rpartition(":")[2].partition("/")[0])
        place = ServedPlace(server)
        place.put("0.bin", noise(1, 1000))

        async def whole() -> None:
            storage = await opener(place.root, place.settings)
            await storage.read(ranges(20).reads())
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(60)
            with file_server("sftp", tmp_path, port):
                targets = ranges(20)
                await storage.read(targets.reads())
                targets.check([noise(1, 1000)])

        run(whole())


@pytest.mark.skipif(bool(why_absent("ftp")), reason=why_absent("ftp"))
def test_a_server_that_is_gone(tmp_path: Path, opener: Any) -> None:
    with file_server("ftp", tmp_path) as server:
        root, settings = server.root, server.settings
    with pytest.raises(StorageUnavailable, match=r"ftp://127\.0\.0\.1:.*: ConnectionRefused"):
        run(first_of(opener(root, settings)))
