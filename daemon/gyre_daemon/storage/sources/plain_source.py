"""Objects that are read by our own HTTP client: web servers', and those of S3.

The storage's own driver signs a URL for each object, with credentials wherever they come from, and
ranges of that URL are read. So nothing here knows how a request is signed.
"""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from gyre_daemon.storage.response import Response, response_from_error
from gyre_daemon.storage.source import OnResponse, SentRequest, Source
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.plain_http import HttpGet, PlainHttp
from gyre_daemon.storage.sources.redirects import MAX_REDIRECTS, Refused

_SIGN_AGAIN_S = 1800.0  # half of a signature's life
_MAX_TARGETS = 1 << 16  # objects whose signed URLs are kept, of some 500 bytes each

Sign = Callable[[str], Awaitable[str]]


class PlainSource:
    """Reads objects over HTTP or HTTPS; see `Source`.

    The first redirect of an object that may be followed holds for all later requests for it, until
    its URL is signed again.
    """

    def __init__(
        self,
        general: Source | None,
        sign: Sign,
        budget: ConnectionBudget,
        options: HttpOptions,
        headers: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Read what `sign` knows URLs for.

        Args:
            general: the client whose credentials sign; None if there is none.
            sign: returns an object's signed URL.
            budget: of connections.
            options: which redirects are followed, and whose certificates are trusted.
            headers: takes a URL and returns further lines of the header of its requests, such as
                credentials; it is asked again for where a redirect leads.
        """
        self._headers = headers
        self._general = general
        self._sign = sign
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._targets: dict[str, _SignedTarget] = {}  # by path
        self._hosts: dict[str, PlainHttp] = {}  # by scheme and network location
        self._options = options

    def connect(self, url: SplitResult, num_connections: int) -> None:
        """Open the first connections to a host."""
        self._host(url).connect(min(num_connections, self._budget.num_left))

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        range_text = b"Range: bytes=%d-%d\r\n\r\n" % (start, stop - 1)
        get = HttpGet(b"", stop - start, on_response, range_text=range_text)
        return self._send(path, get)

    def head(self, path: str, on_response: OnResponse) -> SentRequest:
        """Request the size and the etag of an object; see `Source.get`."""
        return self._send(path, HttpGet(b"", 0, on_response, is_head=True, range_text=b"\r\n"))

    def _send(self, path: str, get: HttpGet) -> SentRequest:
        target = self._targets.get(path)
        if target is None or target.until < self._loop.time():
            if len(self._targets) >= _MAX_TARGETS:
                del self._targets[next(iter(self._targets))]
            target = self._targets[path] = _SignedTarget(self._loop.time() + _SIGN_AGAIN_S)
            target.task = self._loop.create_task(self._prepare(target, path))
        if target.host:
            target.send(get)
        else:
            target.waiting.append(get)
        return get

    def refresh(self, status: int) -> None:
        """See `Source.refresh`."""
        if self._general:
            self._general.refresh(status)
        self._targets.clear()

    def forget(self, path: str) -> None:
        """Sign an object again for its next request; reads that wait for its URL go on."""
        self._targets.pop(path, None)

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
            url = await self._sign(path)
        except Exception as error:
            self._targets.pop(path, None)
            refused = Response(0, refused=str(error)) if isinstance(error, Refused) else None
            for get in target.waiting:
                if get.on_response:
                    get.on_response(refused or response_from_error(error))
            return
        target.on_redirect = functools.partial(self._redirected, target)
        target.turn_to(url, self._host(urlsplit(url)), self._headers(url))
        for get in target.waiting:
            if get.on_response:
                target.send(get)
        target.waiting.clear()
        target.task = None

    def _redirected(self, target: "_SignedTarget", get: HttpGet, response: Response) -> None:
        """Send a request again to where it was redirected, or answer why not."""
        get.num_redirects += 1
        try:
            if get.num_redirects > MAX_REDIRECTS:
                raise Refused(f"it was redirected {MAX_REDIRECTS} times, which is probably a loop")
            url = self._options.redirects.follow(get.url, response.location)
        except Refused as refused:
            response.refused = str(refused)
            if get.on_response:
                get.on_response(response)
            return
        target.turn_to(url, self._host(urlsplit(url)), self._headers(url))
        target.send(get)

    def _host(self, url: SplitResult) -> PlainHttp:
        where = f"{url.scheme}://{url.netloc}"
        if where not in self._hosts:
            self._hosts[where] = PlainHttp(
                url, self._budget, self._options.tls if url.scheme == "https" else None
            )
        return self._hosts[where]


@dataclass(slots=True, eq=False, repr=False)
class _SignedTarget:
    """The beginning of each request for one object, up to its range; valid until `until`."""

    until: float
    url: str = ""
    text: bytes = b""
    on_redirect: Callable[[HttpGet, Response], None] | None = None
    host: PlainHttp | None = None  # once it is signed
    waiting: list[HttpGet] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def turn_to(self, url: str, host: PlainHttp, headers: str) -> None:
        """Send requests to this URL from now on."""
        parts = urlsplit(url)
        where = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        netloc = parts.netloc.rpartition("@")[2]
        fields = "User-Agent: gyre\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
        text = f" {where} HTTP/1.1\r\nHost: {netloc}\r\n{fields}{headers}"
        self.url, self.text, self.host = url, text.encode("latin-1"), host

    def send(self, get: HttpGet) -> None:
        """Send a request for the object."""
        method = b"HEAD" if get.is_head else b"GET"
        get.text, get.url, get.on_redirect = (
            method + self.text + get.range_text,
            self.url,
            self.on_redirect,
        )
        assert self.host
        self.host.send(get)


def _close_all(targets: Iterable[_SignedTarget], hosts: Iterable[PlainHttp]) -> None:
    for target in targets:
        if target.task:
            target.task.cancel()
    for host in hosts:
        host.close()
