"""The client for plain HTTP against servers that answer odd things.

A wrong byte is never taken for a right one.
"""

import asyncio
import contextlib
import mmap
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import pytest
from gyre_daemon.storage.response import Response
from gyre_daemon.storage.shard import Validators
from gyre_daemon.storage.sources.plain_http import (
    _MIN_MAPPED_BYTES,
    MAX_CONNECTING,
    ConnectionBudget,
    HttpGet,
    PlainHttp,
)

from tests.contract.places import noise

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = (
    b'HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\neTaG: "x"\r\n'
    b"content-range: bytes 3-7/99\r\n\r\n12345"
)
REQUEST = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


async def ask(http: PlainHttp, max_bytes: int = 5) -> Response:
    answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
    get = HttpGet(REQUEST, max_bytes, answered.set_result)
    http.send(get)
    answer = await answered
    assert get.first_byte_at is not None
    return answer


def converse(talk: Talk, num_asked: int = 1, max_bytes: int = 5) -> tuple[list[Response], int]:
    """The response to each request to a server, and how many connections were made."""

    async def run() -> tuple[list[Response], int]:
        num_connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            try:
                await talk(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = PlainHttp(
            urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),
            ConnectionBudget(1000),
        )
        try:
            return [await ask(http, max_bytes) for _ in range(num_asked)], num_connections
        finally:
            http.close()
            server.close()
            await asyncio.sleep(0.02)

    return asyncio.run(asyncio.wait_for(run(), 120))


