"""Objects of web servers and of S3, read by our own client: options, requests, index pages.

The storage's own driver signs a URL for each object of S3, with credentials wherever they come
from, and ranges of that URL are read. So nothing here knows how a request is signed.

A redirect leads nowhere but to the same server, unless the operator lists another one: it would let
a server read, as the daemon, what only the daemon can reach, such as a service on its loopback
interface.
"""

import asyncio
import contextlib
import functools
import http.client
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate
from msgspec import Struct, field

from gyre_daemon.errors import ConfigError, NotAllowed
from gyre_daemon.runtime.threads import DaemonThreads
from gyre_daemon.storage.location import redact
from gyre_daemon.storage.response import (
    OnResponse,
    Response,
    SentRequest,
    Source,
    no_listing,
    response_from_error,
)
from gyre_daemon.storage.sources.plain_http import ConnectionBudget, HttpGet, PlainHttp

KEY = "redirect_hosts"
ANY_HOST = "*"
# A longer chain is a loop.
MAX_REDIRECTS = 5
_PORTS = {"http": 80, "https": 443}

CA_FILE = "ca_file"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class Refused(Exception):
    """A redirect that is not followed; the text says why."""


class RedirectPolicy(Struct, frozen=True):
    """Which redirects are followed.

    Attributes:
        hosts: other hosts that may be the target, as `host` or `host:port`; `*` for all.
    """

    hosts: frozenset[str] = frozenset()

    def follow(self, url: str, location: str) -> str:
        """The URL that a response's `Location` leads to.

        Raises:
            Refused: it must not be followed.
        """
        try:
            target = urljoin(url, location).partition("#")[0]
            before, after = urlsplit(url), urlsplit(target)
            places = host_of(before), host_of(after)
        except ValueError as error:
            raise Refused(f"{redact(url)} redirects to no URL") from error
        if after.scheme not in _PORTS or not after.hostname or not _is_plain(target):
            raise Refused(f"{redact(url)} redirects to no URL of a web server")
        if before.scheme == "https" and after.scheme == "http":
            raise Refused(
                f"{places[0]} redirects from https to http at {places[1]}, without protection; "
                "name a server that stays with https"
            )
        if places[0] != places[1] and not self._lists(after, places[1]):
            raise Refused(
                f"{places[0]} redirects to another host or port, {places[1]}. Name that one in the "
                f'URI, or list it: {KEY} = ["{places[1]}"] in the `storage` table of the dataset.'
            )
        return target

    def _lists(self, url: SplitResult, place: str) -> bool:
        if ANY_HOST in self.hosts or place in self.hosts:
            return True
        return place.endswith(f":{_PORTS[url.scheme]}") and place.rpartition(":")[0] in self.hosts


def _is_plain(url: str) -> bool:
    """Whether it can be sent, and shown in an error."""
    return url.isascii() and url.isprintable()


def host_of(url: SplitResult) -> str:
    """Host and port of a URL, in lower case.

    Raises:
        ValueError: the port is no number, or too large.
    """
    host = url.hostname or ""
    return f"[{host}]:{_port(url)}" if ":" in host else f"{host}:{_port(url)}"


def _port(url: SplitResult) -> int:
    return url.port or _PORTS.get(url.scheme, 0)


class HttpOptions(Struct, frozen=True):
    """How web servers and object storages are spoken to.

    Attributes:
        redirects: which are followed.
        tls: returns what trusts the certificates of servers. The system's are read when it is first
            called, which takes 15 ms.
        roots: roots of certificates that are trusted beside the system's, in PEM; empty for none.
        given: the settings that say so.
    """

    redirects: RedirectPolicy
    tls: Callable[[], ssl.SSLContext]
    roots: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)


def take_http_options(settings: Mapping[str, Any]) -> tuple[dict[str, Any], HttpOptions]:
    """Split storage settings into the driver's own and ours. Reads files.

    Raises:
        ConfigError: one of ours is not valid, or its file cannot be read.
    """
    rest = dict(settings)
    hosts, ca_file = rest.pop(KEY, []), rest.pop(CA_FILE, "")
    if not isinstance(hosts, list) or not all(isinstance(each, str) and each for each in hosts):
        raise ConfigError(
            f'{KEY} must be a list of hosts such as ["cdn.example.org", "127.0.0.1:8080"]'
        )
    redirects = RedirectPolicy(frozenset(host.lower() for host in hosts))
    given = {key: value for key, value in settings.items() if key not in rest}
    if not isinstance(ca_file, str):
        raise ConfigError(f"{CA_FILE} must be the path of a file with certificates in PEM")
    if not ca_file:
        return rest, HttpOptions(redirects, _system_tls, given=given)
    try:
        # between certificates a file may say anything
        roots = "\n".join(_CERTIFICATE.findall(Path(ca_file).read_text("latin-1")))
        tls = _new_tls()
        tls.load_verify_locations(cadata=roots)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"{CA_FILE} of a dataset's storage names {ca_file!r}, which cannot be used: it must be "
            f"a file with certificates in PEM ({_reason(error)})"
        ) from error
    return rest, HttpOptions(redirects, lambda: tls, roots, given)


