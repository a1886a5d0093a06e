"""Files of web servers behind fsspec's interface, and the index pages that list their folders."""

import asyncio
import http.client
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate

from gyre_daemon.errors import ConfigError, NotAllowed
from gyre_daemon.runtime.threads import DaemonThreads
from gyre_daemon.storage.response import Response, no_listing
from gyre_daemon.storage.sources.http_options import (
    ANY_HOST,
    CA_FILE,
    KEY,
    MAX_REDIRECTS,
    HttpOptions,
    RedirectPolicy,
    Refused,
)
from gyre_daemon.storage.sources.plain_http import ConnectionBudget, PlainSource

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
            http.client.HTTPSConnection(*where, timeout=_TIMEOUT_S, context=options.tls)
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
        self._heads = asyncio.Semaphore(_NUM_HEADS)

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
        told = {
            "e_tag": response.etag,
            "version": response.version,
            "last_modified": response.modified,
        }
        return {"name": path, "type": "file", "size": response.object_bytes, **told}

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
        """The infos of files, many of which are asked for at once."""

        async def info(path: str) -> dict[str, Any]:
            async with self._heads:
                return await self._info(path)

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(info(path)) for path in paths]
        return {path: task.result() for path, task in zip(paths, asked, strict=True)}


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
