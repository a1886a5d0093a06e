"""The port that Prometheus asks, by bytes on a socket: one good question, and every bad one."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from gyre_daemon.errors import ConfigError
from gyre_daemon.monitoring.scrape import MAX_CONNECTIONS, MAX_HEAD_BYTES, ScrapeServer
from gyre_daemon.runtime.listen import TcpAddress

BODY = b"gyre_things 1\n"
ASK = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


def answer(accept: str) -> tuple[bytes, str]:
    if accept == "nonsense":
        raise ZeroDivisionError
    return BODY + accept.encode(), "text/plain"


@asynccontextmanager
async def serving(timeout_s: float = 30.0, reply: Callable[[str], tuple[bytes, str]] = answer) -> AsyncIterator[int]:
    server = ScrapeServer(reply, timeout_s)
    text = await server.start(TcpAddress("127.0.0.1", 0))
    try:
        yield int(text.rpartition(":")[2])
    finally:
        await server.stop()


async def ask(port: int, request: bytes) -> bytes:
    """All that comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def test_a_scrape() -> None:
    async def test() -> None:
        async with serving() as port:
            head, _, body = (await ask(port, ASK)).partition(b"\r\n\r\n")
            assert head.split(b"\r\n") == [
                b"HTTP/1.1 200 OK",
                b"Content-Type: text/plain",
                b"Content-Length: %d" % len(BODY),
                b"Connection: close",
            ]
            assert body == BODY
            for request in (
                b"GET /metrics?collect=all HTTP/1.0\r\nACCEPT:  a/b \r\n\r\n",
                b"GET /metrics HTTP/1.1\r\nX-Accept: no\r\nAccept: a/b\r\nAccept-Encoding: gzip\r\n\r\n",
            ):
                assert (await ask(port, request)).endswith(b"\r\n\r\n" + BODY + b"a/b")

    run(test)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"GET /metrics/../secret HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405 Method Not Allowed"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics\r\n\r\n", b"400 Bad Request"),
        (b"\r\n\r\n", b"400 Bad Request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400 Bad Request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n", b"400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES, b"431 Request Header Fields Too Large"),
        (b"x" * (4 * MAX_HEAD_BYTES), b"431 Request Header Fields Too Large"),
        (b"GET /metrics HTTP/1.1\r\nAccept: nonsense\r\n\r\n", b"500 Internal Server Error"),
    ],
)
def test_anything_else_is_refused_and_harms_nothing(request_bytes: bytes, status: bytes) -> None:
    async def test() -> None:
        async with serving() as port:
            refused = await ask(port, request_bytes)
            assert refused.startswith(b"HTTP/1.1 " + status + b"\r\n")
            assert b"Traceback" not in refused
            assert (await ask(port, ASK)).endswith(BODY)

    run(test)


def test_a_question_that_does_not_end_is_not_waited_for() -> None:
    async def test() -> None:
        async with serving(timeout_s=0.2) as port:
            assert (await ask(port, b"GET /metrics HT")).startswith(b"HTTP/1.1 408 ")
            assert (await ask(port, b"")).startswith(b"HTTP/1.1 408 ")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\n")
            writer.write_eof()
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    run(test)


def test_who_takes_no_answer_is_hung_up_on() -> None:
    async def test() -> None:
        async with serving(timeout_s=0.2, reply=lambda accept: (bytes(64 << 20), "text/plain")) as port:
            with socket.create_connection(("127.0.0.1", port)) as stuck:
                stuck.sendall(ASK)
                stuck.setblocking(False)
                num_bytes = 0
                while True:  # at last the connection breaks: what the kernel did not take was thrown away
                    await asyncio.sleep(0.3)
                    try:
                        chunk = stuck.recv(1 << 20)
                    except BlockingIOError:
                        continue
                    except ConnectionResetError:
                        break
                    num_bytes += len(chunk)
                    if not chunk:
                        break
            assert num_bytes < 64 << 20

    run(test)


async def is_turned_away(port: int) -> bool:
    """Whether a scrape gets 503, or, where its question was not even read, a reset."""
    try:
        answered = await ask(port, ASK)
    except ConnectionResetError:
        return True
    assert answered.endswith(BODY) or answered.startswith(b"HTTP/1.1 503 ")
    return not answered.endswith(BODY)


def test_connections_are_bounded_and_a_scrape_comes_through_when_the_silent_ones_are_gone() -> None:
    async def test() -> None:
        async with serving() as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
            while not await is_turned_away(port):
                pass  # not all of them have been accepted
            for _, writer in silent:
                writer.close()
                await writer.wait_closed()
            while await is_turned_away(port):
                pass  # not all of them are known to be gone

    run(test)


def test_stopping_leaves_nobody_connected() -> None:
    async def test() -> None:
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await ask(port, ASK)
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    run(test)


def test_a_port_in_use_is_named() -> None:
    async def test() -> None:
        async with serving() as port:
            with pytest.raises(ConfigError, match=f"metrics_listen: cannot listen on 127.0.0.1:{port}"):
                await ScrapeServer(answer).start(TcpAddress("127.0.0.1", port))

    run(test)
