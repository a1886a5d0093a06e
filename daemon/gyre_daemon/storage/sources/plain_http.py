"""Our own HTTP client: the connections to a host, and one request on each.

It speaks HTTP/1.1, with TLS or without, on connections that stay open, and takes a third of the
processor time of a general client. RFC 9110 and 9112, as far as a GET with one range or a HEAD
goes: a response has a `Content-Length`, or its connection is not used again. Proxies are left to
the general client.
"""

import asyncio
import mmap
import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import SplitResult

from msgspec import Struct

from gyre_daemon.storage.response import Body, OnResponse, Response, untrusted
from gyre_daemon.storage.shard import Validators

_END = b"\r\n\r\n"
_FIELD = re.compile(
    rb"\r\n(content-length|content-range|etag|last-modified|x-amz-version-id|x-goog-generation"
    rb"|location|connection|transfer-encoding|retry-after):[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})")
# The most bytes that the daemon holds of a response without data.
_MAX_HEAD_BYTES, _MAX_DETAIL_BYTES = 64 << 10, 64 << 10
# Connections being opened at once, and for how long. More at once overrun a server's backlog, and
# refused ones are tried again later.
MAX_CONNECTING, _CONNECT_DEADLINE_S = 256, 10.0
_IDLE_S = 30.0  # a connection without a request for this long is closed
# A cancelled response may still arrive for this long, so that its connection can be used again. A
# longer time keeps connections that other requests could use.
_DRAIN_S = 2.0
_MAX_SIZE_DIGITS = 18
# Longer bodies are received into mappings of their own. Parts of a hundred bodies on the heap leave
# it in pieces that the system never gets back: 23 MiB beside a cache of 24. Mapping a shorter body
# takes more time than copying it once more.
_MIN_MAPPED_BYTES = 64 << 10


class ConnectionBudget:
    """Counts the connections of all hosts. Used from one event loop.

    The operating system limits descriptors, and the daemon's clients need some too. A host without
    a connection gets one that another host leaves idle, or it would never be served.

    Attributes:
        num_left: how many more connections may be opened now.
    """

    def __init__(self, max_open: int) -> None:
        """Nothing is open.

        Args:
            max_open: the most connections at once, including those being opened.
        """
        self.num_left = max_open
        self._pools: dict[PlainHttp, None] = {}  # those that may have idle connections
        self._refused: dict[PlainHttp, None] = {}  # those that wait for one, oldest first

    def is_wanted_by_others(self, pool: "PlainHttp") -> bool:
        """Whether another host waits, so that a pool closes a connection that becomes idle."""
        return any(other is not pool for other in self._refused)

    def take(self, pool: "PlainHttp") -> bool:
        """Whether a pool may open one more connection.

        If not, another pool's idle one is closed, and `has_room` is called when there is room.
        """
        if self.num_left:
            self.num_left -= 1
            self._pools[pool] = None
            return True
        if pool not in self._refused:
            self._refused[pool] = None
            any(other.close_idle() for other in self._pools if other is not pool)
        return False

    def give_back(self) -> None:
        """A connection was closed, or was never opened."""
        self.num_left += 1
        if self._refused:
            pool = next(iter(self._refused))
            del self._refused[pool]
            pool.has_room()

    def forget(self, pool: "PlainHttp") -> None:
        """A pool opens no more connections; those it has are still given back one by one."""
        self._pools.pop(pool, None)
        self._refused.pop(pool, None)


class HttpGet(Struct, eq=False):
    """One request; see `SentRequest`. Not sent yet when it is made.

    Attributes:
        text: the whole request.
        max_bytes: the longest body that is wanted.
        on_response: see `Source.get`; None once the request is cancelled.
        first_byte_at: see `SentRequest`.
        connection: which carries it.
        is_head: only the head of the response is wanted, and comes.
        on_redirect: is called instead of `on_response` with a redirect that says where to.
        range_text: the end of `text`, which stays the same for another URL.
        url: where the request goes.
        num_redirects: how many it has followed.
    """

    text: bytes
    max_bytes: int
    on_response: OnResponse | None
    first_byte_at: float | None = 0.0
    connection: "_Connection | None" = None
    is_head: bool = False
    on_redirect: "Callable[[HttpGet, Response], None] | None" = None
    range_text: bytes = b""
    url: str = ""
    num_redirects: int = 0

    __repr__ = object.__repr__  # a struct's own would print credentials

    def cancel(self) -> None:
        """See `SentRequest.cancel`."""
        self.on_response = None
        if self.connection:
            self.connection.drain()

    def when_free(self, free: Callable[[], None]) -> None:
        """See `SentRequest.when_free`."""
        free()


