"""nginx with a folder of files, in a process of its own."""

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from tests.conftest import START_DEADLINE_S

_NUM_PORTS = 10  # that are tried: somebody else may be faster
_CONFIGURATION = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log {folder}/access.log; default_type application/octet-stream;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{ listen 127.0.0.1:{port}; root {folder}/files; autoindex on;
    location = /ready {{ return 204; }} }}
}}
"""
_direct = build_opener(ProxyHandler({}))
_PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


class NginxServer:
    """A running server.

    Attributes:
        url: without a slash at its end.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._seconds = itertools.count(1_700_000_000)

    def put(self, path: str, data: bytes) -> None:
        """Store a file, over one that is there; a second younger than the last one.

        Its etags tell seconds apart.
        """
        file = self._folder / "files" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / "unfinished"
        unfinished.write_bytes(data)
        os.utime(unfinished, (next(self._seconds),) * 2)
        unfinished.replace(file)

    def delete(self, path: str) -> None:
        """Remove a file."""
        (self._folder / "files" / path).unlink()

    def num_gets(self, prefix: str) -> int:
        """How many files, or parts of them, it has sent from below a path."""
        self.ask_ready()  # after which all that came before stands in the log
        return (self._folder / "access.log").read_text().count(f'"GET /{prefix}/')

    def ask_ready(self) -> None:
        """Wait for a response.

        Raises:
            OSError: there is none.
        """
        _direct.open(f"{self.url}/ready", timeout=120).close()


def why_absent() -> str:
    """Why it cannot run here; empty where it can."""
    return "" if _PROGRAM else "nginx is not installed (Debian package nginx-light)"


@contextmanager
def nginx_server(folder: Path) -> Iterator[NginxServer]:
    """A server for as long as the block lasts; all its files are in the folder."""
    (folder / "files").mkdir()
    for _ in range(_NUM_PORTS):
        server = NginxServer(folder, port := _free_port())
        (folder / "nginx.conf").write_text(_CONFIGURATION.format(folder=folder, port=port))
        process = subprocess.Popen(
            [
                str(_PROGRAM),
                "-p",
                str(folder),
                "-e",
                str(folder / "error.log"),
                "-c",
                str(folder / "nginx.conf"),
            ]
        )
        try:
            if _is_ready(server, process):
                yield server
                return
        finally:
            process.terminate()
            process.wait(120)
    raise AssertionError(f"nginx does not start:\n{(folder / 'error.log').read_text()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(server: NginxServer, process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + START_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            server.ask_ready()
        except OSError:
            time.sleep(0.05)
        else:
            return process.poll() is None
    return False