def saying(*pieces: bytes, hang_up: bool = False) -> Talk:
    """A server that answers every request with these pieces, each in a packet of its own."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            if hang_up:
                return

    return talk


def test_a_connection_is_used_again() -> None:
    answers, num_connections = converse(saying(WHOLE), 5)
    assert answers == [Response(206, b"12345", Validators('"x"'), 99)] * 5
    assert num_connections == 1


def test_a_waiting_request_takes_the_first_free_connection() -> None:
    """The number being opened is bounded; one that has delivered a response serves the next."""

    async def run() -> None:
        is_open, three, num_connections = asyncio.Event(), asyncio.Event(), 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            if num_connections == 3:
                three.set()
            await is_open.wait()
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await saying(WHOLE)(reader, writer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = PlainHttp(
            urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),
            ConnectionBudget(1000),
        )
        http.connect(3)
        await three.wait()
        is_open.set()
        await asyncio.sleep(0.02)
        answers = await asyncio.gather(*(ask(http) for _ in range(3)))
        assert [answer.data for answer in answers] == [b"12345"] * 3
        assert num_connections == 3
        answers = await asyncio.gather(*(ask(http) for _ in range(3 * MAX_CONNECTING)))
        assert [answer.data for answer in answers] == [b"12345"] * (3 * MAX_CONNECTING)
        assert num_connections < 3 * MAX_CONNECTING
        http.close()
        server.close()
        await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_two_hosts_share_few_connections_and_both_are_answered() -> None:
    async def run() -> None:
        num_open = most_open = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_open, most_open
            num_open += 1
            most_open = max(most_open, num_open)
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await saying(WHOLE)(reader, writer)
            num_open -= 1
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connections = ConnectionBudget(4)
        first, second = PlainHttp(url, connections), PlainHttp(url, connections)
        first.connect(4)  # and has nothing to ask yet
        await asyncio.sleep(0.02)
        for _ in range(3):
            answers = await asyncio.gather(*(ask(http) for http in [first, second] * 20))
            assert [answer.data for answer in answers] == [b"12345"] * 40
        assert most_open <= 4 + 4, "the server hears of an end a little later"
        first.close()
        second.close()
        await asyncio.sleep(0.02)
        assert connections.num_left == 4
        server.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_cancelled_requests_do_not_delay_others() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await saying(WHOLE)(reader, writer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = PlainHttp(
            urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),
            ConnectionBudget(1000),
        )
        given_up = [
            HttpGet(REQUEST, 5, lambda answer: pytest.fail("nobody waits"))
            for _ in range(MAX_CONNECTING)
        ]
        for get in given_up:
            http.send(get)
            get.cancel()
        assert (await ask(http)).data == b"12345"
        http.close()
        server.close()
        await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("cut", range(1, len(WHOLE), 7))
def test_a_response_may_arrive_in_pieces(cut: int) -> None:
    answers, num_connections = converse(saying(WHOLE[:cut], WHOLE[cut:]), 2)
    assert answers == [Response(206, b"12345", Validators('"x"'), 99)] * 2
    assert num_connections == 1


@pytest.mark.parametrize("num_bytes", [_MIN_MAPPED_BYTES - 1, _MIN_MAPPED_BYTES, 300_000])
def test_a_long_body_is_received_whole_into_memory_that_the_system_gets_back(
    num_bytes: int,
) -> None:
    body = noise(1, num_bytes)
    head = b"HTTP/1.1 206 P\r\nContent-Length: %d\r\n\r\n" % num_bytes
    for pieces in [(head, body[:7], body[7:]), (head + body[:50_000], body[50_000:])]:
        answers, num_connections = converse(saying(*pieces), 2, num_bytes)
        assert [bytes(answer.data) for answer in answers] == [body] * 2
        assert num_connections == 1
        is_mapped = [isinstance(answer.data, mmap.mmap) for answer in answers]
        assert is_mapped == [num_bytes >= _MIN_MAPPED_BYTES] * 2
    for wrong in [body[:-1], body + b"more"]:
        (answer,), _ = converse(
            saying(head + wrong[:1000], wrong[1000:-1], wrong[-1:], hang_up=True), 1, num_bytes
        )
        assert bytes(answer.data[:num_bytes]) == (body if len(wrong) > num_bytes else b"")


@pytest.mark.parametrize("more", [b"Connection: close\r\n", b"connection: Close\r\n"])
def test_a_connection_that_the_server_closes_is_not_used_again(more: bytes) -> None:
    whole = WHOLE.replace(b"Content-Length", more + b"Content-Length")
    answers, num_connections = converse(saying(whole, hang_up=True), 3)
    assert [answer.data for answer in answers] == [b"12345"] * 3
    assert num_connections == 3


def test_an_old_server_closes_after_each_response() -> None:
    answers, num_connections = converse(saying(WHOLE.replace(b"1.1", b"1.0"), hang_up=True), 2)
    assert [answer.data for answer in answers] == [b"12345"] * 2
    assert num_connections == 2


@pytest.mark.parametrize(
    ("words", "detail"),
    [
        (b"", "closed before the response was complete"),
        (WHOLE[:20], "closed before the response was complete"),
        (WHOLE[:-1], "closed before the response was complete"),
        (b"HTTP/2 206\r\nContent-Length: 5\r\n\r\n12345", "not HTTP"),
        (b"\x16\x03\x01 what is this?\r\n\r\n", "not HTTP"),
        (b"x" * 100_000, "not HTTP"),
        (b"HTTP/1.1 206 P\r\n\r\n12345", "does not say how long"),
        (b"HTTP/1.1 206 P\r\nContent-Length: five\r\n\r\n12345", "does not say how long"),
        (b"HTTP/1.1 206 P\r\nContent-Length: -5\r\n\r\n12345", "does not say how long"),
        (
            b"HTTP/1.1 206 P\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n",
            "does not say how long",
        ),
        (
            WHOLE.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"),
            "does not say how long",
        ),
    ],
)
def test_an_incomplete_or_malformed_response_is_a_failure(words: bytes, detail: str) -> None:
    (answer,), _ = converse(saying(words, hang_up=True))
    assert answer.status == 0
    assert answer.data == b""
    assert detail in answer.detail


def test_bytes_after_a_response_are_ignored() -> None:
    answers, num_connections = converse(saying(WHOLE + b"67890"), 2)
    assert [answer.data[:5] for answer in answers] == [b"12345"] * 2
    assert num_connections == 2


def test_a_body_longer_than_the_range_is_not_read() -> None:
    """Servers without support for ranges send one."""
    (answer,), _ = converse(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n1234567"))
    assert (answer.status, len(answer.data)) == (200, 7)


@pytest.mark.parametrize("length", [b"Content-Length: 4", b"Transfer-Encoding: chunked"])
def test_a_refusal_keeps_its_status_however_its_body_is_framed(length: bytes) -> None:
    (answer,), _ = converse(saying(b"HTTP/1.1 503 Slow Down\r\n" + length + b"\r\n\r\nslow"))
    assert (answer.status, answer.data) == (503, b"")
    assert "slow" in answer.detail


def test_a_port_without_a_server() -> None:
    async def run() -> Response:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await ask(PlainHttp(urlsplit(f"http://127.0.0.1:{port}"), ConnectionBudget(1000)))

    answer = asyncio.run(run())
    assert answer.unreachable
    assert "ConnectionRefusedError" in answer.detail


def test_a_cancelled_request_gets_no_response_and_its_connection_is_used_again() -> None:
    async def run() -> tuple[list[Response], int]:
        told: list[Response] = []
        num_connections = 0
        asked, may_answer = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            while await reader.read(1000):
                asked.set()
                await may_answer.wait()
                writer.write(WHOLE)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = PlainHttp(
            urlsplit(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"),
            ConnectionBudget(1000),
        )
        get = HttpGet(REQUEST, 5, told.append)
        http.send(get)
        await asked.wait()
        get.cancel()
        may_answer.set()
        await asyncio.sleep(0.05)
        assert not told
        told.append(await ask(http))
        http.close()
        server.close()
        await asyncio.sleep(0.02)
        return told, num_connections

    told, num_connections = asyncio.run(run())
    assert [answer.data for answer in told] == [b"12345"]
    assert num_connections == 1
