"""The HTTP ports of a daemon: its metrics for Prometheus at one, two probes at the other.

Prometheus' library, whose import takes 50 ms, is imported with the first reader of metrics.

A thread with its own event loop reads requests, and others answer them, so neither a slow client
nor an event loop of the daemon that hangs holds up a request. The figures of metrics belong to that
event loop, which hands them over for each scrape. Probes look at it from outside.
"""

import asyncio
import gzip
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring.metrics import BOUNDS_S, Census, LoopLag, readings
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import TcpAddress
from gyre_daemon.runtime.threads import DaemonThreads

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Bounds the resources that strangers can take. A connection whose request is not there after
# _TIMEOUT_S is closed, and one that does not take its answer in this time: Prometheus itself gives
# up after ten seconds by default, and a daemon that needs five to answer is in trouble. Where all
# places are taken, the request expected for longest makes room for the next.
MAX_CONNECTIONS = 16
_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 64 << 10  # requests have some hundred bytes
_STOP_S = 1.0

# An event loop hangs if it is late by this much. Busy ones are late by tenths of a second; three
# probes in ten seconds each then wait as long as WatchdogSec of the systemd unit.
_HANGS_AFTER_S = 10.0
_LOOP_DEADLINE_S = 5.0  # a loop later than this has worse trouble than a missing scrape


