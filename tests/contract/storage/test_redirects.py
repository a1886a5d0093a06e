"""Web servers that send the daemon elsewhere: only to themselves, or where the operator said so."""

import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from gyre_daemon.errors import ConfigError, GyreError, InvalidRequest, NotAllowed
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.location import parse_location
from gyre_daemon.storage.sources.opener import StorageOpener

from tests.certificates import Authority
from tests.contract.places import Targets, first_of, noise, openers, run

DATA = noise(1, 10_000)
TERMS = EndpointOptions(max_requests=8, deadline_s=60.0)


@pytest.fixture
def storage_opener() -> Iterator[StorageOpener]:
    with ThreadPoolExecutor(2) as executor:
        openers.append(StorageOpener(FairExecutor(executor, 2), TERMS, Metrics()))
        yield openers[-1]
        openers.clear()


class Server:
    """A web server whose paths are objects, or redirects to URLs."""

    def __init__(self, host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.redirects: dict[str, tuple[int, str]] = {}
        self.requests: list[tuple[str, str]] = []
        self._server = (_Ipv6Threads if ":" in host else _Threads)((host, 0), _Handler)
        self._server.owner = self
        if context:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.host = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.url = f"{'https' if context else 'http'}://{self.host}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Threads(ThreadingHTTPServer):
    owner: Server
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Silent: clients hang up."""


class _Ipv6Threads(_Threads):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Threads

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _answer(self) -> None:
        owner, path = self.server.owner, unquote(self.path.partition("?")[0])
        owner.requests.append((self.command, path))
        data = owner.objects.get(path, b"")
        if path in owner.redirects:
            status, location = owner.redirects[path]
            self._send(status, b"", {"Location": location})
        elif path not in owner.objects:
            self._send(404, b"", {})
        elif wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, last = map(int, wanted.groups())
            total = {"Content-Range": f"bytes {begin}-{last}/{len(data)}"}
            self._send(206, data[begin : last + 1], total)
        else:
            self._send(200, data, {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


MakeServer = Callable[..., Server]


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    servers: list[Server] = []

    def make(*arguments: Any) -> Server:
        servers.append(Server(*arguments))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def server(make_server: MakeServer) -> Server:
    return make_server()


@pytest.fixture
def other(make_server: MakeServer) -> Server:
    other = make_server()
    other.objects["/secret.bin"] = DATA
    return other


def read(opener: StorageOpener, uri: str, settings: dict[str, Any] | None = None) -> list[str]:
    """List a dataset, read from all of its shards, and check their bytes; gives their names."""

    async def scene() -> list[str]:
        storage = await first_of(opener.open(parse_location(uri), settings or {}, "*.bin"))
        for _ in range(2):
            targets = Targets()
            for shard in range(len(storage.shards)):
                targets.add(shard, 100, 500).add(shard, 5000, 5000)
            await first_of(storage.read(targets.reads()))
            targets.check([DATA] * len(storage.shards))
        return [shard.name for shard in storage.shards]

    return run(scene())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("relative", [True, False])
def test_a_redirect_to_the_same_server_is_followed(
    storage_opener: StorageOpener, server: Server, status: int, relative: bool
) -> None:
    server.objects["/real/a.bin"] = DATA
    location = "../real/a.bin?signature=x" if relative else f"{server.url}/real/a.bin"
    server.redirects["/data/a.bin"] = status, location
    assert read(storage_opener, f"{server.url}/data/a.bin") == ["a.bin"]
    assert [path for _, path in server.requests].count("/data/a.bin") == 1, "it is remembered"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_port_is_refused(
    storage_opener: StorageOpener, server: Server, other: Server, status: int
) -> None:
    server.redirects["/a.bin"] = status, f"{other.url}/secret.bin?signature=hunter2"
    with pytest.raises(NotAllowed) as refused:
        read(storage_opener, f"{server.url}/a.bin")
    text = str(refused.value)
    assert f"{server.host} redirects to another host or port, {other.host}" in text
    assert f'redirect_hosts = ["{other.host}"]' in text
    assert "hunter2" not in text
    assert other.requests == [], "nothing was sent there"


def test_a_redirect_of_a_read_is_refused_too(
    storage_opener: StorageOpener, server: Server, other: Server
) -> None:
    """A listing sees the size; later the server changes its mind."""
    server.objects["/a.bin"] = DATA

    async def scene() -> None:
        location = parse_location(f"{server.url}/a.bin")
        storage = await first_of(storage_opener.open(location, {}, "*.bin"))
        server.redirects["/a.bin"] = 302, f"{other.url}/secret.bin"
        await first_of(storage.read(Targets().add(0, 0, 100).reads()))

    with pytest.raises(NotAllowed, match=r"shard a\.bin is refused: .* another host or port"):
        run(scene())
    assert other.requests == []


@pytest.mark.parametrize("as_port", [True, False])
def test_a_listed_host_is_followed(
    storage_opener: StorageOpener, server: Server, other: Server, as_port: bool
) -> None:
    server.redirects["/a.bin"] = 302, f"{other.url}/secret.bin"
    hosts = [other.host if as_port else "*"]
    assert read(storage_opener, f"{server.url}/a.bin", {"redirect_hosts": hosts}) == ["a.bin"]


def test_a_listed_host_means_the_usual_port(
    storage_opener: StorageOpener, server: Server, other: Server
) -> None:
    server.redirects["/a.bin"] = 302, f"{other.url}/secret.bin"
    with pytest.raises(NotAllowed):
        read(storage_opener, f"{server.url}/a.bin", {"redirect_hosts": ["127.0.0.1"]})


def test_loops_and_chains_have_an_end(storage_opener: StorageOpener, server: Server) -> None:
    server.redirects["/a.bin"] = 302, "/b.bin"
    server.redirects["/b.bin"] = 302, "/a.bin"
    with pytest.raises(NotAllowed, match="was redirected 5 times, which is probably a loop"):
        read(storage_opener, f"{server.url}/a.bin")


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://", "http://[::", "//:99999/x"]
)
def test_what_is_no_url_is_refused(
    storage_opener: StorageOpener, server: Server, location: str
) -> None:
    server.redirects["/a.bin"] = 302, location
    with pytest.raises(NotAllowed, match="redirect"):
        read(storage_opener, f"{server.url}/a.bin")


@pytest.mark.parametrize("hosts", ["one", [1], [""], {"a": 1}])
def test_the_list_must_be_a_list_of_hosts(storage_opener: StorageOpener, hosts: Any) -> None:
    with pytest.raises(ConfigError, match="redirect_hosts must be a list of hosts"):
        read(storage_opener, "http://127.0.0.1:1/a.bin", {"redirect_hosts": hosts})


def test_a_web_server_has_no_other_settings(storage_opener: StorageOpener) -> None:
    with pytest.raises(
        ConfigError, match="`token` is unknown; known are redirect_hosts and ca_file"
    ) as refused:
        read(storage_opener, "http://127.0.0.1:1/a.bin", {"token": "hunter2"})
    assert "hunter2" not in str(refused.value)


def test_an_object_storage_may_not_redirect_a_read_either(
    storage_opener: StorageOpener, server: Server, other: Server
) -> None:
    """Its listing is the driver's; ranges over plain HTTP are ours."""
    server.objects["/bucket/a.bin"] = DATA

    async def scene() -> None:
        settings = {"endpoint": server.url, "region": "x", "access_key_id": "k",
                    "secret_access_key": "s", "virtual_hosted_style_request": "false"}  # fmt: skip
        location = parse_location("s3://bucket/a.bin")
        storage = await first_of(storage_opener.open(location, settings, "*.bin"))
        server.redirects["/bucket/a.bin"] = 307, f"{other.url}/secret.bin"
        await first_of(storage.read(Targets().add(0, 0, 100).reads()))

    with pytest.raises(GyreError, match="another host or port"):
        run(scene())
    assert other.requests == []


def test_a_listing_of_obstore_follows_redirects(
    storage_opener: StorageOpener, server: Server, other: Server
) -> None:
    """What is not promised: its client has no setting for it. What comes back is still no listing.

    Where this fails, obstore can refuse them: set that, and promise it in docs/security.md.
    """
    server.redirects["/bucket"] = 307, f"{other.url}/secret.bin"
    settings = {"endpoint": server.url, "region": "x", "skip_signature": "true",
                "virtual_hosted_style_request": "false"}  # fmt: skip
    with pytest.raises(GyreError) as refused:
        read(storage_opener, "s3://bucket/*.bin", settings)
    assert ("GET", "/secret.bin") in other.requests
    assert str(refused.value).isprintable()
    assert DATA[:8].hex() not in str(refused.value)


def test_behind_a_proxy_redirects_cannot_be_refused(
    storage_opener: StorageOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(NotAllowed, match=r'read through a proxy, .* redirect_hosts = \["\*"\]'):
        read(storage_opener, "http://example.org/a.bin")


@pytest.fixture
def ipv6(make_server: MakeServer) -> Server:
    try:
        server = make_server("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server.objects |= {"/data/a.bin": DATA, "/data/b c.bin": DATA}
    return server


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/data/a.bin", ["a.bin"]),
        ("/data/{a,b c}.bin", ["a.bin", "b c.bin"]),
    ],
)
def test_ipv6_hosts(
    storage_opener: StorageOpener, ipv6: Server, path: str, names: list[str]
) -> None:
    assert read(storage_opener, ipv6.url + path) == names


def test_a_redirect_between_ipv6_and_ipv4_is_one_to_another_host(
    storage_opener: StorageOpener, ipv6: Server, other: Server
) -> None:
    ipv6.redirects["/data/a.bin"] = 302, f"{other.url}/secret.bin"
    with pytest.raises(NotAllowed, match=rf"\[::1\]:{ipv6.port} redirects to .*{other.host}"):
        read(storage_opener, f"{ipv6.url}/data/a.bin")


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("http://[::1]:8080/a::b", "chained"),
        ("dir::http://[::1]:8080/a", "chained"),
        ("http://[::1%eth0]/a", "chained"),
        ("/data/[::1]", "chained"),
        ("http://[::1/a.bin", "chained"),
        ("http:///a.bin", "needs a host"),
        ("http://host:99999/a.bin", "port must be 1 to 65535"),
        ("http://host:x/a.bin", "port must be 1 to 65535"),
    ],
)
def test_what_is_no_host(uri: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        parse_location(uri)


@pytest.fixture
def https(make_server: MakeServer, tmp_path: Path) -> Server:
    pair = Authority(tmp_path).sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return make_server("127.0.0.1", context)


def test_https(storage_opener: StorageOpener, https: Server, other: Server, tmp_path: Path) -> None:
    settings = {"ca_file": str(tmp_path / "authority.pem")}
    https.objects["/a.bin"] = DATA
    assert read(storage_opener, f"{https.url}/a.bin", settings) == ["a.bin"]
    https.redirects["/a.bin"] = 302, f"{other.url}/secret.bin"
    with pytest.raises(NotAllowed, match="redirects from https to http"):
        read(storage_opener, f"{https.url}/a.bin", {**settings, "redirect_hosts": ["*"]})


def test_a_certificate_that_is_not_trusted(storage_opener: StorageOpener, https: Server) -> None:
    https.objects["/a.bin"] = DATA
    told = rf"certificate of {https.host} is not trusted \(.*\); .*name a file .* `ca_file`"
    with pytest.raises(NotAllowed, match=told):
        read(storage_opener, f"{https.url}/a.bin")
