"""A server that fails on demand.

What is tried again, what is given up, how soon, and what the error says.
"""

import asyncio
import socket
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gyre_daemon.errors import (
    ConfigError,
    CorruptSample,
    GyreError,
    NotAllowed,
    ShardMissing,
    StorageUnavailable,
)
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.reads import Storage
from gyre_daemon.storage.sources import remote_opener
from gyre_daemon.storage.sources.object_source import open_objects
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import Targets, first_of, noise, openers, run
from tests.contract.storage.objects import ObjectServer

DATA = noise(0, 10_000)
TERMS = EndpointOptions(max_requests=4, deadline_s=1.5)
SECRET = "hunter2-do-not-tell"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def storage_opener(metrics: Metrics) -> Iterator[StorageOpener]:
    with ThreadPoolExecutor(2) as executor:
        openers.append(StorageOpener(FairExecutor(executor, 2), TERMS, metrics))
        yield openers[-1]
        openers.clear()


@pytest.fixture
def one(storage_opener: StorageOpener, object_server: ObjectServer) -> Coroutine[Any, Any, Storage]:
    """The URI of a dataset of one shard."""
    object_server.objects["/data/0.bin"] = DATA
    return storage_opener.open(parse_location(f"{object_server.url}/data/0.bin"), {}, "*.bin")


def s3(
    storage_opener: StorageOpener, settings: Mapping[str, Any], uri: str = "s3://bucket/x.bin"
) -> Storage:
    given = {
        "region": "us-east-1",
        "access_key_id": "someone",
        "secret_access_key": SECRET,
        **settings,
    }
    return run(first_of(storage_opener.open(parse_location(uri), given, "*.bin")))


