"""Speaks TLS for obstore, which trusts no server whose own certificate is named as `ca_file`.

rustls takes a self-signed certificate as `openssl req -x509` makes it (CA:TRUE) for an authority,
and an authority for no server. Python's `ssl` accepts it. So obstore then talks HTTP to a relay on
this host, as to a proxy, and the relay speaks TLS with the server. Our own client needs no relay.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from gyre_daemon.storage.location import endpoints_in
from gyre_daemon.storage.sources.http_options import HttpOptions

_DEADLINE_S = 10.0
_CHUNK_BYTES = 256 << 10
_END = b"\r\n\r\n"
_HOP_FIELDS = (b"connection:", b"proxy-connection:", b"keep-alive:")


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with `http` endpoints in place of `https`, at the same ports."""
    endpoints = set(endpoints_in(settings))
    return {key: _plain(value) if value in endpoints else value for key, value in settings.items()}


def _plain(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme != "https":
        return endpoint
    netloc = parts.netloc if parts.port else f"{parts.netloc}:443"
    return parts._replace(scheme="http", netloc=netloc).geturl()


def needs_relay(settings: Mapping[str, Any], options: HttpOptions) -> bool:
    """Whether the server of a dataset shows a certificate of `ca_file` itself. Waits."""
    if not options.roots or getproxies().get("https"):
        return False
    for url in map(urlsplit, endpoints_in(settings)):
        if url.scheme != "https" or not url.hostname:
            continue
        try:
            with (
                socket.create_connection((url.hostname, url.port or 443), _DEADLINE_S) as raw,
                options.tls.wrap_socket(raw, server_hostname=url.hostname) as secure,
            ):
                shown = secure.getpeercert(binary_form=True)
        except OSError:
            return False  # obstore says why
        return shown in options.root_certificates()
    return False


class TlsRelay:
    """A proxy on loopback. Used from one event loop."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        """Listen nowhere yet.

        Args:
            tls: trusts the certificates of servers.
        """
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; returns the URL of the proxy."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        """Accept nothing more."""
        if self._server:
            self._server.close()

    async def _serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        """Relay one request and its answer; the connection is not used again."""
        writers = [answers]
        try:
            async with asyncio.timeout(_DEADLINE_S):
                head = await client.readuntil(_END)
                method, target, version = head.partition(b"\r\n")[0].split(b" ")
                url = urlsplit(target.decode("ascii"))
                server, requests = await asyncio.open_connection(
                    url.hostname, url.port or 443, ssl=self._tls
                )
            writers.append(requests)
            where = url._replace(scheme="", netloc="").geturl().encode()
            requests.write(_last(b" ".join((method, where, version)), head))
            sending = asyncio.create_task(_copy(client, requests))
            receiving = asyncio.create_task(_answer(server, answers))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                sending.cancel()
                receiving.cancel()
                await asyncio.gather(sending, receiving, return_exceptions=True)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # obstore sees a closed connection, and tries again
        except asyncio.CancelledError:
            pass  # the loop ends; Python 3.11 prints the traceback of a cancelled server task
        finally:
            for writer in writers:
                writer.close()


async def _answer(server: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
    head = await server.readuntil(_END)
    answers.write(_last(head.partition(b"\r\n")[0], head))
    await _copy(server, answers)


def _last(line: bytes, head: bytes) -> bytes:
    """A head with another first line, which says that its connection is not used again."""
    fields = head.removesuffix(_END).split(b"\r\n")[1:]
    kept = [each for each in fields if not each.lower().startswith(_HOP_FIELDS)]
    return b"\r\n".join([line, *kept, b"Connection: close"]) + _END


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
