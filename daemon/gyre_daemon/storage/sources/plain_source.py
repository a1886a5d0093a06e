"""Datasets whose objects can be read over plain HTTP: web servers, and object storages without TLS.

The storage's own driver signs a URL for each object, with credentials wherever they come from, and
ranges of that URL are read. So nothing here knows how a request is signed.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

from obstore.exceptions import BaseError

from gyre_daemon.storage.response import response_from_error
from gyre_daemon.storage.source import OnResponse, SentRequest, Source
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.object_source import ObjectSource
from gyre_daemon.storage.sources.plain_http import HttpGet, PlainHttp

_SIGN_AGAIN_S = 1800.0  # half of what a signature lasts
_MAX_TARGETS = 1 << 16  # objects whose signed URLs are kept, of some 500 bytes each
_UNQUOTED = "/~-._!$&'()*+,;=:@"
# A setting that a signed URL may not express leaves the dataset to the general client.
_PLAIN_SETTINGS = frozenset(
    ("endpoint", "endpoint_url", "region", "default_region", "access_key_id", "secret_access_key",
     "token", "session_token", "virtual_hosted_style_request", "metadata_endpoint",
     "imdsv1_fallback")
)  # fmt: skip

Sign = Callable[[str], Awaitable[str]]


async def plain_source(
    general: ObjectSource,
    scheme: str,
    settings: Mapping[str, Any],
    path: str,
    budget: ConnectionBudget,
    num_connections: int,
) -> Source:
    """The cheapest source for a dataset: plain HTTP if possible, otherwise the general client.

    Args:
        general: that client.
        scheme: of the dataset.
        settings: of its driver.
        path: of one of its objects.
        budget: of connections.
        num_connections: to open at once, so that a first batch need not wait for them.
    """
    sign: Sign
    if scheme == "http":
        sign = _web_url
    elif (
        scheme in ("s3", "s3a")
        and {key.lower().removeprefix("aws_") for key in settings} <= _PLAIN_SETTINGS
    ):
        sign = general.signed_url
    else:
        return general
    try:
        url = urlsplit(await sign(path))
    except BaseError:  # there are no credentials to sign with
        return general
    is_proxied = "http" in getproxies() and not proxy_bypass(url.hostname or "")
    if url.scheme != "http" or is_proxied:
        return general
    source = PlainSource(general, sign, budget)
    source.connect(url, num_connections)
    return source


class PlainSource:
    """Reads objects over plain HTTP; see `Source`.

    After a redirect, all further requests go to the general client.
    """

    def __init__(self, general: ObjectSource, sign: Sign, budget: ConnectionBudget) -> None:
        """Read what `general` can read.

        Args:
            general: the storage's own client.
            sign: returns an object's signed URL.
            budget: of connections.
        """
        self._general = general
        self._sign = sign
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._targets: dict[str, _SignedTarget] = {}  # by path
        self._hosts: dict[str, PlainHttp] = {}
        self._is_redirected = False

    def connect(self, url: SplitResult, num_connections: int) -> None:
        """Open the first connections to a host."""
        self._host(url).connect(min(num_connections, self._budget.num_left))

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        if self._is_redirected:
            return self._general.get(path, start, stop, on_response)
        target = self._targets.get(path)
        if target is None or target.until < self._loop.time():
            if len(self._targets) >= _MAX_TARGETS:
                del self._targets[next(iter(self._targets))]
            target = self._targets[path] = _SignedTarget(self._loop.time() + _SIGN_AGAIN_S)
            target.task = self._loop.create_task(self._prepare(target, path))
        get = HttpGet(b"%d-%d\r\n\r\n" % (start, stop - 1), stop - start, on_response)
        if target.host:
            target.send(get)
        else:
            target.waiting.append(get)
        return get

    def refresh(self, status: int) -> None:
        """See `Source.refresh`."""
        self._is_redirected |= 300 <= status < 400
        self._general.refresh(status)
        self._targets.clear()

    def close(self) -> None:
        """See `Source.close`."""
        _close_all(self._targets.values(), self._hosts.values())

    def __del__(self) -> None:
        """Close connections when no dataset reads any more, in whatever thread that is noticed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            targets, hosts = [*self._targets.values()], [*self._hosts.values()]
            self._loop.call_soon_threadsafe(_close_all, targets, hosts)

    async def _prepare(self, target: "_SignedTarget", path: str) -> None:
        try:
            url = urlsplit(await self._sign(path))
        except Exception as error:
            self._targets.pop(path, None)
            for get in target.waiting:
                if get.on_response:
                    get.on_response(response_from_error(error))
            return
        where = f"{url.path or '/'}?{url.query}" if url.query else url.path
        fields = "User-Agent: gyre\r\nAccept: */*\r\nAccept-Encoding: identity\r\nRange: bytes="
        target.text = f"GET {where} HTTP/1.1\r\nHost: {url.netloc}\r\n{fields}".encode("latin-1")
        target.host = self._host(url)
        for get in target.waiting:
            if get.on_response:
                target.send(get)
        target.waiting.clear()
        target.task = None

    def _host(self, url: SplitResult) -> PlainHttp:
        if url.netloc not in self._hosts:
            self._hosts[url.netloc] = PlainHttp(url, self._budget)
        return self._hosts[url.netloc]


@dataclass(slots=True, eq=False, repr=False)
class _SignedTarget:
    """The beginning of each request for one object, up to its range; valid until `until`."""

    until: float
    text: bytes = b""
    host: PlainHttp | None = None  # once it is signed
    waiting: list[HttpGet] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def send(self, get: HttpGet) -> None:
        get.text = self.text + get.text
        assert self.host
        self.host.send(get)


def _close_all(targets: Iterable[_SignedTarget], hosts: Iterable[PlainHttp]) -> None:
    for target in targets:
        if target.task:
            target.task.cancel()
    for host in hosts:
        host.close()


async def _web_url(path: str) -> str:
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{quote(rest, safe=_UNQUOTED)}"
