"""Answers scrapes: GET /metrics over HTTP/1.1 and nothing else, in the daemon's event loop, within limits of time and size.

A scrape is a short answer to a short question, and the numbers belong to the event loop. So no HTTP framework and no thread:
what is not a whole question of the right kind within the limits gets one line and is hung up on.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.listen import TcpAddress

MAX_HEAD_BYTES = 8 << 10
MAX_CONNECTIONS = 16
_TIMEOUT_S = 5.0

Answer = Callable[[str], tuple[bytes, str]]


class ScrapeServer:
    """Listens on one port."""

    def __init__(self, answer: Answer, timeout_s: float = _TIMEOUT_S) -> None:
        """Not listening yet.

        Args:
            answer: gives body and content type for the value of a request's Accept header.
            timeout_s: for a question to come, and again for its answer to be taken.
        """
        self._answer = answer
        self._timeout_s = timeout_s
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self, address: TcpAddress) -> str:
        """Listen; gives the address with the port that it is.

        Raises:
            ConfigError: the address cannot be had.
        """
        try:
            self._server = await asyncio.start_server(self._serve, address.host, address.port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            target, reason = address.grpc_target, error.strerror or error
            raise ConfigError(f"metrics_listen: cannot listen on {target}: {reason}; is another process using it?") from error
        return f"tcp:{address.host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Listen no longer, and leave whoever is connected."""
        if self._server:
            self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._connections[task] = writer
        try:
            is_crowded = len(self._connections) > MAX_CONNECTIONS
            writer.write(_refusal(HTTPStatus.SERVICE_UNAVAILABLE) if is_crowded else await self._respond(reader))
            async with asyncio.timeout(self._timeout_s):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # it went away, or takes nothing
        finally:
            writer.transport.abort()
            del self._connections[task]

    async def _respond(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return _refusal(HTTPStatus.REQUEST_TIMEOUT)
        except asyncio.LimitOverrunError:
            return _refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except asyncio.IncompleteReadError:
            return _refusal(HTTPStatus.BAD_REQUEST)
        return self._answer_to(head)

    def _answer_to(self, head: bytes) -> bytes:
        request, *fields = head.decode("latin-1").split("\r\n")
        match request.split(" "):
            case ["GET", target, "HTTP/1.1" | "HTTP/1.0"] if target.partition("?")[0] == "/metrics":
                pass
            case ["GET", _, "HTTP/1.1" | "HTTP/1.0"]:
                return _refusal(HTTPStatus.NOT_FOUND)
            case [_, _, "HTTP/1.1" | "HTTP/1.0"]:
                return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "Allow: GET\r\n")
            case _:
                return _refusal(HTTPStatus.BAD_REQUEST)
        try:
            body, content_type = self._answer(_accepted(fields))
        except Exception as error:
            log_event("scrape failed", {"error": repr(error)}, logging.ERROR)
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, content_type, body)


def _accepted(fields: list[str]) -> str:
    """The value of the Accept header; empty where there is none."""
    pairs = (field.partition(":") for field in fields)
    return next((value.strip() for name, _, value in pairs if name.lower() == "accept"), "")


def _refusal(status: HTTPStatus, more: str = "") -> bytes:
    body = f"{status.value} {status.phrase}; ask with GET /metrics\n".encode()
    return _response(status, "text/plain; charset=utf-8", body, more)


def _response(status: HTTPStatus, content_type: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}Connection: close\r\n\r\n".encode("latin-1") + body
