"""Objects over plain HTTP: each URL is signed once, and the number of kept URLs is bounded."""

import asyncio
from typing import cast

import pytest
from gyre_daemon.storage.response import Response, Source
from gyre_daemon.storage.sources import http_source
from gyre_daemon.storage.sources.http_source import PlainSource, take_http_options
from gyre_daemon.storage.sources.plain_http import ConnectionBudget

from tests.contract.places import noise, run
from tests.contract.storage.objects import ObjectServer

DATA = noise(5, 1000)


class Signer:
    """Signs slowly, and fails on demand."""

    def __init__(self, url: str) -> None:
        self.url, self.signed, self.failures = url, list[str](), 0

    async def __call__(self, path: str) -> str:
        self.signed.append(path)
        await asyncio.sleep(0.01)
        if self.failures:
            self.failures -= 1
            raise PermissionError("no credentials")
        return f"{self.url}/{path}"


class General:
    def refresh(self, status: int) -> None:
        """Nothing to forget."""


async def ask(source: PlainSource, *paths: str) -> list[Response]:
    """Send all requests at once."""
    loop = asyncio.get_running_loop()
    answers = [loop.create_future() for _ in paths]
    for path, answer in zip(paths, answers, strict=True):
        source.get(path, 10, 20, answer.set_result)
    return [await answer for answer in answers]


def source_of(signer: Signer) -> PlainSource:
    return PlainSource(
        cast("Source", General()), signer, ConnectionBudget(1000), take_http_options({})[1]
    )


def test_many_requests_wait_for_one_signature(object_server: ObjectServer) -> None:
    object_server.objects |= {"/a": DATA, "/b": DATA}

    async def scene() -> None:
        signer = Signer(object_server.url)
        source = source_of(signer)
        answers = await ask(source, "a", "a", "b", "a")
        answers += await ask(source, "b", "a")
        assert [answer.data for answer in answers] == [DATA[10:20]] * 6
        assert sorted(signer.signed) == ["a", "b"]
        source.refresh(403)
        await ask(source, "a", "a")
        assert sorted(signer.signed) == ["a", "a", "b"]
        source.close()
        await asyncio.sleep(0.01)

    run(scene())


def test_a_failed_signature_fails_waiting_requests_and_no_later_one(
    object_server: ObjectServer,
) -> None:
    object_server.objects["/a"] = DATA

    async def scene() -> None:
        signer = Signer(object_server.url)
        signer.failures = 1
        source = source_of(signer)
        assert [answer.status for answer in await ask(source, "a", "a")] == [403, 403]
        assert [answer.data for answer in await ask(source, "a")] == [DATA[10:20]]
        source.close()
        await asyncio.sleep(0.01)

    run(scene())


def test_a_request_cancelled_before_its_signature_is_not_sent(
    object_server: ObjectServer,
) -> None:
    object_server.objects["/a"] = DATA

    async def scene() -> None:
        source = source_of(Signer(object_server.url))
        source.get("a", 0, 5, lambda answer: pytest.fail("nobody waits")).cancel()
        await ask(source, "a")
        assert len(object_server.requests) == 1
        source.close()
        await asyncio.sleep(0.01)

    run(scene())


def test_the_number_of_signed_urls_is_bounded(
    object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_source, "_MAX_TARGETS", 2)
    object_server.objects |= {f"/{name}": DATA for name in "abc"}

    async def scene() -> None:
        signer = Signer(object_server.url)
        source = source_of(signer)
        for path in ("a", "b", "c", "c", "b", "a"):
            (answer,) = await ask(source, path)
            assert answer.data == DATA[10:20]
        assert signer.signed == ["a", "b", "c", "a"]
        source.close()
        await asyncio.sleep(0.01)

    run(scene())
