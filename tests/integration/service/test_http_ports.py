"""The ports of metrics and probes: good requests, bad ones, slow ones and too many."""

import asyncio
import gzip
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import pytest
from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring import http_ports
from gyre_daemon.monitoring.http_ports import (
    MAX_CONNECTIONS,
    Application,
    HttpPort,
    Probes,
    metrics_application,
)
from gyre_daemon.monitoring.metrics import LoopLag
from gyre_daemon.runtime.listen import TcpAddress
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tests.waiting import until

SAMPLE = b"gyre_things 1.0\n"
ASK = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


class Things(Collector):
    """One metric, which may fail, or be long when it is collected for the first time."""

    def __init__(self, help_bytes: int = 0, error: Exception | None = None) -> None:
        self._help = "x" * help_bytes
        self._error = error
        self.was_collected = threading.Event()

    def collect(self) -> Iterable[Metric]:
        if self._error:
            raise self._error
        text, self._help = self._help, ""
        self.was_collected.set()
        return [GaugeMetricFamily("gyre_things", text, 1)]

    def describe(self) -> Iterable[Metric]:
        return []


@asynccontextmanager
async def serving(
    timeout_s: float = 30.0, things: Collector | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    registry.register(things or Things())
    async with listening(metrics_application(registry), timeout_s, host) as port:
        yield port


@asynccontextmanager
async def listening(
    application: Application, timeout_s: float = 30.0, host: str = "127.0.0.1"
) -> AsyncIterator[int]:
    server = HttpPort("metrics_listen", application, timeout_s)
    text = server.start(TcpAddress(host, 0))
    assert text.startswith(f"tcp:{host}:")
    try:
        yield int(text.rpartition(":")[2])
    finally:
        server.stop()


async def ask(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """All that comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def test_a_port_that_nothing_asks_takes_no_processor_time() -> None:
    async def test() -> None:
        async with serving() as port:
            assert SAMPLE in await ask(port, ASK)
            before_s = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before_s < 0.2

    run(test)


def test_clients_that_reset_their_connection_at_once_hold_nobody_up() -> None:
    async def test() -> None:
        async with serving() as port:
            for _ in range(100):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    reset = struct.pack("ii", 1, 0)  # no time to linger
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            assert SAMPLE in await ask(port, ASK)

    run(test)


def test_a_scrape_is_answered_in_the_text_format() -> None:
    async def test() -> None:
        async with serving() as port:
            head, _, body = (await ask(port, ASK)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 200 OK\r\n")
            assert b"Content-Type: text/plain; version=" in head
            assert b"Content-Length: %d" % len(body) in head
            assert body.endswith(SAMPLE)

    run(test)


def test_a_scrape_may_ask_for_openmetrics_and_for_gzip() -> None:
    async def test() -> None:
        async with serving() as port:
            request = ASK[:-2] + b"Accept: application/openmetrics-text;version=1.0.0\r\n"
            head, _, body = (await ask(port, request + b"\r\n")).partition(b"\r\n\r\n")
            assert b"Content-Type: application/openmetrics-text; version=1.0.0" in head
            assert body.endswith(b"# EOF\n")
            zipped = await ask(port, ASK[:-2] + b"Accept-Encoding: gzip\r\n\r\n")
            head, _, body = zipped.partition(b"\r\n\r\n")
            assert b"Content-Encoding: gzip" in head
            assert gzip.decompress(body).endswith(SAMPLE)

    run(test)


def test_it_listens_on_ipv6_too() -> None:
    async def test() -> None:
        async with serving(host="::1") as port:
            assert (await ask(port, ASK, "::1")).endswith(SAMPLE)

    run(test)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400"),
        (b"GET /metrics nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", b"400"),
        (b"GET /" + b"x" * (64 << 10), b""),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (64 << 10) + b"\r\n\r\n", b""),
        (b"GET /metrics HTTP/1.1\r\n" + (b"X: " + b"x" * (60 << 10) + b"\r\n") * 3, b""),
    ],
)
def test_a_bad_request_is_refused_and_the_next_scrape_is_answered(
    request_bytes: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with serving() as port:
            refused = b""
            with suppress(ConnectionError):
                refused = await ask(port, request_bytes)
            assert status in refused
            assert b"200 OK" not in refused
            assert b"Traceback" not in refused
            assert (await ask(port, ASK)).endswith(SAMPLE)

    run(test)
    assert capfd.readouterr().err == "", "the daemon's log has its own form"


def test_a_failure_to_collect_is_logged_and_told(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with serving(things=Things(error=ZeroDivisionError("nonsense"))) as port:
            head, _, body = (await ask(port, ASK)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 500 Internal Server Error\r\n")
            assert b"nonsense" not in body

    run(test)
    assert "scrape failed" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_that_does_not_end_is_not_waited_for() -> None:
    async def test() -> None:
        async with serving(timeout_s=0.2) as port:
            assert await ask(port, b"GET /metrics HT") == b""
            assert await ask(port, b"") == b""
            assert (await ask(port, ASK)).endswith(SAMPLE)

    run(test)


def test_a_scraper_that_takes_no_answer_is_disconnected_and_holds_nobody_up(
    capfd: pytest.CaptureFixture[str],
) -> None:
    num_bytes = 64 << 20

    async def test() -> None:
        things, registry = Things(help_bytes=num_bytes), CollectorRegistry()
        registry.register(things)
        server = HttpPort("metrics_listen", metrics_application(registry), 3.0)
        port = int(server.start(TcpAddress("127.0.0.1", 0)).rpartition(":")[2])
        try:
            with socket.create_connection(("127.0.0.1", port)) as stuck:
                stuck.sendall(ASK)
                await asyncio.to_thread(things.was_collected.wait)
                assert (await ask(port, ASK)).endswith(SAMPLE)
                await asyncio.to_thread(until, lambda: not server._num_open)
                stuck.setblocking(False)
                num_received = 0
                with suppress(BlockingIOError, ConnectionResetError):
                    while chunk := stuck.recv(1 << 20):
                        num_received += len(chunk)
                assert num_received < num_bytes
        finally:
            server.stop()

    run(test)
    assert capfd.readouterr().err == ""


async def is_turned_away(port: int) -> bool:
    """Whether a scrape is hung up on without an answer."""
    try:
        answered = await ask(port, ASK)
    except ConnectionError:
        return True
    assert not answered or answered.endswith(SAMPLE)
    return not answered


class Slow(Collector):
    """A metric that is collected when the test says so."""

    def __init__(self) -> None:
        self.num_begun = threading.Semaphore(0)
        self.may_end = threading.Event()

    def collect(self) -> Iterable[Metric]:
        self.num_begun.release()
        self.may_end.wait()
        return [GaugeMetricFamily("gyre_things", "", 1)]

    def describe(self) -> Iterable[Metric]:
        return []


def test_connections_are_bounded_and_freed_when_they_are_answered() -> None:
    async def test() -> None:
        slow = Slow()
        async with serving(things=slow) as port:
            asked = [asyncio.create_task(ask(port, ASK)) for _ in range(MAX_CONNECTIONS)]
            for _ in range(MAX_CONNECTIONS):
                await asyncio.to_thread(slow.num_begun.acquire)
            assert await is_turned_away(port)
            slow.may_end.set()
            for answer in await asyncio.gather(*asked):
                assert answer.endswith(SAMPLE)
            while await is_turned_away(port):
                pass  # the server does not know yet that all of them are gone

    run(test)


def test_clients_that_send_a_byte_now_and_then_shut_no_scraper_out() -> None:
    async def test() -> None:
        async with serving() as port:
            slow = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_CONNECTIONS)
            ]
            for _ in range(10):
                for _, writer in slow:
                    with suppress(ConnectionError):
                        writer.write(b"G")
                assert (await ask(port, ASK)).endswith(SAMPLE)
            for _, writer in slow:
                writer.close()

    run(test)


def test_a_request_that_arrives_byte_by_byte_is_given_up() -> None:
    async def test() -> None:
        async with serving(timeout_s=0.5) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            sending = asyncio.create_task(send_for_ever(writer))
            with suppress(ConnectionError):
                assert await reader.read() == b""
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()

    run(test)


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /metrics HTTP/1.1\r\nX: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


def test_nothing_listens_after_the_server_was_stopped() -> None:
    async def test() -> None:
        async with serving() as port:
            assert (await ask(port, ASK)).endswith(SAMPLE)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    run(test)


def test_a_port_in_use_is_named() -> None:
    async def test() -> None:
        async with serving() as port:
            with pytest.raises(
                ConfigError, match=f"metrics_listen: cannot listen on 127.0.0.1:{port}"
            ):
                HttpPort("metrics_listen", Probes(LoopLag()).answer).start(
                    TcpAddress("127.0.0.1", port)
                )

    run(test)


@pytest.fixture
def probes() -> Probes:
    return Probes(LoopLag())


@pytest.mark.parametrize("why_not_ready", ["", "starting", "draining"])
def test_probes_are_answered(probes: Probes, why_not_ready: str) -> None:
    probes.why_not_ready = why_not_ready

    async def test() -> None:
        async with listening(probes.answer) as port:
            for path, problem in (("/-/healthy", ""), ("/-/ready", why_not_ready)):
                head, _, body = (
                    await ask(port, b"GET %b HTTP/1.1\r\n\r\n" % path.encode())
                ).partition(b"\r\n\r\n")
                assert head.split()[1] == (b"503" if problem else b"200")
                assert problem in body.decode()
                assert b"\r\nContent-Length: %d" % len(body) in head
                alone = await ask(port, b"HEAD %b?x=y HTTP/1.1\r\n\r\n" % path.encode())
                assert alone.partition(b"\r\nContent-Type")[0].split()[1] == head.split()[1]
                assert alone.endswith(b"\r\n\r\n"), "no body"

    run(test)


def test_the_port_of_probes_has_nothing_else(probes: Probes) -> None:
    probes.why_not_ready = ""

    async def test() -> None:
        async with listening(probes.answer) as port:
            for request, status in (
                (b"GET /metrics", b"404"),
                (b"GET /-/ready/", b"404"),
                (b"GET /", b"404"),
                (b"POST /-/ready", b"405"),
                (b"PUT /-/healthy", b"405"),
            ):
                answer = await ask(port, request + b" HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
                assert answer.split()[1] == status
                assert b"gyre_" not in answer

    run(test)


def test_an_event_loop_that_hangs_is_neither_healthy_nor_ready(
    probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_ports, "_HANGS_AFTER_S", 1.0)
    probes.why_not_ready = ""

    def statuses(port: int) -> list[bytes]:
        found = []
        for path in (b"/-/healthy", b"/-/ready"):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                client.sendall(b"GET %b HTTP/1.1\r\n\r\n" % path)
                found.append(client.recv(4096).split()[1])
        return found

    async def test() -> None:
        watching = asyncio.create_task(probes.loop_lag.watch())
        async with listening(probes.answer) as port:
            while await asyncio.to_thread(statuses, port) != [b"200", b"200"]:
                pass
            hung = threading.Thread(target=until, args=[lambda: statuses(port) == [b"503"] * 2])
            hung.start()
            hung.join(60)  # the event loop waits
            assert not hung.is_alive()
            while await asyncio.to_thread(statuses, port) != [b"200", b"200"]:
                pass
        watching.cancel()

    run(test)
