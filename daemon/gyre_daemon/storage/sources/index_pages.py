"""The pages on which web servers list a folder, such as those of nginx and Apache."""

import http.client
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.redirects import MAX_REDIRECTS, Refused

_TIMEOUT_S = 30.0  # of one connection, and of each wait for more bytes
_MAX_BYTES = 64 << 20  # of one page, which has some 300,000 files then


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
