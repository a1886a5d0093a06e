"""The files of the hub behind fsspec's interface, and the source that reads them."""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.utils import glob_translate

from gyre_daemon.storage.response import Response, response_from_error
from gyre_daemon.storage.source import OnResponse, SentRequest
from gyre_daemon.storage.sources.connections import ConnectionBudget
from gyre_daemon.storage.sources.http_options import HttpOptions
from gyre_daemon.storage.sources.hub import HubClient, HubFile, HubPath
from gyre_daemon.storage.sources.hub_budget import MAX_WAIT_S, HubBudget
from gyre_daemon.storage.sources.plain_source import PlainSource
from gyre_daemon.storage.sources.redirects import Refused

_WILDCARDS = re.compile(r"[*?\[]")
_PAGE_FILES = 1000
# URLs of the hub's storage are valid for an hour; our client asks for them again after half of it.
_FRESH_S = 900.0

Result = TypeVar("Result")


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
        return _described(where, await _in_thread(self._client.budget, self._client.file, where))

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        where = HubPath.of(path)
        files = await self._files(where, recursive=False)
        found = [_described(where, each) for each in files]
        return found if detail else [each["name"] for each in found]

    async def _glob(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        pattern = HubPath.of(path)
        literal = pattern.name[: _first_wildcard(pattern.name)].rpartition("/")[0]
        rest = pattern.name[len(literal) + 1 if literal else 0 :]
        folder = HubPath(pattern.prefix, pattern.repository, pattern.revision, literal)
        matches = re.compile(glob_translate(pattern.name)).match
        files = await self._files(folder, recursive="/" in rest or "**" in rest)
        found = [_described(pattern, each) for each in files if matches(each.name)]
        return {each["name"]: each for each in found}

    async def pages_below(self, folder: str) -> AsyncIterator[list[tuple[str, Any]]]:
        """The files below a folder: path without a scheme, and info; a page at a time."""
        where = HubPath.of(folder)
        files = [each for each in await self._files(where, recursive=True) if each.digest]
        for begin in range(0, len(files), _PAGE_FILES):
            infos = [_described(where, each) for each in files[begin : begin + _PAGE_FILES]]
            yield [(info["name"], info) for info in infos]

    async def _files(self, where: HubPath, *, recursive: bool) -> list[HubFile]:
        list_files = functools.partial(self._client.files, where, recursive=recursive)
        return await _in_thread(self._client.budget, list_files)


class HubSource:
    """Reads files of the hub; see `Source`.

    The hub says where the bytes of a file lie, mostly in a storage of its own, and these are read
    from there without asking the hub again. Small files lie on the hub itself. Their reads take
    turns in its budget, and only they carry the daemon's token.
    """

    def __init__(self, client: HubClient, options: HttpOptions, budget: ConnectionBudget) -> None:
        """Connect to nothing yet; see `HubFileSystem`."""
        self._loop = asyncio.get_running_loop()
        self._client = client
        self._plain = PlainSource(None, self._url, budget, options, self._headers)
        self._places: dict[str, _Place] = {}

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        """See `Source.get`."""
        request = _HubRequest(path, start, stop, on_response)
        place = self._places.get(path)
        if place is None:
            place = self._places[path] = _Place()
            place.task = self._loop.create_task(self._find(path, place))
        if place.url:
            self._send(request, place)
        else:
            place.waiting.append(request)
        return request

    def refresh(self, status: int) -> None:
        """See `Source.refresh`: the hub is asked again where files lie."""
        for path in [path for path, place in self._places.items() if place.url]:
            del self._places[path]
        self._plain.refresh(status)

    def close(self) -> None:
        """See `Source.close`."""
        for place in self._places.values():
            if place.task:
                place.task.cancel()
        self._plain.close()

    async def _find(self, path: str, place: "_Place") -> None:
        try:
            await self._ask(path, place)
        except Exception as error:
            self._places.pop(path, None)
            refused = str(error) if isinstance(error, Refused) else ""
            response = Response(0, refused=refused) if refused else response_from_error(error)
            for request in place.waiting:
                request.answer(response)
        else:
            for request in place.waiting:
                self._send(request, place)
        place.waiting.clear()
        place.task = None

    async def _ask(self, path: str, place: "_Place") -> None:
        url = await _in_thread(self._client.budget, self._client.url, HubPath.of(path))
        place.url, place.is_own = url, self._client.is_own(url)
        place.asked_at = self._loop.time()

    async def _url(self, path: str) -> str:
        """What our client asks for, when it needs a URL or when that has become old."""
        place = self._places.setdefault(path, _Place())
        if not place.url or self._loop.time() - place.asked_at > _FRESH_S:
            await self._ask(path, place)
        return place.url

    def _headers(self, url: str) -> str:
        """The token goes to the hub alone."""
        is_own = self._client.token and self._client.is_own(url)
        return f"Authorization: Bearer {self._client.token}\r\n" if is_own else ""

    def _send(self, request: "_HubRequest", place: "_Place") -> None:
        if request.is_cancelled:
            return
        budget = self._client.budget
        if not place.is_own:
            request.begin(self._plain)
            return
        if (held_s := budget.held_s()) > MAX_WAIT_S:
            detail = f"the hub was asked too often; it can be asked in {held_s:.0f} s"
            self._loop.call_soon(request.answer, Response(429, detail=detail))
            return
        request.on_refused = budget.hold
        wait_s = held_s if request.has_turn else budget.reserve()
        request.has_turn = True
        if wait_s:
            request.timer = self._loop.call_later(wait_s, self._send, request, place)
        else:
            request.begin(self._plain)


@dataclass(slots=True, eq=False)
class _Place:
    """Where the bytes of a file lie; `url` is empty until that is known."""

    url: str = ""
    is_own: bool = False
    asked_at: float = 0.0
    task: asyncio.Task[None] | None = None
    waiting: "list[_HubRequest]" = field(default_factory=list)


class _HubRequest:
    """A `SentRequest` that waits until it is known where to send it, or for its turn."""

    def __init__(self, path: str, start: int, stop: int, on_response: OnResponse) -> None:
        self.is_cancelled = self.has_turn = False
        self.on_refused: Callable[[float], None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._arguments = path, start, stop
        self._on_response = on_response
        self._sent: SentRequest | None = None

    @property
    def first_byte_at(self) -> float | None:
        """See `SentRequest.first_byte_at`; nobody can tell while it waits."""
        return self._sent.first_byte_at if self._sent else None

    def cancel(self) -> None:
        """See `SentRequest.cancel`."""
        self.is_cancelled = True
        if self.timer:
            self.timer.cancel()
        if self._sent:
            self._sent.cancel()

    def begin(self, source: PlainSource) -> None:
        """Send it."""
        if not self.is_cancelled:
            self._sent = source.get(*self._arguments, self.answer)

    def answer(self, response: Response) -> None:
        """It was answered, or cannot be sent."""
        if self._sent and self.on_refused and response.status in (429, 503):
            self.on_refused(response.retry_after_s)
        if not self.is_cancelled:
            self._on_response(response)


async def _in_thread(budget: HubBudget, work: Callable[..., Result], *arguments: Any) -> Result:
    """What one of the methods of a client that wait returns."""
    return await asyncio.wrap_future(budget.threads.submit(work, *arguments))


def _first_wildcard(name: str) -> int:
    match = _WILDCARDS.search(name)
    return match.start() if match else len(name)


def _described(where: HubPath, file: HubFile) -> dict[str, Any]:
    """A file or folder as fsspec describes it."""
    path = f"{where.prefix}/{file.name}".rstrip("/")
    kind = "file" if file.digest else "directory"
    info = {"name": path, "type": kind, "size": file.num_bytes}
    return {**info, "digest": file.digest} if file.digest else info
