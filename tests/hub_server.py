"""The part of the Hugging Face Hub that its library and our client use, and the storage behind it.

Files in `large` lie in the storage, a server of its own, to which the hub redirects; others lie on
the hub itself.
"""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "birds/songs"
_API = re.compile(rf"/api/datasets/{REPOSITORY}/(revision|tree)/([^/?]+)/?(.*)")
_FILE = re.compile(rf"/datasets/{REPOSITORY}/resolve/([^/]+)/(.+)")


class HubServer:
    """A hub with one dataset.

    Attributes:
        url: of the hub.
        storage: host and port of the storage.
        commits: the files of each, by name.
        branches: their commits.
        large: names of files that lie in the storage.
        token: that every request to the hub needs; empty for none.
        elsewhere: where listings are redirected; empty for nowhere.
        elsewhere_is_next: the first page of a listing names that place for the next page instead.
        refusals: how many of the next requests to the hub get status 429.
        refused: only requests with this text in their path do.
        retry_after_s: what these are told.
        requests: method, server and path of all that came.
        tokens_at_storage: what the storage was shown.
    """

    def __init__(self) -> None:
        self.commits: dict[str, Mapping[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.large: set[str] = set()
        self.token = self.elsewhere = self.refused = ""
        self.elsewhere_is_next = False
        self.refusals, self.retry_after_s = 0, 1
        self.requests: list[tuple[str, str, str]] = []
        self.tokens_at_storage: list[str] = []
        self.lock = threading.Lock()
        self._servers = []
        for name in ("hub", "storage"):
            server = _Server(("127.0.0.1", 0), _Handler)
            server.owner, server.name = self, name
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            self._servers.append((server, thread))
        hub, storage = (server.server_port for server, _ in self._servers)
        self.url, self.storage = f"http://127.0.0.1:{hub}", f"127.0.0.1:{storage}"

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Put files onto a branch, and return the commit."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def num_requests(self, server: str, text: str = "") -> int:
        return sum(name == server and text in path for _, name, path in self.requests)

    def close(self) -> None:
        for server, thread in self._servers:
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    owner: HubServer
    name: str
    daemon_threads = True
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def _respond(self) -> None:
        hub, path = self.server.owner, unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "")
        with hub.lock:
            hub.requests.append((self.command, self.server.name, path))
            is_hub = self.server.name == "hub"
            refuses = is_hub and hub.refusals > 0 and hub.refused in path
            hub.refusals -= refuses
        if self.server.name == "storage":
            hub.tokens_at_storage += [token] * bool(token)
            if path == "/elsewhere":
                self._send_json([])
                return
            self._send_file(hub.commits[path.split("/")[1]][path.split("/", 2)[2]])
        elif refuses:
            self._send(429, {"Retry-After": str(hub.retry_after_s)})
        elif hub.token and token != f"Bearer {hub.token}":
            self._send(401, {"X-Error-Code": "RepoNotFound"})
        elif hub.elsewhere and "/tree/" in path and hub.elsewhere_is_next:
            self._send_json([], {"Link": f'<{hub.elsewhere}>; rel="next"'})
        elif hub.elsewhere and "/tree/" in path:
            self._send(307, {"Location": hub.elsewhere})
        elif match := _API.fullmatch(path):
            self._answer(match[1], unquote(match[2]), match[3])
        elif match := _FILE.fullmatch(path):
            self._resolve(match[1], match[2])
        else:
            self._send(404, {"X-Error-Code": "RepoNotFound"})

    def _answer(self, kind: str, revision: str, folder: str) -> None:
        hub = self.server.owner
        sha = hub.branches.get(revision, revision)
        if sha not in hub.commits:
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
            return
        files = hub.commits[sha]
        if kind == "revision":
            names = [{"rfilename": name} for name in sorted(files)]
            self._send_json({"id": REPOSITORY, "sha": sha, "siblings": names, "tags": []})
            return
        prefix = f"{folder}/" if folder else ""
        is_recursive = "recursive=true" in self.path.lower()
        below = [name for name in sorted(files) if name.startswith(prefix)]
        inner = {name[len(prefix) :].partition("/")[0] for name in below}
        entries = [
            _entry(hub, name, files[name])
            for name in below
            if is_recursive or "/" not in name[len(prefix) :]
        ]
        entries += [
            {"type": "directory", "path": prefix + name, "oid": "0" * 40}
            for name in sorted(inner)
            if prefix + name not in files
        ]
        if not below:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
            return
        begin = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        more = {}
        if begin + 2 < len(entries):  # pages of two
            query = f"recursive={is_recursive}&cursor={begin + 2}"
            more = {"Link": f'<{hub.url}{urlsplit(self.path).path}?{query}>; rel="next"'}
        self._send_json(entries[begin : begin + 2], more)

    def _resolve(self, sha: str, name: str) -> None:
        hub = self.server.owner
        files = hub.commits.get(sha, {})
        if name not in files:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
        elif name in hub.large:
            digest = f'"{_entry(hub, name, files[name])["lfs"]["oid"]}"'
            size = {"X-Linked-Size": str(len(files[name])), "X-Linked-Etag": digest}
            where = f"http://{hub.storage}/{sha}/{name}?signature=secret"
            self._send(302, {"X-Repo-Commit": sha, "Location": where, **size})
        else:
            digest = f'"{_entry(hub, name, files[name])["oid"]}"'
            self._send_file(files[name], {"X-Repo-Commit": sha, "ETag": digest})

    def _send_file(self, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, headers or {}, data)
            return
        start, stop = int(wanted[1]), int(wanted[2]) + 1
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._send(206, {**(headers or {}), **place}, data[start:stop])

    def _send_json(self, value: Any, headers: Mapping[str, str] | None = None) -> None:
        self._send(
            200, {**(headers or {}), "Content-Type": "application/json"}, json.dumps(value).encode()
        )

    def _send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"ETag": '"x"', **headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def _entry(hub: HubServer, name: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(data).hexdigest()
    entry = {"type": "file", "path": name, "size": len(data), "oid": oid}
    if name in hub.large:
        sha256 = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
    return entry