class PlainHttp:
    """The connections to one host. Used from one event loop.

    A request without a connection takes the first that becomes free, whether it was just opened or
    has just delivered a response. So few are opened where responses come fast.
    """

    def __init__(
        self, url: SplitResult, budget: ConnectionBudget, tls: ssl.SSLContext | None = None
    ) -> None:
        """Nothing is open yet.

        Args:
            url: of an object on the host.
            budget: of the connections to all hosts.
            tls: whose certificates are trusted; None for a host without TLS.
        """
        self._budget = budget
        self._tls = tls
        self._host, self._port = url.hostname or "", url.port or (443 if tls else 80)
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []  # the last used are last
        self._open: set[_Connection] = set()
        self._waiting: deque[HttpGet] = deque()  # some of them cancelled
        self._connecting: dict[asyncio.Task[None], _Connection] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def send(self, get: HttpGet) -> None:
        """Send a request as soon as a connection is free."""
        if self._idle:
            self._idle.pop().begin(get)
            return
        self._waiting.append(get)
        self.connect(len(self._waiting))

    def connect(self, num_connections: int) -> None:
        """Have this many connections being opened, or as many as allowed.

        Without a waiting request they are opened for later ones.
        """
        for _ in range(min(num_connections, MAX_CONNECTING) - len(self._connecting)):
            if not self._budget.take(self):
                return
            connection = _Connection(self)
            task = self._loop.create_task(self._connect(connection))
            self._connecting[task] = connection
            task.add_done_callback(self._connected)

    def has_room(self) -> None:
        """Open connections for the waiting requests: more may be open than when one was refused."""
        self.connect(len(self._waiting))

    def close_idle(self) -> bool:
        """Begin to close the least recently used idle connection; returns whether there was one."""
        if not self._idle:
            return False
        self._idle.pop(0).abort()
        return True

    def close(self) -> None:
        """Close all connections."""
        if self._sweep:
            self._sweep.cancel()
        self._budget.forget(self)
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abort()

    def opened(self, connection: "_Connection") -> None:
        """A connection is open."""
        self._open.add(connection)

    def freed(self, connection: "_Connection") -> None:
        """A connection can carry another request."""
        if get := self._next_waiting():
            connection.begin(get)
            return
        if self._budget.is_wanted_by_others(self):
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(_IDLE_S, self._close_unused)

    def closed(self, connection: "_Connection") -> None:
        """A connection is closed."""
        if connection in self._open:
            self._open.remove(connection)
            self._budget.give_back()
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_unused(self) -> None:
        self._sweep = None
        before = self._loop.time() - _IDLE_S
        for connection in [each for each in self._idle if each.idle_since <= before]:
            connection.abort()
        if self._idle:
            self._sweep = self._loop.call_later(_IDLE_S, self._close_unused)

    async def _connect(self, connection: "_Connection") -> None:
        try:
            async with asyncio.timeout(_CONNECT_DEADLINE_S):
                await self._loop.create_connection(
                    lambda: connection, self._host, self._port, ssl=self._tls
                )
        except ssl.SSLCertVerificationError as error:
            server = f"{self._host}:{self._port}"
            self._fail_one(Response(0, refused=untrusted(server, error.verify_message)))
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no connection in time"
            detail = f"{type(error).__name__}: {reason}"
            self._fail_one(Response(0, detail=detail, unreachable=True))
        else:
            self.freed(connection)

    def _fail_one(self, response: Response) -> None:
        """No connection could be made for the request that has waited longest."""
        get = self._next_waiting()
        if get and get.on_response:
            get.on_response(response)

    def _connected(self, task: asyncio.Task[None]) -> None:
        if not self._connecting.pop(task).was_made:
            self._budget.give_back()
        if self._waiting and not task.cancelled():
            self.connect(len(self._waiting))

    def _next_waiting(self) -> HttpGet | None:
        """The request that has waited longest for a connection."""
        while self._waiting:
            get = self._waiting.popleft()
            if get.on_response:
                return get
        return None