def closed_port() -> int:
    """A port without a server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_passing_failure_is_not_noticed(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer, status: int
) -> None:
    targets = Targets().add(0, 100, 50)

    async def read() -> None:
        storage = await one
        object_server.faults.extend([status, status])
        await storage.read(targets.reads())

    run(read())
    targets.check([DATA])


@pytest.mark.parametrize(
    ("status", "error", "sentence"),
    [
        (401, NotAllowed, r"refused access to 0\.bin; check the daemon's credentials"),
        (403, NotAllowed, r"refused access to 0\.bin"),
        (404, ShardMissing, r"0\.bin does not exist"),
        (412, CorruptSample, r"0\.bin has changed"),
        (416, CorruptSample, r"0\.bin has changed"),
        (400, StorageUnavailable, r"the storage failed for 0\.bin: HTTP status 400 no"),
        (
            503,
            StorageUnavailable,
            r"0\.bin within 1\.5 s \(\d+ requests were sent; the last failure: HTTP status 503 no",
        ),
    ],
)
def test_a_lasting_failure_says_what_it_is(
    one: Coroutine[Any, Any, Storage],
    object_server: ObjectServer,
    metrics: Metrics,
    status: int,
    error: type[GyreError],
    sentence: str,
) -> None:
    async def read() -> None:
        storage = await one
        object_server.faults.extend([status] * 100)
        await first_of(storage.read(Targets().add(0, 100, 50).reads()))

    began = time.monotonic()
    with pytest.raises(error, match=sentence) as caught:
        run(read())
    assert time.monotonic() - began < 60
    assert caught.value.facts["shard"] == "0.bin"
    counts = {
        (labels.kind, labels.outcome): count.num_requests
        for labels, count in metrics.storage.items()
    }
    num_reads = 100 - len(object_server.faults)
    if status == 503:
        assert counts == {("list", "ok"): 1, ("read", "refused"): num_reads}
        assert num_reads > 2
    elif status in (401, 403):  # once more, with credentials that were read again
        assert counts == {("list", "ok"): 1, ("read", "retried"): 1, ("read", "error"): 1}
    else:
        assert counts == {("list", "ok"): 1, ("read", "error"): 1}
        assert num_reads == 1, "what cannot get better is not tried again"


def test_a_body_that_breaks_off_is_read_again(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    targets = Targets().add(0, 100, 5000)

    async def read() -> None:
        storage = await one
        object_server.faults.append("half a body")
        await storage.read(targets.reads())

    run(read())
    targets.check([DATA])


def test_a_body_that_always_breaks_off(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    async def read() -> None:
        storage = await one
        object_server.faults.extend(["half a body"] * 20)
        await first_of(storage.read(Targets().add(0, 100, 5000).reads()))

    with pytest.raises(StorageUnavailable, match=r"0\.bin"):
        run(read())


def test_a_server_without_ranges_is_refused(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    async def read() -> None:
        storage = await one
        object_server.faults.extend(["no ranges"] * 20)
        await first_of(storage.read(Targets().add(0, 100, 50).reads()))

    with pytest.raises(StorageUnavailable, match=r"0\.bin"):
        run(read())


def test_a_redirect_that_does_not_say_where_to_is_asked_again(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    targets = Targets().add(0, 100, 5000)

    async def read() -> None:
        storage = await one
        object_server.faults.append(302)
        await storage.read(targets.reads())
        assert len(object_server.requests) == 3  # the listing, the redirection, and once more
        await storage.read(targets.reads())
        assert len(object_server.requests) == 4

    run(read())
    targets.check([DATA])


def test_silence_ends_at_the_deadline(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    async def read() -> None:
        storage = await one
        object_server.faults.extend(["silence"] * 20)
        await first_of(storage.read(Targets().add(0, 100, 50).reads()))

    began = time.monotonic()
    sentence = (
        r"did not answer for 0\.bin within 1\.5 s "
        r"\(3 requests were sent; the last failure: no answer within 0\.5 s"
    )
    with pytest.raises(StorageUnavailable, match=sentence):
        run(read())
    assert time.monotonic() - began < 60


def test_a_listing_without_an_answer(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_opener, "LISTING_DEADLINE_S", 0.5)
    object_server.faults.append("silence")
    began = time.monotonic()
    with pytest.raises(
        StorageUnavailable, match=r"did not answer for http://\S+/data/0\.bin within 0\.5 s"
    ):
        run(first_of(one))
    assert time.monotonic() - began < 60


def test_one_failed_read_does_not_outlive_its_batch(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    """The other reads are dropped with it.

    Nothing writes into a slot that is somebody else's by now.
    """
    targets = Targets()
    for sample in range(12):
        targets.add(0, sample * 100, 10)

    async def read() -> int:
        storage = await one
        object_server.delay_s = 0.05
        object_server.faults.extend([404])
        with pytest.raises(ShardMissing):
            await first_of(storage.read(targets.reads()))
        await asyncio.sleep(0.3)
        return len(object_server.requests)

    assert run(read()) <= 1 + 4 * 2, "at most those that were under way"


def test_no_more_requests_at_once_than_allowed(
    one: Coroutine[Any, Any, Storage], object_server: ObjectServer
) -> None:
    targets = Targets()
    for sample in range(30):
        targets.add(0, sample * 300, 10)

    async def read() -> None:
        storage = await one
        object_server.delay_s = 0.02
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(storage.read(targets.reads()))

    run(read())
    assert object_server.max_open == 4
    targets.check([DATA])


def test_a_long_list_is_looked_up_within_the_same_bounds(
    storage_opener: StorageOpener, object_server: ObjectServer
) -> None:
    for index in range(40):
        object_server.objects[f"/{index}.bin"] = b"1"
    object_server.delay_s = 0.01
    storage = run(
        storage_opener.open(parse_location(f"{object_server.url}/{{0..39}}.bin"), {}, "*.bin")
    )
    assert [shard.name for shard in storage.shards] == [f"{index}.bin" for index in range(40)]
    assert object_server.max_open == 4
    assert len(object_server.requests) == 40


@pytest.mark.parametrize("uri", ["s3://bucket/x.bin", "s3://bucket/*.bin"])
def test_an_endpoint_that_nobody_serves(storage_opener: StorageOpener, uri: str) -> None:
    began = time.monotonic()
    with pytest.raises(StorageUnavailable, match=r"the storage failed for s3://bucket/") as caught:
        s3(storage_opener, {"endpoint": f"http://127.0.0.1:{closed_port()}"}, uri)
    assert time.monotonic() - began < 60
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://bucket/x.bin", "s3://bucket/*.bin"])
def test_credentials_that_are_refused(
    storage_opener: StorageOpener, object_server: ObjectServer, uri: str
) -> None:
    object_server.faults.extend([403] * 5)
    with pytest.raises(NotAllowed, match="check the daemon's credentials") as caught:
        s3(
            storage_opener,
            {"endpoint": object_server.url, "virtual_hosted_style_request": "false"},
            uri,
        )
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"endpont": "http://127.0.0.1:1"}, "'endpont' is not valid"),  # codespell:ignore
        ({"endpoint": "not a url"}, "must be a URL such as"),
        ({"endpoint": "ftp://127.0.0.1"}, "must be a URL such as"),
        ({"endpoint": "http://"}, "must be a URL such as"),
        ({"endpoint": "http://127.0.0.1:99999"}, "must be a URL such as"),
        ({"endpoint": "http://a b/"}, "must be a URL such as"),
        ({"endpoint": 5}, "must be a URL such as"),
        ({"region": 5}, "cannot be used"),
        ({"access_key_id": {"a": SECRET}}, "cannot be used"),
    ],
)
def test_settings_that_make_no_sense(
    storage_opener: StorageOpener, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        s3(storage_opener, settings)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "settings"),
    [
        ("gs://bucket/x.bin", {}),
        ("gcs://bucket/x.bin", {}),
        ("az://container/x.bin", {"account_name": "someone"}),
        ("abfs://container@someone.dfs.core.windows.net/x.bin", {}),
        ("s3a://bucket/x.bin", {"skip_signature": True}),
        ("https://127.0.0.1/x.bin", {}),
    ],
)
def test_every_object_storage_can_be_set_up(uri: str, settings: dict[str, Any]) -> None:
    """Without a connection: no such service runs here."""
    location = parse_location(uri)
    assert open_objects(location.scheme, settings, location.paths[0])


def test_a_cloud_that_lacks_a_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"az:// dataset cannot be used: .*Account must be specified$"
    ):
        open_objects("az", {}, "az://container/x.bin")


@pytest.mark.parametrize(
    ("uri", "settings", "error", "sentence"),
    [
        ("webhdfs:///0.bin", {"nonsense": 1}, ConfigError, "cannot be used"),
        ("smb://127.0.0.1/0.bin", {}, ConfigError, "no driver for smb://"),
    ],
)
def test_other_drivers(
    storage_opener: StorageOpener,
    uri: str,
    settings: dict[str, Any],
    error: type[GyreError],
    sentence: str,
) -> None:
    with pytest.raises(error, match=sentence):
        run(first_of(storage_opener.open(parse_location(uri), settings, "*.bin")))


def test_a_driver_that_connects_at_once_does_not_stop_the_loop(
    storage_opener: StorageOpener,
) -> None:
    """Nobody answers, so its constructor waits; everybody else goes on meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        settings = {"host": host, "port": port, "timeout": 1}

        async def open_and_count() -> int:
            opening = asyncio.create_task(
                first_of(
                    storage_opener.open(parse_location("ftp://127.0.0.1/0.bin"), settings, "*.bin")
                )
            )
            num_turns = 0
            while not opening.done():
                num_turns += 1
                await asyncio.sleep(0.02)
            with pytest.raises(StorageUnavailable):
                await opening
            return num_turns

        assert run(open_and_count()) > 10
