"""An HTTP server of objects, with ranges, etags and faults on demand."""

import threading
import time
from collections import deque
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote
from zlib import crc32


class ObjectServer:
    """Serves `objects` on a free port until it is closed.

    Attributes:
        url: without a slash at its end.
        objects: contents by path.
        requests: method and path of all that came.
        faults: what the next requests get instead of an answer: a status, "silence", "half a body"
            or "no ranges".
        max_open: how many requests were being answered at once.
        delay_s: how long each answer takes.
        tells: `ETag` or `Last-Modified`, or nothing of the version of an object.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.faults: deque[int | str] = deque()
        self.max_open = 0
        self.delay_s = 0.0
        self.tells = "ETag"
        self.closing = threading.Event()
        self._num_open = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def count(self, difference: int) -> None:
        with self._lock:
            self._num_open += difference
            self.max_open = max(self.max_open, self._num_open)


class _Server(ThreadingHTTPServer):
    owner: ObjectServer
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silent."""

    def _answer(self, *, with_body: bool) -> None:
        owner = self.server.owner
        owner.count(1)
        try:
            path = unquote(self.path)
            owner.requests.append((self.command, path))
            time.sleep(owner.delay_s)
            fault = owner.faults.popleft() if owner.faults else None
            if fault == "silence":
                owner.closing.wait(30)
                self.close_connection = True
            elif isinstance(fault, int):
                self._send(fault, b"no", {})
            elif path not in owner.objects:
                self._send(404, b"none", {})
            else:
                self._send_object(owner.objects[path], fault, with_body=with_body)
        finally:
            owner.count(-1)

    def _send_object(self, data: bytes, fault: int | str | None, *, with_body: bool) -> None:
        etag = f'"{crc32(data):08x}-{len(data)}"'
        tells = self.server.owner.tells
        told = {"ETag": etag, "Last-Modified": formatdate(crc32(data) // 2, usegmt=True)}
        about = {tells: told[tells]} if tells else {}
        wanted = self.headers.get("Range", "")
        if self.headers.get("If-Match", etag) != etag:
            self._send(412, b"changed", {})
        elif wanted and fault != "no ranges":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1, len(data))
            if begin >= len(data):
                self._send(416, b"", {})
                return
            headers = {**about, "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
            self._send(206, data[begin:end], headers, cut=fault == "half a body")
        else:
            self._send(200, data, {**about, "Accept-Ranges": "bytes"}, with_body=with_body)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        *,
        with_body: bool = True,
        cut: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body and self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True