class _Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self, owner: PlainHttp) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._get: HttpGet | None = None
        self._head = b""  # received so far
        self._response: Response | None = None  # its body is being received
        self._parts: list[bytes] = []
        self._mapped: mmap.mmap | None = None  # takes the body, instead of the parts
        self._num_missing = 0
        self.idle_since = 0.0
        self.was_made = False
        self._is_last = False  # the server closes after this response, or its end is unknown

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.was_made = True
        self._owner.opened(self)

    def begin(self, get: HttpGet) -> None:
        """Send a request."""
        self._get = get
        get.connection = self
        self._transport.write(get.text)

    def drain(self) -> None:
        """The request was cancelled: let its response arrive for a while."""
        self._loop.call_later(_DRAIN_S, self._abort_if_busy_with, self._get)

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._response:
            self._receive(data)
            return
        if self._get is None:  # nothing was requested
            self.abort()
            return
        if not self._head:
            self._get.first_byte_at = time.monotonic()
        data = self._head + data if self._head else data
        end = data.find(_END)
        if end >= 0:
            self._head = b""
            self._begin_response(data[: end + 2], data[end + 4 :])
        elif len(data) > _MAX_HEAD_BYTES:
            self._fail("the response is not HTTP")
        else:
            self._head = data

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.closed(self)
        if self._get:
            reason = "the connection was closed before the response was complete"
            self._finish(Response(0, detail=f"{type(exc).__name__}: {exc}" if exc else reason))

    def _begin_response(self, head: bytes, rest: bytes) -> None:
        line = _STATUS_LINE.match(head)
        if not line:
            self._fail("the response is not HTTP")
            return
        status = int(line[2])
        fields = {name.lower(): value for name, value in _FIELD.findall(head)}
        self._is_last = line[1] == b"0" or fields.get(b"connection", b"").lower() == b"close"
        length = fields.get(b"content-length", b"0" if status in (204, 304) else b"")
        assert self._get
        if self._get.is_head:
            total, length = length, b"0"
        else:
            _, _, total = fields.get(b"content-range", b"").rpartition(b"/")
            if not _is_number(length) or b"transfer-encoding" in fields:
                self._is_last, length = True, b"0"
                if status < 300:
                    status, rest = 0, b"the response does not say how long it is"
        self._response = Response(
            status,
            told=_validators(fields),
            object_bytes=int(total) if _is_number(total) else -1,
            location=_text(fields, b"location"),
            retry_after_s=_seconds(fields.get(b"retry-after", b"")),
        )
        self._num_missing = int(length)
        if self._num_missing > (self._get.max_bytes if status < 300 else _MAX_DETAIL_BYTES):
            self._is_last, self._num_missing = True, 0
        if self._num_missing >= max(_MIN_MAPPED_BYTES, len(rest) + 1):
            self._mapped = mmap.mmap(-1, self._num_missing, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._receive(rest)

    def _receive(self, data: bytes) -> None:
        """Take a part of the body."""
        mapped = self._mapped
        if mapped is not None and len(data) > self._num_missing:  # more than it should be
            self._parts, self._mapped, mapped = [mapped[: mapped.tell()]], None, None
        self._num_missing -= len(data)
        if mapped is not None:
            mapped.write(data)
        elif self._num_missing > 0:
            self._parts.append(data)
        if self._num_missing > 0:
            return
        if self._num_missing < 0:
            self._is_last = True
        response, self._response = self._response, None
        assert response
        body = self._whole_body(data)
        if response.status in (200, 206):
            response.data = body
        else:
            response.detail = bytes(body).decode(errors="replace")
        self._finish(response)

    def _whole_body(self, last: bytes) -> Body:
        """All that was received of a body, whose last part this is."""
        if self._mapped is not None:
            body, self._mapped = self._mapped, None
            return body
        if self._parts:
            last = b"".join([*self._parts, last])
            self._parts.clear()
        return last

    def _fail(self, reason: str) -> None:
        self._is_last = True
        self._finish(Response(0, detail=reason))

    def _finish(self, response: Response) -> None:
        get, self._get = self._get, None
        assert get
        get.connection = None
        if self._is_last:
            self.abort()
        elif not self._transport.is_closing():
            self._owner.freed(self)
        if get.on_redirect and get.on_response and _is_redirect(response):
            get.on_redirect(get, response)
        elif get.on_response:
            get.on_response(response)

    def _abort_if_busy_with(self, get: HttpGet | None) -> None:
        if get is not None and self._get is get:
            self.abort()


def _is_redirect(response: Response) -> bool:
    return response.status in (301, 302, 303, 307, 308) and bool(response.location)


def _validators(fields: Mapping[bytes, bytes]) -> Validators:
    version = _text(fields, b"x-goog-generation") or _text(fields, b"x-amz-version-id")
    return Validators(_text(fields, b"etag"), version, _text(fields, b"last-modified"))


def _text(fields: Mapping[bytes, bytes], key: bytes) -> str:
    return fields.get(key, b"").decode("latin-1")


def _seconds(text: bytes) -> float:
    """A time in seconds; 0 for none, and for a date."""
    return float(text) if _is_number(text) and len(text) < 7 else 0.0


def _is_number(text: bytes) -> bool:
    """Whether these are digits, as many as a size can have; `int` refuses thousands of them."""
    return text.isdigit() and len(text) <= _MAX_SIZE_DIGITS
