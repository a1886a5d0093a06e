"""Answers Prometheus: prometheus-client's own application on one port.

Each scrape runs in a separate thread, so a slow scraper holds up neither the event loop nor
another scraper. The numbers belong to the event loop, which hands them over for each scrape.
"""

import asyncio
import contextlib
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import TcpAddress
from gyre_daemon.runtime.threads import in_thread

# Each connection has a thread, so their number bounds the resources that strangers can take. A
# connection whose request is not there after _TIMEOUT_S is closed, and one that takes no answer for
# as long: Prometheus itself gives up after ten seconds by default, and a daemon that needs five to
# answer is in trouble. Where all places are taken, the request expected for longest
# makes room for the next.
MAX_CONNECTIONS = 16
_TIMEOUT_S = 5.0
# Where `accept` fails, for want of descriptors as a rule, the scraper still waits in the backlog:
# without a pause the event loop would try again all the time.
_ACCEPT_PAUSE_S = 1.0

_Environment = dict[str, Any]
_StartResponse = Callable[[str, list[tuple[str, str]]], object]


class ScrapeServer:
    """Serves the metrics of a registry over HTTP."""

    def __init__(self, registry: CollectorRegistry, timeout_s: float = _TIMEOUT_S) -> None:
        """Nothing listens yet.

        Args:
            registry: the metrics to serve; its collectors are called in the threads of scrapes.
            timeout_s: how long a request may take to arrive, and the answer to be taken.
        """
        self._registry = registry
        self._timeout_s = timeout_s
        self._server: _Server | None = None

    async def start(self, address: TcpAddress) -> str:
        """Listen, and return the address with the port that was bound.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            # in a thread: the library's server looks up the name of its host
            server = await in_thread(partial(_Server, address, self._timeout_s), "gyre-metrics")
        except OSError as error:
            target, reason = address.grpc_target, error.strerror or error
            raise ConfigError(
                f"metrics_listen: cannot listen on {target}: {reason}; is another process using it?"
            ) from error
        server.set_app(_logging_failures(make_wsgi_app(self._registry)))
        self._server = server
        self._listen()
        return f"tcp:{address.host}:{server.server_port}"

    def stop(self) -> None:
        """Stop listening; scrapes in progress end with the process."""
        if self._server:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.server_close()
            self._server = None

    def _listen(self) -> None:
        if self._server:
            asyncio.get_running_loop().add_reader(self._server.fileno(), self._serve_one)

    def _serve_one(self) -> None:
        assert self._server
        self._server.handle_request()
        if self._server.cannot_accept:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._server.fileno())
            loop.call_later(_ACCEPT_PAUSE_S, self._listen)


class _Server(ThreadingWSGIServer):
    """A thread per connection, up to `MAX_CONNECTIONS`.

    One more takes the place of the oldest whose request has not arrived, or is closed at once.

    Attributes:
        timeout_s: how long a request may take to arrive, and the answer to be taken.
        cannot_accept: whether the last attempt to accept a connection failed.
    """

    request_queue_size = MAX_CONNECTIONS
    timeout = 0  # `handle_request` is called only when a client has connected

    def __init__(self, address: TcpAddress, timeout_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._lock = threading.Lock()  # guards the two below
        self.cannot_accept = False
        self._places: set[socket.socket] = set()
        self._expected: dict[socket.socket, None] = {}  # no whole request yet; the oldest first
        self.timeout_s = timeout_s
        handler = type("Handler", (_Handler,), {"timeout": timeout_s})
        super().__init__((address.host, address.port), handler)
        self.socket.setblocking(False)

    def get_request(self) -> tuple[socket.socket, Any]:
        self.cannot_accept = False
        try:
            return super().get_request()
        except BlockingIOError:  # it has gone meanwhile
            raise
        except OSError:
            self.cannot_accept = True
            raise

    def verify_request(self, request: Any, client_address: object) -> bool:
        with self._lock:
            if len(self._places) >= MAX_CONNECTIONS:
                oldest = next(iter(self._expected), None)
                if oldest is None:
                    return False
                self._drop(oldest)
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
            self._places.add(request)
            self._expected[request] = None
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no further thread can be started
            with self._lock:
                self._drop(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._drop(request)

    def arrived(self, request: socket.socket) -> None:
        """Let a connection whose request is whole keep its place until it is answered."""
        with self._lock:
            self._expected.pop(request, None)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore the error: the scraper went away or was too slow."""

    def _drop(self, request: socket.socket) -> None:
        self._places.discard(request)
        self._expected.pop(request, None)


class _Arriving(io.RawIOBase):
    """The bytes that a connection sends until a deadline; then reading raises TimeoutError."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._timeout_s)


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Arriving(self.connection, self.server.timeout_s))

    def parse_request(self) -> bool:
        is_good = super().parse_request()
        self.server.arrived(self.connection)
        return is_good

    def log_message(self, *message: object) -> None:
        """Requests are not logged."""

    def get_stderr(self) -> io.StringIO:
        """Nowhere: failures to collect are logged, and slow scrapers are not."""
        return io.StringIO()


def _logging_failures(
    app: Callable[[_Environment, _StartResponse], Iterable[bytes]],
) -> Callable[[_Environment, _StartResponse], Iterable[bytes]]:
    """The application, with a line in the daemon's log where it would print a traceback."""

    def logged(environ: _Environment, start_response: _StartResponse) -> Iterable[bytes]:
        try:
            return app(environ, start_response)
        except Exception as error:
            log_event("scrape failed", {"error": repr(error)}, logging.ERROR)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            start_response(
                f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")]
            )
            return [b"the metrics could not be collected; see the daemon's log\n"]

    return logged
