"""Ranges over plain HTTP/1.1, on connections that stay open: a third of the processor time that a general client takes.

RFC 9110 and 9112, as far as a GET with one range goes: an answer has a `Content-Length`, or its connection is not used again.
Redirections, proxies and TLS are left to the general client.
"""

import asyncio
import re
import time
from collections import deque
from typing import cast
from urllib.parse import SplitResult

from gyre_daemon.storage.answer import Answer
from gyre_daemon.storage.source import Done
from gyre_daemon.storage.sources.connections import Connections

_END = b"\r\n\r\n"
_FIELD = re.compile(rb"\r\n(content-length|content-range|etag|connection|transfer-encoding):[ \t]*([^\r\n]*)", re.IGNORECASE)
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})")
_MAX_HEAD_BYTES = 64 << 10
_MAX_DETAIL_BYTES = 64 << 10
_CONNECT_DEADLINE_S = 10.0
MAX_CONNECTING = 256  # at once
_IDLE_S = 30.0
_DRAIN_S = 2.0  # what nobody waits for any more may still arrive, so that its connection can be used again


class Get:
    """One request. See `Sent`."""

    __slots__ = ("connection", "done", "first_byte_at", "max_bytes", "text")

    def __init__(self, text: bytes, max_bytes: int, done: Done) -> None:
        """Not sent yet.

        Args:
            text: all of the request.
            max_bytes: of a body that is wanted.
            done: see `Source.get`.
        """
        self.text = text
        self.max_bytes = max_bytes
        self.done: Done | None = done
        self.first_byte_at: float | None = 0.0
        self.connection: _Connection | None = None

    def cancel(self) -> None:
        """See `Sent.cancel`."""
        self.done = None
        if self.connection:
            self.connection.drain()


class PlainHttp:
    """The connections to one host. Used from one event loop.

    A request without a connection takes the first that is free, be it a new one or one whose answer has come: so few are made
    where answers come fast.
    """

    def __init__(self, url: SplitResult, connections: Connections) -> None:
        """None is made yet.

        Args:
            url: of an object there.
            connections: how many there may be, of this host and others.
        """
        self._connections = connections
        self._host, self._port = url.hostname or "", url.port or 80
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._waiting: deque[Get] = deque()  # some of them given up
        self._connecting: dict[asyncio.Task[None], _Connection] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def send(self, get: Get) -> None:
        """Send a request as soon as a connection is free."""
        if self._idle:
            self._idle.pop().begin(get)
            return
        self._waiting.append(get)
        self.connect(len(self._waiting))

    def connect(self, num_connections: int) -> None:
        """See that so many are being made, or as many as there may be; without a request they are made for later ones."""
        for _ in range(min(num_connections, MAX_CONNECTING) - len(self._connecting)):
            if not self._connections.take(self):
                return
            connection = _Connection(self)
            task = self._loop.create_task(self._connect(connection))
            self._connecting[task] = connection
            task.add_done_callback(self._connected)

    def has_room(self) -> None:
        """See `Sharer`: connections are made for the requests that wait."""
        self.connect(len(self._waiting))

    def close_idle(self) -> bool:
        """See `Sharer`: the one that was not used for longest."""
        if not self._idle:
            return False
        self._idle.pop(0).abort()
        return True

    def close(self) -> None:
        """Hang up."""
        if self._sweep:
            self._sweep.cancel()
        self._connections.forget(self)
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abort()

    def is_open(self, connection: "_Connection") -> None:
        """It is there."""
        self._open.add(connection)

    def is_free(self, connection: "_Connection") -> None:
        """It can carry another request."""
        if get := self._next_waiting():
            connection.begin(get)
            return
        if self._connections.are_wanted(self):
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_IDLE_S, self._close_idle)

    def is_closed(self, connection: "_Connection") -> None:
        """It is gone."""
        if connection in self._open:
            self._open.remove(connection)
            self._connections.give_back()
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_idle(self) -> None:
        """Hang up where nothing was asked for long; the last used are used first."""
        self._sweep = None
        before = self._loop.time() - _IDLE_S
        for connection in [each for each in self._idle if each.idle_since <= before]:
            connection.abort()
        if self._idle:
            self._sweep = self._loop.call_later(_IDLE_S, self._close_idle)

    async def _connect(self, made: "_Connection") -> None:
        try:
            async with asyncio.timeout(_CONNECT_DEADLINE_S):
                await self._loop.create_connection(lambda: made, self._host, self._port)
        except (OSError, TimeoutError) as error:
            get = self._next_waiting()
            if get and get.done:
                reason = str(error) or "no connection in time"
                get.done(Answer(0, detail=f"{type(error).__name__}: {reason}", unreachable=True))
        else:
            self.is_free(made)

    def _connected(self, task: asyncio.Task[None]) -> None:
        if not self._connecting.pop(task).is_made:
            self._connections.give_back()
        if self._waiting and not task.cancelled():
            self.connect(len(self._waiting))

    def _next_waiting(self) -> Get | None:
        """Who waits longest for a connection."""
        while self._waiting:
            get = self._waiting.popleft()
            if get.done:
                return get
        return None


