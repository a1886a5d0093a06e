"""Objects that are replaced by others of equal size, and what their storages tell about it."""

import datetime
import logging
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import pytest
from fsspec import register_implementation
from fsspec.registry import known_implementations
from gyre_daemon.errors import CorruptSample, NotAllowed
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import Targets, first_of, noise, openers, run, unique
from tests.contract.storage.told_driver import ToldFileSystem
from tests.object_server.process import ObjectServerProcess, object_server
from tests.object_server.script import Script

SIZE = 1000
OLD, NEW = noise(1, SIZE), noise(2, SIZE)
LISTED = ["etag", "modified"]
RFC_850 = "modified as RFC 850"
BLIND = "changes cannot be noticed"

Open = Callable[..., Coroutine[Any, Any, Storage]]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServerProcess]:
    with object_server() as process:
        yield process


@pytest.fixture
def opener() -> Iterator[Open]:
    with ThreadPoolExecutor(3) as executor:

        async def open_storage(uri: str, settings: Any) -> Storage:
            opener = StorageOpener(FairExecutor(executor, 3), EndpointOptions(16, 10.0), Metrics())
            openers.append(opener)
            return await opener.open(parse_location(uri), settings, "*.bin")

        yield open_storage
    openers.clear()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    caplog.set_level(logging.WARNING, "gyre_daemon")
    return lambda: sum(record.getMessage() == BLIND for record in caplog.records)


def place(server: ObjectServerProcess, client: str) -> tuple[str, str, dict[str, str]]:
    """Path on the server, URI, and settings of an object that this client reads."""
    path = f"/replaced-{next(unique)}/data/0.bin"
    s3 = dict(server.storage_settings)
    settings: dict[str, dict[str, str]] = {
        "http": {},
        "s3": s3,
        "obstore": {**s3, "unsigned_payload": "true"},
        "gs": {"base_url": server.url, "skip_signature": "true"},
    }
    scheme = {"obstore": "s3", "http": ""}.get(client, client)
    uri = server.url + path if client == "http" else f"{scheme}:/{path}"
    return path, uri, settings[client]


async def read(storage: Storage) -> bytes:
    targets = Targets().add(0, 100, 500)
    await first_of(storage.read(targets.reads()))
    return targets._memory[0][16:-16].tobytes()


def replaced(
    opener: Open, uri: str, settings: Any, replace: Callable[[], None], num_before: int
) -> tuple[list[bytes], list[bytes]]:
    """What is read before an object is replaced, and after it."""

    async def whole() -> tuple[list[bytes], list[bytes]]:
        storage = await opener(uri, settings)
        before = [await read(storage) for _ in range(num_before)]
        replace()
        return before, [await read(storage) for _ in range(2)]

    return run(whole())


TOLD = [
    ["etag", "modified"],
    ["etag"],
    ["modified"],
    [RFC_850],
    ["weak etag"],
    ["weak etag", "modified"],
    ["version"],
    ["version", "modified"],
]


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    ("client", "tells"),
    [
        *(("http", each) for each in TOLD),
        # The same client as for http, signed; and another one, which refuses some answers.
        *(("s3", each) for each in (LISTED, ["version"])),
        *(("obstore", each) for each in (LISTED, ["weak etag"], ["version"])),
        ("gs", LISTED),
    ],
    ids=str,
)
def test_whatever_answers_tell_is_compared(
    client: str, num_before: int, tells: Any, server: ObjectServerProcess, opener: Open,
    warnings: Callable[[], int],
) -> None:  # fmt: skip
    server.follow(Script(tells=tells))
    path, uri, settings = place(server, client)
    server.put(path, OLD)
    with pytest.raises(CorruptSample, match=r"0\.bin has changed"):
        replaced(opener, uri, settings, lambda: server.put(path, NEW), num_before)
    assert not warnings()


@pytest.mark.parametrize(
    ("lists", "tells", "num_before"),
    [
        (lists, tells, num_before)
        for lists in (["etag", "modified"], ["etag"], ["modified"])
        for tells in ([], ["modified"], ["etag"], ["version"])
        # nothing to compare the first answer with, if the listing does not tell the same
        for num_before in ((0, 2) if not tells or tells[0] in lists else (2,))
    ],
    ids=str,
)
def test_what_only_a_listing_tells_is_compared(
    lists: Any, tells: Any, num_before: int, server: ObjectServerProcess, opener: Open,
    warnings: Callable[[], int],
) -> None:  # fmt: skip
    """The folder is listed, so that no answer has told anything of its objects."""
    server.follow(Script(tells=tells, lists=lists))
    path, uri, settings = place(server, "s3")
    server.put(path, OLD)
    folder = uri.rpartition("/")[0]
    with pytest.raises(CorruptSample, match=r"0\.bin has changed"):
        replaced(opener, folder, settings, lambda: server.put(path, NEW), num_before)
    assert not warnings()


@pytest.mark.parametrize("client", ["http", "s3", "obstore"])
def test_a_storage_that_tells_nothing_is_read_with_one_warning(
    client: str, server: ObjectServerProcess, opener: Open, warnings: Callable[[], int]
) -> None:
    server.follow(Script(tells=[], lists=[]))
    path, uri, settings = place(server, client)
    server.put(path, OLD)
    before, _ = replaced(opener, uri, settings, lambda: None, 2)
    assert before == [OLD[100:600]] * 2
    assert warnings() == 1


