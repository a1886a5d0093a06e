"""The HTTP ports of a daemon: metrics for Prometheus at one, two probes at the other.

A thread accepts connections and others answer them, so neither a slow client nor an event loop that
hangs holds up a request. The figures of metrics belong to the event loop, which hands them over for
each scrape. Probes look at the event loop from outside.
"""

import contextlib
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import TcpAddress
from gyre_daemon.runtime.liveness import LoopLag

# Each connection has a thread, so their number bounds the resources that strangers can take. A
# connection whose request is not there after _TIMEOUT_S is closed, and one that takes no answer for
# as long: Prometheus itself gives up after ten seconds by default, and a daemon that needs five to
# answer is in trouble. Where all places are taken, the request expected for longest
# makes room for the next.
MAX_CONNECTIONS = 16
_TIMEOUT_S = 5.0
# Requests have some hundred bytes. Python's server alone would take a hundred lines of 64 KiB.
_MAX_REQUEST_BYTES = 128 << 10
# Where `accept` fails, for want of descriptors as a rule, the client still waits in the backlog:
# without a pause the thread would try again all the time.
_ACCEPT_PAUSE_S = 1.0
# An event loop hangs if it is late by this much. Busy ones are late by tenths of a second; three
# probes in ten seconds each then wait as long as WatchdogSec of the systemd unit.
_HANGS_AFTER_S = 10.0

_Environment = dict[str, Any]
_StartResponse = Callable[[str, list[tuple[str, str]]], object]
Application = Callable[[_Environment, _StartResponse], Iterable[bytes]]


class HttpPort:
    """Serves one WSGI application."""

    def __init__(self, key: str, application: Application, timeout_s: float = _TIMEOUT_S) -> None:
        """Nothing listens yet.

        Args:
            key: of the configuration, for errors.
            application: is called in the threads of requests.
            timeout_s: how long a request may take to arrive, and the answer to be taken.
        """
        self._key = key
        self._application = application
        self._timeout_s = timeout_s
        self._server: _Server | None = None

    def start(self, address: TcpAddress) -> str:
        """Listen, and return the address with the port that was bound.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            server = _Server(address, self._timeout_s)
        except OSError as error:
            target, reason = address.grpc_target, error.strerror or error
            raise ConfigError(
                f"{self._key}: cannot listen on {target}: {reason}; is another process using it?"
            ) from error
        server.set_app(self._application)
        self._server = server
        threading.Thread(target=server.accept, name=f"gyre-{self._key}", daemon=True).start()
        return f"tcp:{address.host}:{server.server_port}"

    def stop(self) -> None:
        """Stop listening; requests in progress end with the process."""
        if self._server:
            self._server.stop()
            self._server = None


class Probes:
    """Answers to probes of a cluster's node or a load balancer.

    `/-/healthy` fails where the event loop hangs: restart the daemon. `/-/ready` also fails while
    the daemon starts, drains, or has lost a socket: send no job.

    Attributes:
        loop_lag: of the daemon's event loop.
        why_not_ready: empty while the daemon serves.
    """

    def __init__(self, loop_lag: LoopLag) -> None:
        """The daemon starts."""
        self.loop_lag = loop_lag
        self.why_not_ready = "starting"

    def answer(self, environ: _Environment, start_response: _StartResponse) -> Iterable[bytes]:
        """The WSGI application; in any thread."""
        hung = "the event loop hangs" if self.loop_lag.late_s > _HANGS_AFTER_S else ""
        problems = {
            "/-/healthy": ("healthy", hung),
            "/-/ready": ("ready", hung or self.why_not_ready),
        }
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
        if method not in ("GET", "HEAD"):
            status, text = HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD"
            headers.append(("Allow", "GET, HEAD"))
        elif path not in problems:
            status, text = HTTPStatus.NOT_FOUND, "only /-/healthy and /-/ready"
        else:
            word, problem = problems[path]
            status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
            text = f"not {word}: {problem}" if problem else word
        body = f"{text}\n".encode()
        headers.append(("Content-Length", str(len(body))))
        start_response(f"{status.value} {status.phrase}", headers)
        return [] if method == "HEAD" else [body]


def metrics_application(registry: CollectorRegistry) -> Application:
    """prometheus-client's application, with a line in the log where it would print a traceback."""
    application: Application = make_wsgi_app(registry)

    def logged(environ: _Environment, start_response: _StartResponse) -> Iterable[bytes]:
        try:
            return application(environ, start_response)
        except Exception as error:
            log_event("scrape failed", {"error": repr(error)}, logging.ERROR)
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            start_response(
                f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8")]
            )
            return [b"the metrics could not be collected; see the daemon's log\n"]

    return logged


class _Server(ThreadingWSGIServer):
    """A thread per connection, up to `MAX_CONNECTIONS`.

    One more takes the place of the oldest whose request has not arrived, or is closed at once.

    Attributes:
        timeout_s: how long a request may take to arrive, and the answer to be taken.
    """

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: TcpAddress, timeout_s: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._stopping = threading.Event()
        self._cannot_accept = False
        self._lock = threading.Lock()  # guards the two below
        self._places: set[socket.socket] = set()
        self._expected: dict[socket.socket, None] = {}  # no whole request yet; the oldest first
        self.timeout_s = timeout_s
        handler = type("Handler", (_Handler,), {"timeout": timeout_s})
        super().__init__((address.host, address.port), handler)
        self.socket.setblocking(False)  # a client may go between `select` and `accept`

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def accept(self) -> None:
        """Accept connections until `stop`."""
        while not self._stopping.is_set():
            self.handle_request()
            if self._cannot_accept:
                self._stopping.wait(_ACCEPT_PAUSE_S)
        self.server_close()

    def stop(self) -> None:
        """Listen no more; in any thread."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # `accept` wakes up

    def get_request(self) -> tuple[socket.socket, Any]:
        self._cannot_accept = False
        try:
            return super().get_request()
        except BlockingIOError:  # it has gone meanwhile
            raise
        except OSError:
            self._cannot_accept = True
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
        """Ignore the error: the client went away or was too slow."""

    def _drop(self, request: socket.socket) -> None:
        self._places.discard(request)
        self._expected.pop(request, None)


class _Arriving(io.RawIOBase):
    """The bytes of a request; reading more, or after a deadline, raises TimeoutError."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._num_left = _MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0 or self._num_left <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        try:
            num_bytes = self._connection.recv_into(buffer)
            self._num_left -= num_bytes
            return num_bytes
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
        """Nowhere: failures to collect are logged, and slow clients are not."""
        return io.StringIO()