class _Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self, owner: PlainHttp) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._get: Get | None = None
        self._head = b""  # received, not whole
        self._answer: Answer | None = None  # whose body is being received
        self._parts: list[bytes] = []
        self._num_missing = 0
        self.idle_since = 0.0
        self.is_made = False
        self._is_last = False  # the server closes after this answer, or what follows cannot be told

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.is_made = True
        self._owner.is_open(self)

    def begin(self, get: Get) -> None:
        """Send a request."""
        self._get = get
        get.connection = self
        self._transport.write(get.text)

    def drain(self) -> None:
        """Nobody waits for the answer: it may arrive for a while."""
        self._loop.call_later(_DRAIN_S, self._abort_if_busy_with, self._get)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._answer:
            self._receive(data)
            return
        if self._get is None:  # nothing was asked
            self.abort()
            return
        if not self._head:
            self._get.first_byte_at = time.monotonic()
        data = self._head + data if self._head else data
        end = data.find(_END)
        if end >= 0:
            self._head = b""
            self._begin_answer(data[: end + 2], data[end + 4 :])
        elif len(data) > _MAX_HEAD_BYTES:
            self._fail("what came is no HTTP")
        else:
            self._head = data

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.is_closed(self)
        if self._get:
            reason = f"{type(exc).__name__}: {exc}" if exc else "the connection was closed before the answer was whole"
            self._finish(Answer(0, detail=reason))

    def _begin_answer(self, head: bytes, rest: bytes) -> None:
        line = _STATUS_LINE.match(head)
        if not line:
            self._fail("what came is no HTTP")
            return
        status = int(line[2])
        fields = {name.lower(): value for name, value in _FIELD.findall(head)}
        self._is_last = line[1] == b"0" or fields.get(b"connection", b"").lower() == b"close"
        length = fields.get(b"content-length", b"0" if status in (204, 304) else b"")
        if not length.isdigit() or b"transfer-encoding" in fields:
            self._is_last, length = True, b"0"
            if status < 300:
                status, rest = 0, b"the answer does not say how long it is"
        answer = Answer(status, etag=fields.get(b"etag", b"").decode("latin-1"))
        _, _, total = fields.get(b"content-range", b"").rpartition(b"/")
        answer.object_bytes = int(total) if total.isdigit() else -1
        self._answer = answer
        assert self._get
        self._num_missing = int(length)
        if self._num_missing > (self._get.max_bytes if status < 300 else _MAX_DETAIL_BYTES):
            self._is_last, self._num_missing = True, 0
        self._receive(rest)

    def _receive(self, data: bytes) -> None:
        """Some of the body."""
        self._num_missing -= len(data)
        if self._num_missing > 0:
            self._parts.append(data)
            return
        if self._parts:
            data = b"".join([*self._parts, data])
            self._parts.clear()
        if self._num_missing < 0:
            self._is_last = True
        answer, self._answer = self._answer, None
        assert answer
        if answer.status in (200, 206):
            answer.data = data
        else:
            answer.detail = data.decode(errors="replace")
        self._finish(answer)

    def _fail(self, reason: str) -> None:
        self._is_last = True
        self._finish(Answer(0, detail=reason))

    def _finish(self, answer: Answer) -> None:
        get, self._get = self._get, None
        assert get
        get.connection = None
        if self._is_last:
            self.abort()
        elif not self._transport.is_closing():
            self._owner.is_free(self)
        if get.done:
            get.done(answer)

    def _abort_if_busy_with(self, get: Get | None) -> None:
        if get is not None and self._get is get:
            self.abort()
