"""The files of the hub behind fsspec's interface, and the source that reads them."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate

from gyre_daemon.storage.location import redact
from gyre_daemon.storage.response import Response, describe
from gyre_daemon.storage.source import OnResponse, SentRequest
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.hub import TIMEOUT_S, HubClient, HubPath
from gyre_daemon.storage.sources.hub_budget import HubError
from gyre_daemon.storage.sources.plain_source import PlainSource
from gyre_daemon.storage.sources.redirects import MAX_REDIRECTS, RedirectPolicy, Refused

_BEFORE_WILDCARDS = re.compile(r"^(?:([^*?\[]*)/)?(.*)$")


class HubFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Lists the files of datasets of the hub.

    Attributes:
        source: reads the same files.
    """

    cachable = False  # codespell:ignore cachable

    def __init__(self, client: HubClient, options: HttpOptions, budget: ConnectionBudget) -> None:
        """Ask nothing yet.

        Args:
            client: asks the hub.
            options: see `PlainSource`.
            budget: of connections.
        """
        super().__init__(asynchronous=True)
        self._client = client
        self.source = HubSource(client, options, budget)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        where = HubPath.of(path)
        name = f"{where.prefix}/{where.name}"
        if not where.name:
            return {"name": where.prefix, "type": "directory", "size": 0}
        folder = replace(where, name=where.name.rpartition("/")[0])
        for info in await self._client.folder(folder):
            if info["name"] == name:
                return info
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        found = await self._client.folder(HubPath.of(path))
        return found if detail else [each["name"] for each in found]

    async def _glob(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        pattern = HubPath.of(path)
        literal, rest = _BEFORE_WILDCARDS.findall(pattern.name)[0]
        matches = re.compile(f"{re.escape(pattern.prefix)}/{glob_translate(pattern.name)}").match
        pages = self._client.pages(
            replace(pattern, name=literal), recursive="/" in rest or "**" in rest
        )
        return {
            info["name"]: info async for page in pages for info in page if matches(info["name"])
        }

    async def pages_below(self, folder: str) -> AsyncIterator[list[tuple[str, Any]]]:
        """The files below a folder: path without a scheme, and info; a page at a time."""
        async for page in self._client.pages(HubPath.of(folder), recursive=True):
            yield [(info["name"], info) for info in page if info["type"] == "file"]


class HubSource:
    """Reads files of the hub; see `Source`.

    The hub says where the bytes of a file lie, mostly in a storage of its own, and these are read
    from there without asking the hub again. Small files lie on the hub itself. Their reads take
    turns in its budget, and only they carry the daemon's token.
    """

    def __init__(self, client: HubClient, options: HttpOptions, budget: ConnectionBudget) -> None:
        """Connect to nothing yet; see `HubFileSystem`."""
        self._client = client
        self._own: dict[str, str] = {}  # URLs of files on the hub itself
        self._plain = PlainSource(None, self._url, budget, options, self._headers)
        no_redirects = replace(options, redirects=_NoRedirects())
        self._heads = PlainSource(None, _itself, budget, no_redirects, self._headers)

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""

        def answer(response: Response) -> None:
            if path in self._own and response.status in (429, 503):
                self._client.budget.hold(response.retry_after_s)
            on_response(response)

        return self._plain.get(path, start, stop, answer)

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: the hub is asked again where files lie."""
        self._own.clear()
        self._plain.refresh(status)

    def close(self) -> None:
        """See `Source.close`."""
        self._plain.close()
        self._heads.close()

    async def _url(self, path: str) -> str:
        url = self._own.get(path) or await self._find(path)
        if self._client.is_own(url):
            self._own[path] = url
            await self._client.budget.turn()
            self._plain.forget(path)  # the next read takes its turn, too
        return url

    async def _find(self, path: str) -> str:
        """The URL of a file's bytes, for an hour."""
        url = await self._client.url(HubPath.of(path))
        for _ in range(MAX_REDIRECTS):
            response = await self._head(url)
            if response.status == 200:
                return url
            url = self._client.follow(url, response.location)
            if not self._client.is_own(url):
                return url
        raise HubError(0, "the hub redirects in a loop")

    async def _head(self, url: str) -> Response:
        """The answer of the hub, which is a success or a redirect."""
        await self._client.budget.turn()
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def told(response: Response) -> None:
            if not answer.done():
                answer.set_result(response)

        async with asyncio.timeout(TIMEOUT_S):
            self._heads.head(url, told)
            response = await answer
        self._heads.forget(url)
        if response.status in (429, 503):
            self._client.budget.hold(response.retry_after_s)
        if response.status != 200 and not response.location:
            if response.refused:
                raise Refused(response.refused)
            raise HubError(response.status, describe(response))
        return response

    def _headers(self, url: str) -> str:
        """The token goes to the hub alone."""
        is_own = self._client.token and self._client.is_own(url)
        return f"Authorization: Bearer {self._client.token}\r\n" if is_own else ""


class _NoRedirects(RedirectPolicy):
    """Redirects are answers: they say where a file is."""

    def follow(self, url: str, location: str) -> str:
        """Refuse all; see `RedirectPolicy.follow`."""
        raise Refused(f"{redact(url)} redirects to {redact(location)}")


async def _itself(url: str) -> str:
    return url
