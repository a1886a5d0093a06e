"""Other HTTP clients as sources of the daemon's engine: what Gyre's own client is measured beside.

They need packages that Gyre does not: aiohttp and pycurl.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from io import BytesIO
from typing import Any

import aiohttp
import obstore
import pycurl
from gyre_daemon.storage.response import OnResponse, Response, SentRequest
from obstore.store import ObjectStore


class Sent:
    """A request; its first byte is not seen, and a cancelled one is answered to nobody."""

    first_byte_at = None

    def __init__(self, start: int, stop: int, on_response: OnResponse) -> None:
        self.start, self.stop = start, stop
        self._on_response: OnResponse | None = on_response

    def cancel(self) -> None:
        self._on_response = None

    def when_free(self, free: Callable[[], None]) -> None:
        free()

    def answer(self, status: int, body: bytes) -> None:
        if self._on_response:
            self._on_response(Response(status, body))


class AiohttpSource:
    """Bare aiohttp, without fsspec above it."""

    def __init__(self, url: str, num_connections: int, authority: str | None) -> None:
        self._url = url
        context = ssl.create_default_context(cafile=authority) if authority else False
        connector = aiohttp.TCPConnector(limit=num_connections, ssl=context)
        self._tasks: set[asyncio.Future[None]] = set()
        self._session = aiohttp.ClientSession(connector=connector)

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        sent = Sent(start, stop, on_response)
        self._tasks.add(task := asyncio.ensure_future(self._read(sent)))
        task.add_done_callback(self._tasks.discard)
        return sent

    def refresh(self, status: int) -> None: ...

    def close(self) -> None:
        self._closing = asyncio.ensure_future(self._session.close())

    async def _read(self, sent: Sent) -> None:
        fields = {"Range": f"bytes={sent.start}-{sent.stop - 1}"}
        async with self._session.get(self._url, headers=fields) as response:
            sent.answer(response.status, await response.read())


class RangesSource:
    """obstore, with all ranges that are asked for in one turn of the loop as one call."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store, self._key = store, key
        self._asked: list[Sent] = []

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(lambda: loop.create_task(self._read_all()))
        self._asked.append(Sent(start, stop, on_response))
        return self._asked[-1]

    def refresh(self, status: int) -> None: ...

    def close(self) -> None: ...

    async def _read_all(self) -> None:
        asked, self._asked = self._asked, []
        bodies: Any = await obstore.get_ranges_async(
            self._store,
            self._key,
            starts=[each.start for each in asked],
            ends=[each.stop for each in asked],
            coalesce=0,
        )
        for each, body in zip(asked, bodies, strict=True):
            each.answer(206, bytes(body))


class CurlSource:
    """libcurl's multi interface on the event loop."""

    def __init__(self, url: str, num_connections: int, authority: str | None) -> None:
        self._url, self._authority = url, authority
        self._loop = asyncio.get_running_loop()
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, num_connections)
        self._free = deque(self._handle() for _ in range(num_connections))
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[Sent] = deque()
        self._watched: set[int] = set()

    def get(self, path: str, start: int, stop: int, on_response: OnResponse) -> SentRequest:
        sent = Sent(start, stop, on_response)
        if self._free:
            self._begin(sent)
        else:
            self._waiting.append(sent)
        return sent

    def refresh(self, status: int) -> None: ...

    def close(self) -> None:
        for descriptor in list(self._watched):
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
        if self._timer:
            self._timer.cancel()
        self._multi.close()

    def _handle(self) -> Any:
        handle = pycurl.Curl()
        handle.setopt(pycurl.URL, self._url)
        handle.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        if self._authority:
            handle.setopt(pycurl.CAINFO, self._authority)
        return handle

    def _begin(self, sent: Sent) -> None:
        handle = self._free.pop()
        handle.body, handle.sent = BytesIO(), sent
        handle.setopt(pycurl.RANGE, f"{sent.start}-{sent.stop - 1}")
        handle.setopt(pycurl.WRITEDATA, handle.body)
        self._multi.add_handle(handle)

    def _watch(self, event: int, descriptor: int, _multi: Any, _data: Any) -> None:
        self._loop.remove_reader(descriptor)
        self._loop.remove_writer(descriptor)
        self._watched.discard(descriptor)
        if event == pycurl.POLL_REMOVE:
            return
        self._watched.add(descriptor)
        if event & pycurl.POLL_IN:
            self._loop.add_reader(descriptor, self._act, descriptor, pycurl.CSELECT_IN)
        if event & pycurl.POLL_OUT:
            self._loop.add_writer(descriptor, self._act, descriptor, pycurl.CSELECT_OUT)

    def _set_timer(self, timeout_ms: int) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if timeout_ms >= 0:
            delay_s = timeout_ms / 1000
            self._timer = self._loop.call_later(delay_s, self._act, pycurl.SOCKET_TIMEOUT, 0)

    def _act(self, descriptor: int, events: int) -> None:
        self._multi.socket_action(descriptor, events)
        _, succeeded, failed = self._multi.info_read()
        assert not failed, failed
        for handle in succeeded:
            self._multi.remove_handle(handle)
            self._free.append(handle)
            status = handle.getinfo(pycurl.RESPONSE_CODE)
            handle.sent.answer(status, handle.body.getvalue())
            if self._waiting and self._free:
                self._begin(self._waiting.popleft())
