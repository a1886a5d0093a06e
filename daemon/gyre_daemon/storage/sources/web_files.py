"""Files on a web server, behind fsspec's interface as far as a listing needs it."""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

from fsspec.asyn import AsyncFileSystem

from gyre_daemon.errors import ConfigError, NotAllowed
from gyre_daemon.storage.response import Response, no_listing
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.http_options import CA_FILE, HttpOptions
from gyre_daemon.storage.sources.plain_source import PlainSource
from gyre_daemon.storage.sources.redirects import ANY_HOST, KEY, RedirectPolicy

SCHEMES = ("http", "https")
_RETRIES = 4  # reads are retried by the engine, listings here
_FIRST_PAUSE_S = 0.1
_UNQUOTED = "/~-._!$&'()*+,;=:@"


class WebError(OSError):
    """A web server's answer that is no file.

    Attributes:
        status: of the response.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(f"{response.detail}")
        self.status = response.status


class WebFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """Looks at single files; a web server lists nothing.

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

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if not path.partition("://")[2].partition("/")[2].strip("/"):
            return {"name": path, "type": "directory", "size": 0}
        pause_s = _FIRST_PAUSE_S
        for attempt in range(_RETRIES + 1):
            response = await self._head(path)
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

    async def _glob(self, path: str, **_: Any) -> Any:
        raise no_listing(path)

    async def _find(self, path: str, **_: Any) -> Any:
        raise no_listing(path, "Name the files in a manifest")

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        return await self._glob(path)

    async def _head(self, path: str) -> Response:
        arrived: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def answer(response: Response) -> None:
            if not arrived.done():
                arrived.set_result(response)

        request = self.source.head(path, answer)
        try:
            return await arrived
        finally:
            request.cancel()


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
