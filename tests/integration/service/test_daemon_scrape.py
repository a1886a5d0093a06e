"""The port that Prometheus scrapes: a good request, bad ones, slow ones and too many."""

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

import pytest
from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring.scrape import MAX_CONNECTIONS, ScrapeServer
from gyre_daemon.runtime.listen import TcpAddress
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
    server = ScrapeServer(registry, timeout_s)
    text = await server.start(TcpAddress(host, 0))
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
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"505"),
        (b"GET /metrics nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", b"400"),
        (b"GET /" + b"x" * (64 << 10), b"414"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (64 << 10) + b"\r\n\r\n", b"431"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", b"431"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_scrape_is_answered(
    request_bytes: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with serving() as port:
            refused = await ask(port, request_bytes)
            assert status in refused
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
        things = Things(help_bytes=num_bytes)
        async with serving(timeout_s=3.0, things=things) as port:
            with socket.create_connection(("127.0.0.1", port)) as stuck:
                stuck.sendall(ASK)
                await asyncio.to_thread(things.was_collected.wait)
                assert (await ask(port, ASK)).endswith(SAMPLE)
                await asyncio.to_thread(_await_no_request_threads)
                stuck.setblocking(False)
                num_received = 0
                with suppress(BlockingIOError, ConnectionResetError):
                    while chunk := stuck.recv(1 << 20):
                        num_received += len(chunk)
                assert num_received < num_bytes

    run(test)
    assert capfd.readouterr().err == ""


def _await_no_request_threads() -> None:
    while any("process_request_thread" in thread.name for thread in threading.enumerate()):
        time.sleep(0.05)


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
                await ScrapeServer(CollectorRegistry()).start(TcpAddress("127.0.0.1", port))

    run(test)
