"""Answers Prometheus: prometheus-client's own application on one port.

Each scrape runs in a thread of its own, so a slow scraper holds up neither the event loop nor
another scraper. The numbers belong to the event loop, which hands them over for each scrape.
"""

import asyncio
import io
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import TcpAddress

# Each connection has a thread, so their number bounds what strangers can take of the daemon. A
# connection that sends or takes nothing for _TIMEOUT_S is closed: Prometheus itself gives up after
# ten seconds by default, and a daemon that needs five to answer is in trouble.
MAX_CONNECTIONS = 16
_TIMEOUT_S = 5.0

_Environment = dict[str, Any]
_StartResponse = Callable[[str, list[tuple[str, str]]], object]


class ScrapeServer:
    """Serves the metrics of a registry over HTTP."""

    def __init__(self, registry: CollectorRegistry, timeout_s: float = _TIMEOUT_S) -> None:
        """Nothing listens yet.

        Args:
            registry: what is served; its collectors are called in the threads of scrapes.
            timeout_s: how long a connection may neither send nor take a byte.
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
            server = await asyncio.to_thread(_Server, address, self._timeout_s)
        except OSError as error:
            target, reason = address.grpc_target, error.strerror or error
            raise ConfigError(
                f"metrics_listen: cannot listen on {target}: {reason}; is another process using it?"
            ) from error
        server.set_app(_logging_failures(make_wsgi_app(self._registry)))
        asyncio.get_running_loop().add_reader(server.fileno(), server.handle_request)
        self._server = server
        return f"tcp:{address.host}:{server.server_port}"

    def stop(self) -> None:
        """Stop listening; scrapes that are being answered end with the process."""
        if self._server:
            asyncio.get_running_loop().remove_reader(self._server.fileno())
            self._server.server_close()


class _Server(ThreadingWSGIServer):
    """A thread per connection, up to `MAX_CONNECTIONS`; further connections are closed at once."""

    request_queue_size = MAX_CONNECTIONS
    timeout = 0  # `handle_request` is called only when somebody has connected

    def __init__(self, address: TcpAddress, timeout_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._free_places = threading.Semaphore(MAX_CONNECTIONS)
        handler = type("Handler", (_Handler,), {"timeout": timeout_s})
        super().__init__((address.host, address.port), handler)
        self.socket.setblocking(False)

    def verify_request(self, request: object, client_address: object) -> bool:
        return self._free_places.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no further thread can be started
            self._free_places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """The scraper went away or was too slow: that is its own affair."""


class _Handler(WSGIRequestHandler):
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
