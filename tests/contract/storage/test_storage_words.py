"""What a server says reaches nobody's terminal as commands to it, and credentials stay unsaid."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import known_implementations
from gyre_daemon.errors import GyreError, InvalidRequest
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.contract.places import Targets, first_of, openers, run

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m"
SAID = "what was signed with hunter2"
BODIES = {
    "markup": f"<Error><Code>InvalidThing</Code><Message>{EVIL}{SAID}</Message></Error>",
    "text": f"{EVIL}\r{EVIL}\n{SAID}",
}
TERMS = EndpointOptions(max_requests=8, deadline_s=60.0)


class _Handler(BaseHTTPRequestHandler):
    """Refuses listings and reads alike; a HEAD finds an object where `has_object`."""

    protocol_version = "HTTP/1.1"
    body = reason = ""
    has_object = False

    def do_HEAD(self) -> None:
        self._answer(200 if self.has_object else 400, b"")

    def do_GET(self) -> None:
        self._answer(400, self.body.encode())

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status, self.reason)
        length = len(body) if self.command == "GET" else 1000
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"a"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 12:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def storage_opener() -> Iterator[StorageOpener]:
    with ThreadPoolExecutor(2) as executor:
        openers.append(StorageOpener(FairExecutor(executor, 2), TERMS, Metrics()))
        yield openers[-1]
        openers.clear()


def refusal(opener: StorageOpener, uri: str, settings: dict[str, Any]) -> str:
    """What the error of a listing, or else of a read, says."""

    async def scene() -> None:
        storage = await first_of(opener.open(parse_location(uri), settings, "*.bin"))
        await first_of(storage.read(Targets().add(0, 0, 100).reads()))

    with pytest.raises(GyreError) as refused:
        run(scene())
    return str(refused.value)


@pytest.mark.parametrize("has_object", [True, False], ids=["read", "listing"])
@pytest.mark.parametrize("kind", ["web", "s3", "s3 without signatures"])
@pytest.mark.parametrize("body", BODIES)
def test_words_of_a_server(
    storage_opener: StorageOpener,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    body: str,
    has_object: bool,
) -> None:
    monkeypatch.setattr(_Handler, "body", BODIES[body])
    monkeypatch.setattr(_Handler, "has_object", has_object)
    # The general client takes no answer with control characters in its first line.
    monkeypatch.setattr(_Handler, "reason", f"{EVIL if kind == 'web' else ''} {SAID}")
    if kind == "web":
        said = refusal(storage_opener, f"{url}/a.bin", {})
    else:
        settings = {"endpoint": url, "region": "x", "access_key_id": "k", "secret_access_key": "s"}
        if "without" in kind:
            settings = {"endpoint": url, "region": "x", "skip_signature": "true"}
        uri = "s3://bucket/a.bin" if has_object else "s3://bucket/*.bin"
        said = refusal(storage_opener, uri, settings)
    assert said.isprintable(), said
    assert SAID not in said
    assert "400" in said
    if body == "markup" and (has_object or kind != "web"):
        assert "(InvalidThing)" in said


class _Bare(AsyncFileSystem):  # type: ignore[misc]
    """A driver that implements nothing but the look at a file."""

    protocol = "bare"
    async_impl = True

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        kind = "file" if path.endswith(".bin") else "directory"
        return {"name": path, "type": kind, "size": 1000}


def test_a_driver_that_lacks_a_method_is_named(
    storage_opener: StorageOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(known_implementations, "bare", {"class": f"{__name__}._Bare"})

    async def open_only(uri: str) -> None:
        await first_of(storage_opener.open(parse_location(uri), {}, "*.bin"))

    for uri in ("bare://host/folder", "bare://host/*.bin"):
        with pytest.raises(InvalidRequest, match=r"bare:// lists nothing\. Name every"):
            run(open_only(uri))
    said = refusal(storage_opener, "bare://host/a.bin", {})
    assert said == "shard a.bin is refused: the storage's driver cannot read parts of files"
