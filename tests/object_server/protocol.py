"""HTTP/1.1 as the server speaks it: one request at a time on a connection, kept open."""

import asyncio
import contextlib
import functools
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import ClassVar, cast
from urllib.parse import unquote

from tests.object_server.objects import Objects, Stored
from tests.object_server.script import Counts, Director, Rule, Script, Tells

ADMIN = "/-/"
_METADATA = "/latest/"
_LENGTH = re.compile(rb"\r\nContent-Length: *(\d+)", re.IGNORECASE)
_RANGE = re.compile(rb"\r\nRange: *bytes=(\d*)-(\d*)", re.IGNORECASE)
_KEY = re.compile(rb"(?:Credential=|X-Amz-Credential=)([^/%&,\s]+)", re.IGNORECASE)
_IF_MATCH = re.compile(rb"\r\nIf-Match: *([^\r]*)", re.IGNORECASE)
_HANG_UP = struct.pack("ii", 1, 0)  # SO_LINGER: a close is a reset
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content"}


class Connection(asyncio.Protocol):
    """One client's connection."""

    open_connections: ClassVar[set["Connection"]] = set()

    def __init__(self, objects: Objects, director: Director) -> None:
        self._objects = objects
        self._director = director
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()  # of a request that is not whole
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = False  # a read of an object was begun and is not answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self.open_connections.add(self)
        self._director.counts.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.discard(self)
        if self._timer:
            self._timer.cancel()
        self._end_read()

    def data_received(self, data: bytes) -> None:
        if self._received or not (data.startswith(b"GET ") and data.endswith(b"\r\n\r\n")):
            self._received += data
            data = self._whole_request()
        if data:
            end = data.find(b"\r\n\r\n")
            self._answer(data[: end + 2], data[end + 4 :])

    def _whole_request(self) -> bytes:
        """What was received, if it is a whole request; else nothing."""
        received = self._received
        end = received.find(b"\r\n\r\n")
        length = _LENGTH.search(received[: end + 2]) if end >= 0 else None
        if end < 0 or len(received) < end + 4 + (int(length[1]) if length else 0):
            return b""
        self._received = bytearray()
        return bytes(received)

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path, query = _request_line(head[: head.index(b"\r\n")])
        if path.startswith(ADMIN):
            self._administer(method, path.removeprefix(ADMIN), body)
        elif path.startswith(_METADATA):
            self._send(200, _metadata(path, self._director.script.issued_key))
        elif not self._is_allowed(head):
            refusal = self._director.script.refusal
            self._send(403, f"<Error><Code>{refusal}</Code></Error>".encode())
        elif method == "PUT":
            self._objects.put(path, body)
            self._send(200, b"")
        elif method == "DELETE":
            self._objects.delete(path)
            self._send(204, b"")
        elif "list-type=2" in query:
            self._send(200, self._list(path, query))
        else:
            self._answer_read(method, path, head)

    def _list(self, path: str, query: str) -> bytes:
        return self._objects.list_bucket(path.strip("/"), query, self._director.script.lists)

    def _is_allowed(self, head: bytes) -> bool:
        accepted = self._director.script.accepted_key
        key = _KEY.search(head)
        return not accepted or (key is not None and key[1].decode() == accepted)

    def _answer_read(self, method: str, path: str, head: bytes) -> None:
        stored = self._objects.get(path)
        rule = None
        if method == "GET":
            rule = self._director.begin(path)
            self._is_reading = True
        delay_s = self._director.first_byte_s() + (
            rule.delay_s if rule and rule.fault == "delay" else 0.0
        )
        if rule and rule.fault == "silence":
            return
        if delay_s:
            self._timer = self._loop.call_later(
                delay_s, self._send_read, method, stored, head, rule
            )
        else:
            self._send_read(method, stored, head, rule)

    def _send_read(
        self, method: str, stored: Stored | None, head: bytes, rule: Rule | None
    ) -> None:
        if rule is None or rule.fault != "slow":
            self._end_read()
        if rule and rule.fault == "status":
            self._send(rule.status, b"<Error><Code>SlowDown</Code></Error>")
            return
        if stored is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if (wanted := _IF_MATCH.search(head)) and wanted[1].decode() != stored.etag:
            self._send(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        size = len(stored.data)
        begin, end, is_part = _range(head, size)
        if begin >= size > 0:
            self._send(416, b"<Error><Code>InvalidRange</Code></Error>")
            return
        body = stored.data[begin:end]
        etag = '"another"' if rule and rule.fault == "other etag" else stored.etag
        about = _told(self._director.script.tells, stored, etag) + "Accept-Ranges: bytes\r\n"
        status = 200
        if is_part:
            status, about = 206, about + f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
        if method == "HEAD":
            self._send(status, b"", about, declared=len(body))
        else:
            self._send_body(status, about, body, rule)

    def _send_body(self, status: int, about: str, body: memoryview, rule: Rule | None) -> None:
        fault = rule.fault if rule else ""
        if fault == "short":
            self._send(status, body[: len(body) // 2], about)
        elif fault in ("reset", "truncate"):
            self._send(status, body[: len(body) // 2], about, declared=len(body))
            if fault == "reset":
                self._transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _HANG_UP
                )
            self._transport.close()
        elif rule and fault == "slow":
            self._send(status, body[: len(body) // 2], about, declared=len(body))
            self._timer = self._loop.call_later(
                rule.delay_s, self._send_rest, body[len(body) // 2 :]
            )
        else:
            self._send(status, body, about)

    def _send_rest(self, rest: memoryview) -> None:
        self._transport.write(rest)
        self._end_read()

    def _send(
        self, status: int, body: bytes | memoryview, about: str = "", declared: int | None = None
    ) -> None:
        self._director.counts.answers[status] += 1
        length = len(body) if declared is None else declared
        reason = _REASONS.get(status, "No")
        head = f"HTTP/1.1 {status} {reason}\r\n{about}Content-Length: {length}\r\n\r\n".encode(
            "latin-1"
        )
        self._transport.write(head + body)

    def _end_read(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._director.end()

    def _administer(self, method: str, what: str, body: bytes) -> None:
        answers: dict[tuple[str, str], Callable[[], object]] = {
            ("GET", "counts"): lambda: vars(self._director.counts),
            ("DELETE", "counts"): self._forget,
            ("PUT", "script"): lambda: self._follow(Script.from_json(json.loads(body))),
            ("DELETE", "connections"): self._hang_up_all,
        }
        self._send(200, json.dumps(answers[method, what]()).encode())

    def _follow(self, script: Script) -> None:
        self._director.script = script

    def _forget(self) -> None:
        self._director.counts = Counts()

    def _hang_up_all(self) -> None:
        for each in self.open_connections - {self}:
            with contextlib.suppress(OSError):
                each._transport.abort()


def _told(tells: list[Tells], stored: Stored, etag: str) -> str:
    """The fields of an answer that tell one version of an object from another."""
    rfc850 = time.strftime("%A, %d-%b-%y %H:%M:%S GMT", time.gmtime(stored.modified))
    fields = {
        "etag": f"ETag: {etag}",
        "weak etag": f"ETag: W/{etag}",
        "version": f"x-amz-version-id: v{stored.version}",
        "modified": f"Last-Modified: {formatdate(stored.modified, usegmt=True)}",
        "modified as RFC 850": f"Last-Modified: {rfc850}",
    }
    return "".join(f"{fields[each]}\r\n" for each in tells)


@functools.lru_cache(1024)
def _request_line(line: bytes) -> tuple[str, str, str]:
    """Method, path and query."""
    method, target, _ = line.decode("latin-1").split(" ", 2)
    target, _, query = target.partition("?")
    return method, unquote(target), query


def _range(head: bytes, size: int) -> tuple[int, int, bool]:
    """The bytes `[begin, end)` that are asked for, and whether it is a range that is."""
    wanted = _RANGE.search(head)
    if not wanted:
        return 0, size, False
    if not wanted[1]:
        return max(0, size - int(wanted[2])), size, True
    return int(wanted[1]), min(int(wanted[2]) + 1, size) if wanted[2] else size, True


def _metadata(path: str, key: str) -> bytes:
    """The instance's metadata service, as far as credentials go."""
    if path.endswith("/api/token"):
        return b"token"
    if path.endswith("/security-credentials/"):
        return b"role"
    about = {"Code": "Success", "Type": "AWS-HMAC", "SecretAccessKey": "secret", "Token": "token"}
    return json.dumps({**about, "AccessKeyId": key, "Expiration": "2099-01-01T00:00:00Z"}).encode()