@pytest.mark.parametrize(
    ("client", "told"),
    [
        ("http", ("etag", "weak etag")),
        ("http", ("modified", RFC_850)),
        ("s3", ("etag", "weak etag")),
        ("s3", ("modified", RFC_850)),
        ("obstore", ("etag", "weak etag")),
    ],
)
def test_the_same_told_in_another_way_is_no_change(
    client: str, told: Any, server: ObjectServerProcess, opener: Open, warnings: Callable[[], int]
) -> None:
    server.follow(Script(tells=[told[0]]))
    path, uri, settings = place(server, client)
    server.put(path, OLD)

    def other_replica() -> None:
        server.follow(Script(tells=[told[1]]))

    _, after = replaced(opener, uri, settings, other_replica, 1)
    assert after == [OLD[100:600]] * 2
    assert not warnings()


def test_the_same_bytes_put_again_stay_served(server: ObjectServerProcess, opener: Open) -> None:
    server.follow(Script())
    path, uri, settings = place(server, "s3")
    server.put(path, OLD)
    _, after = replaced(opener, uri, settings, lambda: server.put(path, OLD), 1)
    assert after == [OLD[100:600]] * 2


FIXES = {
    "AccessDenied": "grant them reading of objects and listing",
    "SignatureDoesNotMatch": "check `secret_access_key`",
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
}
CLIENTS = ("s3", "obstore", "gs")


@pytest.mark.parametrize(
    ("when", "client", "code"),
    [
        *(("read", client, code) for client in CLIENTS for code in FIXES),
        *(("listed", client, "AccessDenied") for client in CLIENTS),
        *(("listed with its folder", client, "AccessDenied") for client in CLIENTS),
    ],
)
def test_a_refusal_has_the_code_of_the_storage_and_a_fix(
    when: str, client: str, code: str, server: ObjectServerProcess, opener: Open
) -> None:
    server.follow(Script())
    path, uri, settings = place(server, client)
    server.put(path, OLD)

    def refuse() -> None:
        server.follow(Script(accepted_key="other", refusal=code))

    if when != "read":
        refuse()
    folder = uri.rpartition("/")[0] if "folder" in when else uri
    with pytest.raises(NotAllowed, match=rf"refused access to .*\({code}\); .*{FIXES[code]}"):
        replaced(opener, folder, settings, refuse, 0)


@pytest.fixture
def driver() -> Iterator[type[ToldFileSystem]]:
    where = f"{ToldFileSystem.__module__}.{ToldFileSystem.__name__}"
    register_implementation("told", where, clobber=True)
    yield ToldFileSystem
    del known_implementations["told"]
    ToldFileSystem.caches = False


def moment(number: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(10**9 + number, datetime.UTC)


TELLS: dict[str, Callable[[int], object]] = {
    "ETag": lambda number: f'"{number}"',
    "etag": lambda number: f"0x{number:x}",
    "e_tag": lambda number: f'"{number}"',
    "LastModified": moment,
    "last_modified": lambda number: formatdate(moment(number).timestamp(), usegmt=True),
    "mtime": lambda number: 1e9 + number / 1000,
    "updated": lambda number: f"2026-01-01T00:00:00.{number:03}Z",
    "version_id": str,
    "VersionId": str,
    "generation": int,
    "md5": lambda number: number.to_bytes(16),
    "checksum": int,
    "created": moment,
}


@pytest.mark.parametrize(
    ("key", "num_before", "has_cache"),
    [
        *((key, 0, False) for key in TELLS),
        *(("ETag", num_before, has_cache) for num_before, has_cache in ((0, True), (2, False))),
        *((key, 2, True) for key in ("ETag", "mtime", "generation")),
    ],
)
def test_what_a_driver_tells_is_compared(
    key: str, num_before: int, has_cache: bool, driver: type[ToldFileSystem], opener: Open
) -> None:
    driver.tells = staticmethod(lambda number: {key: TELLS[key](number)})
    driver.caches = has_cache
    path = f"told-{next(unique)}/0.bin"
    driver.put(path, OLD)
    with pytest.raises(CorruptSample, match=r"0\.bin has changed"):
        replaced(opener, f"told://{path}", {}, lambda: driver.put(path, NEW), num_before)


def test_a_driver_that_tells_nothing_is_read_with_one_warning(
    driver: type[ToldFileSystem], opener: Open, warnings: Callable[[], int]
) -> None:
    driver.tells = staticmethod(lambda _: {})
    path = f"told-{next(unique)}/0.bin"
    driver.put(path, OLD)
    before, _ = replaced(opener, f"told://{path}", {}, lambda: None, 2)
    assert before == [OLD[100:600]] * 2
    assert warnings() == 1


def test_reads_of_one_object_that_wait_share_a_look(
    driver: type[ToldFileSystem], opener: Open
) -> None:
    driver.tells = staticmethod(lambda number: {"etag": str(number)})
    path = f"told-{next(unique)}/0.bin"
    driver.put(path, OLD)

    async def whole() -> None:
        storage = await opener(f"told://{path}", {})
        before = driver.num_looks
        targets = Targets()
        for sample in range(64):
            targets.add(0, sample * 10, 10)
        await storage.read(targets.reads())
        targets.check([OLD])
        assert driver.num_looks - before < 32

    run(whole())