def _new_tls() -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates and host names
    tls.load_default_certs()
    # As Python does since 3.13. Its other new default refuses roots without key identifiers,
    # which private authorities often lack.
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls


_system_tls = functools.cache(_new_tls)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
        return error.strerror or type(error).__name__
    return "there is no certificate in it"


_SIGN_AGAIN_S = 1800.0  # half of a signature's life
_MAX_TARGETS = 1 << 16  # objects whose signed URLs are kept, of some 500 bytes each

Sign = Callable[[str], Awaitable[str]]


class PlainSource(Source):
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
        """Read the objects that `sign` knows URLs for.

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

    async def head(self, path: str) -> tuple[Response, str]:
        """The size and the etag of an object, and the URL that told them, after redirects."""
        arrived: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def answer(response: Response) -> None:
            if not arrived.done():
                arrived.set_result(response)

        get = HttpGet(b"", 0, answer, is_head=True, range_text=b"\r\n")
        self._send(path, get)
        try:
            return await arrived, get.url
        finally:
            get.cancel()

    def _send(self, path: str, get: HttpGet) -> HttpGet:
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
                url, self._budget, self._options.tls() if url.scheme == "https" else None
            )
        return self._hosts[where]


class _SignedTarget(Struct, eq=False):
    """The beginning of each request for one object, up to its range; valid until `until`."""

    until: float
    url: str = ""
    text: bytes = b""
    on_redirect: Callable[[HttpGet, Response], None] | None = None
    host: PlainHttp | None = None  # once it is signed
    waiting: list[HttpGet] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    __repr__ = object.__repr__  # see `HttpGet`

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
        get.text, get.url = method + self.text + get.range_text, self.url
        get.on_redirect = self.on_redirect
        assert self.host
        self.host.send(get)


def _close_all(targets: Iterable[_SignedTarget], hosts: Iterable[PlainHttp]) -> None:
    for target in targets:
        if target.task:
            target.task.cancel()
    for host in hosts:
        host.close()


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_TIMEOUT_S = 30.0  # of one connection, and of each wait for more bytes
_MAX_BYTES = 64 << 20  # of one page, which has some 300,000 files then

SCHEMES = ("http", "https")
_RETRIES = 4  # reads are retried by the engine, listings here
_FIRST_PAUSE_S = 0.1
_MAGIC = re.compile(r"[*?[]")
# Index pages, and files of a folder, to ask for at once.
_NUM_PAGES, _NUM_HEADS = 4, 64
_UNQUOTED = "/~-._!$&'()*+,;=:@"


class Page(NamedTuple):
    """A server's answer.

    Attributes:
        url: after redirects.
        status: of HTTP.
        text: of an HTML page; empty for anything else.
    """

    url: str
    status: int
    text: str = ""


def index_page(url: str, options: HttpOptions) -> Page:
    """Ask for a page; waits for the server.

    The client of ranges needs the length of a body beforehand, which servers do not know of these.

    Raises:
        Refused: it redirects to where no redirect may lead.
        OSError, HTTPException: there is no answer.
    """
    for _ in range(MAX_REDIRECTS):
        parts = urlsplit(url)
        where = parts.hostname or "", parts.port
        connection = (
            http.client.HTTPSConnection(*where, timeout=_TIMEOUT_S, context=options.tls())
            if parts.scheme == "https"
            else http.client.HTTPConnection(*where, timeout=_TIMEOUT_S)
        )
        try:
            connection.request("GET", parts.path or "/", headers={"User-Agent": "gyre"})
            response = connection.getresponse()
            if 300 <= response.status < 400:
                url = options.redirects.follow(url, response.headers.get("Location", ""))
                continue
            if response.status != 200 or response.headers.get_content_type() != "text/html":
                return Page(url, response.status)
            body = response.read(_MAX_BYTES + 1)
        finally:
            connection.close()
        if len(body) > _MAX_BYTES:
            raise Refused(f"its index page is larger than {_MAX_BYTES >> 20} MiB")
        return Page(url, 200, body.decode(errors="replace"))
    raise Refused(f"it was redirected {MAX_REDIRECTS} times, which is probably a loop")


def names_on(page: Page) -> list[str]:
    """The names of files and folders to which a page links, sorted; those of folders end with `/`.

    Other links, such as those to a parent folder or to another order, do not count.
    """
    links = _Links()
    links.feed(page.text)
    here, names = urlsplit(page.url), set()
    for href in links.found:
        try:
            target = urlsplit(urljoin(page.url, href))
        except ValueError:
            continue
        is_below = target.path.startswith(here.path) and target.netloc == here.netloc
        name = unquote(target.path[len(here.path) :]) if is_below and not target.query else ""
        if name.strip("/") and "/" not in name[:-1]:
            names.add(name)
    return sorted(names)


class _Links(HTMLParser):
    """Collects the targets of links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for key, value in attrs if tag == "a" and key == "href" and value]