class Answer(NamedTuple):
    """What an HTTP port answers."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    content_encoding: str = ""


# Takes a path, and the fields of the request's header by name in lower case; in any thread.
Application = Callable[[str, Mapping[str, str]], Answer]


class Probes:
    """Answers to probes of a cluster's node or a load balancer.

    `/-/healthy` fails where the event loop hangs: restart the daemon. `/-/ready` also fails while
    there is a reason in `why_not_ready`, as the daemon starts, drains, or has lost a socket.
    """

    def __init__(self, loop_lag: LoopLag) -> None:
        """The daemon starts."""
        self.loop_lag = loop_lag
        self.why_not_ready = "starting"

    def answer(self, path: str, _: Mapping[str, str]) -> Answer:
        """The `Application`."""
        hung = "the event loop hangs" if self.loop_lag.late_s > _HANGS_AFTER_S else ""
        problems = {
            "/-/healthy": ("healthy", hung),
            "/-/ready": ("ready", hung or self.why_not_ready),
        }
        if path not in problems:
            return Answer(HTTPStatus.NOT_FOUND, b"only /-/healthy and /-/ready\n")
        word, problem = problems[path]
        if problem:
            text = f"not {word}: {problem}\n"
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        return Answer(HTTPStatus.OK, f"{word}\n".encode())


class HttpPort:
    """Serves one application."""

    def __init__(self, key: str, application: Application, timeout_s: float = _TIMEOUT_S) -> None:
        """Nothing listens yet.

        Args:
            key: of the configuration, for errors.
            application: is called in threads.
            timeout_s: how long a request may take to arrive, and the answer to be taken.
        """
        self._key = key
        self._application = application
        self._timeout_s = timeout_s
        self._threads = DaemonThreads(MAX_CONNECTIONS, f"gyre-{key}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._serving: threading.Thread | None = None
        self._num_open = 0
        # those whose request has not arrived, the oldest first
        self._reading: dict[asyncio.Task[None] | None, None] = {}

    def start(self, address: TcpAddress) -> str:
        """Listen, and return the address with the port that was bound.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            bound = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            target, reason = address.grpc_target, error.strerror or error
            raise ConfigError(
                f"{self._key}: cannot listen on {target}: {reason}; is another process using it?"
            ) from error
        self._loop, name = asyncio.new_event_loop(), f"gyre-{self._key}"
        work = partial(self._run, self._loop, bound)
        self._serving = threading.Thread(target=work, name=name, daemon=True)
        self._serving.start()
        return f"tcp:{address.host}:{bound.getsockname()[1]}"

    def stop(self) -> None:
        """Stop listening; requests in progress get no answer."""
        if self._serving and self._loop:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._serving.join(_STOP_S)
            self._serving = None

    def _run(self, loop: asyncio.AbstractEventLoop, bound: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._listen(bound))

    async def _listen(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # the client went away, or was too slow
        server = await asyncio.start_server(self._serve, sock=bound, limit=_MAX_REQUEST_BYTES)
        await self._stopping.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= MAX_CONNECTIONS:
            oldest = next(iter(self._reading), None)
            if oldest is None:
                writer.transport.abort()
                return
            del self._reading[oldest]
            oldest.cancel()
        self._num_open += 1
        try:
            request = await self._request(reader)
            writer.write(await self._threads.run(self._answer, request))
            async with asyncio.timeout(self._timeout_s):
                writer.close()
                await writer.wait_closed()
        finally:
            self._num_open -= 1
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        """The line and the fields of a request, when all of them have arrived."""
        task = asyncio.current_task()
        self._reading[task] = None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await reader.readuntil(b"\r\n\r\n")
        finally:
            self._reading.pop(task, None)

    def _answer(self, request: bytes) -> bytes:
        """Call the application; in any thread."""
        line, *rest = request.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        target, _, version = target.partition(" ")
        if not version.startswith("HTTP/1."):
            answer = Answer(HTTPStatus.BAD_REQUEST, b"no request of HTTP/1\n")
        elif method not in ("GET", "HEAD"):
            answer = Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD\n")
        else:
            pairs = (each.partition(":") for each in rest)
            fields = {name.lower(): value.strip() for name, _, value in pairs}
            answer = self._application(target.partition("?")[0], fields)
        status, body, content_type, encoding = answer
        head = (
            f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\n"
        )
        if encoding:
            head += f"Content-Encoding: {encoding}\r\n"
        return f"{head}\r\n".encode("latin-1") + (b"" if method == "HEAD" else body)


def families(census: Census) -> "Iterator[Metric]":
    """All metrics of a daemon except those of its process, in order of their first fields."""
    from prometheus_client import core  # noqa: PLC0415

    kinds = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
    found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for metric, labels, value in readings(census):
        if metric.name not in found:
            found[metric.name] = kinds[metric.kind](
                metric.name, metric.meaning, labels=list(labels)
            )
        found[metric.name].add_metric(list(labels.values()), float(value))
    lag, bounds = census.loop_lag, [*map(str, BOUNDS_S), "+Inf"]
    yield core.InfoMetricFamily("gyre_build", "The version of Gyre.", {"version": census.version})
    yield from found.values()
    yield core.HistogramMetricFamily(
        "gyre_event_loop_lag_seconds",
        "How late a timer of the daemon's event loop is.",
        list(zip(bounds, [*lag.at_most, lag.num_timers], strict=True)),
        lag.sum_s,
    )


def new_registry(take_census: Callable[[], Census]) -> "CollectorRegistry":
    """The metrics of a daemon and of its process.

    Made on the event loop, which takes each census. Any other thread may collect them; that raises
    TimeoutError if the loop does not answer in time.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector  # noqa: PLC0415
    from prometheus_client.registry import Collector  # noqa: PLC0415

    loop = asyncio.get_running_loop()

    async def take() -> "list[Metric]":
        return list(families(take_census()))

    class DaemonCollector(Collector):
        def collect(self) -> "Iterable[Metric]":
            return asyncio.run_coroutine_threadsafe(take(), loop).result(_LOOP_DEADLINE_S)

        def describe(self) -> "Iterable[Metric]":
            return []  # registering takes no census

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(DaemonCollector())
    return registry


def metrics_application(registry: "CollectorRegistry") -> Application:
    """Answers every path with the metrics, in the form that the scraper accepts."""
    from prometheus_client.exposition import choose_encoder  # noqa: PLC0415

    def answer(_: str, fields: Mapping[str, str]) -> Answer:
        try:
            encode, content_type = choose_encoder(fields.get("accept", ""))
            body = encode(registry)
        except Exception as error:
            log_event("scrape failed", {"error": repr(error)}, logging.ERROR)
            text = b"the metrics could not be collected; see the daemon's log\n"
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, text)
        if "gzip" in fields.get("accept-encoding", ""):
            return Answer(HTTPStatus.OK, gzip.compress(body), content_type, "gzip")
        return Answer(HTTPStatus.OK, body, content_type)

    return answer
