"""Datasets whose objects can be read over plain HTTP: those of web servers, and those of object storages without TLS.

The storage's own driver signs a URL for each object, with credentials wherever they come from, and what is read then are ranges
of that URL. So no line here knows how a request is signed.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from obstore.exceptions import BaseError

from gyre_daemon.storage.answer import failure
from gyre_daemon.storage.source import Done, Sent, Source
from gyre_daemon.storage.sources.connections import Connections
from gyre_daemon.storage.sources.objects import ObjectSource
from gyre_daemon.storage.sources.plain import Get, PlainHttp

_SIGN_AGAIN_S = 1800.0  # half of what a signature lasts
_MAX_HEADS = 1 << 16  # objects whose URLs are kept
_UNQUOTED = "/~-._!$&'()*+,;=:@"
_PLAIN_SETTINGS = frozenset(
    ("endpoint", "endpoint_url", "region", "default_region", "access_key_id", "secret_access_key", "token", "session_token",
     "virtual_hosted_style_request", "metadata_endpoint", "imdsv1_fallback")
)  # fmt: skip

Sign = Callable[[str], Awaitable[str]]


async def plain_source(
    general: ObjectSource,
    scheme: str,
    settings: Mapping[str, Any],
    path: str,
    connections: Connections,
    num_connections: int,
) -> Source:
    """The cheapest way to read a dataset: plain HTTP where its objects can be had so, otherwise the general client.

    Args:
        general: that client.
        scheme: of the dataset.
        settings: of its driver. One that a signed URL may not express leaves all to the general client.
        path: of one of its objects.
        connections: how many there may be.
        num_connections: to make at once, so that a first batch need not wait for them.
    """
    sign: Sign
    if scheme == "http":
        sign = _web_url
    elif scheme in ("s3", "s3a") and {key.lower().removeprefix("aws_") for key in settings} <= _PLAIN_SETTINGS:
        sign = general.signed_url
    else:
        return general
    try:
        url = urlsplit(await sign(path))
    except BaseError:  # nothing to sign with
        return general
    is_proxied = "http" in getproxies() and not proxy_bypass(url.hostname or "")
    if url.scheme != "http" or is_proxied:
        return general
    source = PlainSource(general, sign, connections)
    source.greet(url, num_connections)
    return source


class PlainSource:
    """Reads objects over plain HTTP; see `Source`. A server that redirects is left to the general client from then on."""

    def __init__(self, general: ObjectSource, sign: Sign, connections: Connections) -> None:
        """Read what `general` could read.

        Args:
            general: the storage's own client.
            sign: gives an object's URL, ready to be asked for.
            connections: how many there may be.
        """
        self._general = general
        self._sign = sign
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._heads: dict[str, _Head] = {}
        self._hosts: dict[str, PlainHttp] = {}
        self._is_redirected = False

    def greet(self, url: SplitResult, num_connections: int) -> None:
        """Make the first connections to a host."""
        self._host(url).connect(min(num_connections, self._connections.num_left))

    def get(self, path: str, start: int, stop: int, done: Done) -> Sent:
        """See `Source.get`."""
        if self._is_redirected:
            return self._general.get(path, start, stop, done)
        head = self._heads.get(path)
        if head is None or head.until < self._loop.time():
            if len(self._heads) >= _MAX_HEADS:
                del self._heads[next(iter(self._heads))]
            head = self._heads[path] = _Head(self._loop.time() + _SIGN_AGAIN_S)
            head.task = self._loop.create_task(self._prepare(head, path))
        get = Get(b"%d-%d\r\n\r\n" % (start, stop - 1), stop - start, done)
        if head.host:
            head.send(get)
        else:
            head.waiting.append(get)
        return get

    def refresh(self, status: int) -> None:
        """See `Source.refresh`."""
        self._is_redirected |= 300 <= status < 400
        self._general.refresh(status)
        self._heads.clear()

    def close(self) -> None:
        """See `Source.close`."""
        _hang_up(self._heads.values(), self._hosts.values())

    def __del__(self) -> None:
        """Nobody reads any more, in whatever thread that is noticed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_hang_up, [*self._heads.values()], [*self._hosts.values()])

    async def _prepare(self, head: "_Head", path: str) -> None:
        try:
            url = urlsplit(await self._sign(path))
        except Exception as error:
            self._heads.pop(path, None)
            for get in head.waiting:
                if get.done:
                    get.done(failure(error))
            return
        target = f"{url.path or '/'}?{url.query}" if url.query else url.path
        fields = f"Host: {url.netloc}\r\nUser-Agent: gyre\r\nAccept: */*\r\nAccept-Encoding: identity\r\nRange: bytes="
        head.text = f"GET {target} HTTP/1.1\r\n{fields}".encode("latin-1")
        head.host = self._host(url)
        for get in head.waiting:
            if get.done:
                head.send(get)
        head.waiting.clear()
        head.task = None

    def _host(self, url: SplitResult) -> PlainHttp:
        if url.netloc not in self._hosts:
            self._hosts[url.netloc] = PlainHttp(url, self._connections)
        return self._hosts[url.netloc]


class _Head:
    """How requests for one object begin."""

    __slots__ = ("host", "task", "text", "until", "waiting")

    def __init__(self, until: float) -> None:
        self.until = until
        self.text = b""
        self.host: PlainHttp | None = None  # once it is known
        self.waiting: list[Get] = []
        self.task: asyncio.Task[None] | None = None

    def send(self, get: Get) -> None:
        get.text = self.text + get.text
        assert self.host
        self.host.send(get)


def _hang_up(heads: Iterable[_Head], hosts: Iterable[PlainHttp]) -> None:
    for head in heads:
        if head.task:
            head.task.cancel()
    for host in hosts:
        host.close()


async def _web_url(path: str) -> str:
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{quote(rest, safe=_UNQUOTED)}"