class WebError(OSError):
    """A web server's answer that is no file.

    Attributes:
        status: of the response.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(f"{response.detail}")
        self.status = response.status


class WebFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Looks at single files, and at folders of which the server shows an index page.

    Attributes:
        source: reads the same files, with the same connections.
    """

    cachable = False  # codespell:ignore cachable

    def __init__(
        self, settings: Mapping[str, Any], options: HttpOptions, budget: ConnectionBudget
    ) -> None:
        """Connect to nothing yet; see `PlainSource`.

        Args:
            settings: of the driver; it has none.
            options: which redirects are followed, and whose certificates are trusted.
            budget: of connections.

        Raises:
            ConfigError: there are settings.
        """
        if settings:
            raise ConfigError(
                f"the storage settings of a dataset on a web server cannot be used: "
                f"`{min(settings)}` is unknown; known are {KEY} and {CA_FILE}"
            )
        super().__init__(asynchronous=True)
        self.source = PlainSource(None, web_url, budget, options)
        self._options = options
        self._threads = DaemonThreads(_NUM_PAGES, "gyre-index-pages")

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        """The info of a file; a server sends the URL of a folder elsewhere: to one with a slash."""
        folder: dict[str, Any] = {"name": path, "type": "directory", "size": 0}
        if path.endswith("/") or not path.partition("://")[2].partition("/")[2]:
            return folder
        pause_s = _FIRST_PAUSE_S
        for attempt in range(_RETRIES + 1):
            response, url = await self.source.head(path)
            if urlsplit(url).path.endswith("/"):
                return folder
            may_help = response.status in (0, 408, 429) or response.status >= 500
            if not may_help or response.refused or attempt == _RETRIES:
                break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        if response.refused:
            raise NotAllowed(f"{path} is refused: {response.refused}", {"location": path})
        if response.status != 200 or response.object_bytes < 0:
            raise WebError(response)
        size = response.object_bytes
        return {"name": path, "type": "file", "size": size, "told": response.told}

    async def _glob(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        scheme, rest = path.split("://", 1)
        parts = rest.split("/")
        depth = next(each for each in range(1, len(parts)) if _MAGIC.search(parts[each]))
        folder = f"{scheme}://{'/'.join(parts[:depth])}/"
        max_depth = None if "**" in parts else len(parts) - depth
        matches = re.compile(glob_translate(path.removeprefix(folder))).match
        below = await self._below(folder, max_depth)
        return await self._infos([each for each in below if matches(each.removeprefix(folder))])

    async def _find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        return await self._infos(await self._below(path.rstrip("/") + "/", None))

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        folder = path.rstrip("/") + "/"
        return [
            {"name": folder + name.rstrip("/"), "type": "directory" if name[-1] == "/" else "file"}
            for name in await self._names_in(folder)
        ]

    async def _below(self, folder: str, max_depth: int | None) -> list[str]:
        """The URLs of all files below a folder, at most this many components below it."""
        names = await self._names_in(folder)
        files = [folder + name for name in names if not name.endswith("/")]
        if max_depth == 1:
            return files
        deeper = None if max_depth is None else max_depth - 1
        for name in names:
            if name.endswith("/") and not name.startswith("."):
                files += await self._below(folder + name, deeper)
        return files

    async def _names_in(self, folder: str) -> list[str]:
        try:
            page = await self._threads.run(index_page, await web_url(folder), self._options)
        except Refused as refused:
            raise NotAllowed(f"{folder} is refused: {refused}", {"location": folder}) from refused
        except HTTPException as error:
            raise WebError(Response(0, detail=f"{type(error).__name__}: {error}")) from error
        if page.status >= 500:
            raise WebError(Response(page.status))
        if not page.text:
            raise no_listing(folder, page.status)
        return names_on(page)

    async def _infos(self, paths: list[str]) -> dict[str, dict[str, Any]]:
        infos = await ask_all(self._info, paths, _NUM_HEADS)
        return dict(zip(paths, infos, strict=True))


async def ask_all(
    ask: Callable[[Asked], Awaitable[Answer]], items: Iterable[Asked], max_at_once: int
) -> list[Answer]:
    """The answers about all items, in their order."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(items))

    async def ask_next() -> None:
        for number, item in waiting:
            answers[number] = await ask(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(max_at_once):
            group.create_task(ask_next())
    return [answers[number] for number in range(len(answers))]


def check_no_proxy(path: str, policy: RedirectPolicy) -> bool:
    """Whether a file is read without a proxy.

    Raises:
        NotAllowed: it is read through one, whose client follows every redirect, and the operator
            has not allowed that.
    """
    scheme, _, rest = path.partition("://")
    if scheme not in getproxies() or proxy_bypass(rest.partition("/")[0]):
        return True
    if ANY_HOST not in policy.hosts:
        raise NotAllowed(
            f"{path} would be read through a proxy, where redirects cannot be refused. Set "
            f'{KEY} = ["{ANY_HOST}"] in the `storage` table of the dataset to follow all, or put '
            "the host into `no_proxy`.",
            {"location": path},
        )
    return False


async def web_url(path: str) -> str:
    """The URL of a file, as it stands in a request."""
    scheme, _, rest = path.partition("://")
    host, slash, key = rest.partition("/")
    return f"{scheme}://{host}{slash}{quote(key, safe=_UNQUOTED)}"
