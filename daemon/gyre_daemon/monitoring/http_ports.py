"""The HTTP ports of a daemon: metrics for Prometheus at one, two probes at the other.

A thread accepts connections and others answer them, so neither a slow client nor an event loop that
hangs holds up a request. The figures of metrics belong to the event loop, which hands them over for
each scrape. Probes look at the event loop from outside; see `runtime/liveness.py`.
"""

import contextlib
import io
import socket
import threading
import time
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.listen import TcpAddress
from gyre_daemon.runtime.liveness import Application

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
