"""A server in a process of its own, and how tests and benchmarks talk to it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener

from tests.object_server.script import Rule, Script

_TIMEOUT_S = 120.0
_REPOSITORY = Path(__file__).parents[2]
_direct = build_opener(ProxyHandler({}))


class ObjectServerProcess:
    """A running server.

    Attributes:
        url: without a slash at its end.
        pid: of the first of its processes.
    """

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout
        where = json.loads(process.stdout.readline())
        self.url: str = where["url"]
        self.pid = process.pid
        self._admin: list[str] = where["admin"]

    @property
    def storage_settings(self) -> Mapping[str, str]:
        """The table `[datasets.NAME.storage]` of an s3:// dataset that lies here."""
        return {
            "endpoint": self.url,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
            "virtual_hosted_style_request": "false",
        }

    def put(self, path: str, data: bytes) -> None:
        """Store an object, over one that is there."""
        for admin in self._admin:
            _ask(admin, "PUT", path, data)

    def delete(self, path: str) -> None:
        for admin in self._admin:
            _ask(admin, "DELETE", path)

    def follow(self, script: Script) -> None:
        """Behave like this from now on."""
        for admin in self._admin:
            _ask(admin, "PUT", "/-/script", json.dumps(asdict(script)).encode())

    def misbehave(self, *rules: Rule) -> None:
        """Answer at once, but for these rules; none for no rule."""
        self.follow(Script(rules=list(rules)))

    def counts(self) -> dict[str, Any]:
        """See `Counts`; summed over its processes, by path and by fault too."""
        total: dict[str, Any] = {}
        for admin in self._admin:
            for name, value in json.loads(_ask(admin, "GET", "/-/counts")).items():
                if isinstance(value, dict):
                    table = total.setdefault(name, {})
                    for key, count in value.items():
                        table[key] = table.get(key, 0) + count
                else:
                    total[name] = total.get(name, 0) + value
        return total

    def forget(self) -> None:
        """Count from zero."""
        for admin in self._admin:
            _ask(admin, "DELETE", "/-/counts")

    def hang_up(self) -> None:
        """Every connection is reset."""
        for admin in self._admin:
            _ask(admin, "DELETE", "/-/connections")


@contextmanager
def object_server(
    root: Path | None = None,
    num_processes: int = 1,
    seed: int = 0,
    port: int = 0,
    tls: tuple[Path, Path] | None = None,
) -> Iterator[ObjectServerProcess]:
    """A server for as long as the block lasts.

    Args:
        root: its folders are buckets; None to begin with no object.
        num_processes: that share the port.
        seed: of what is drawn at random.
        port: where it listens; 0 for any that is free.
        tls: files with the certificate and the key with which it speaks TLS.
    """
    command = [
        sys.executable,
        "-m",
        "tests.object_server",
        "--processes",
        str(num_processes),
        "--seed",
        str(seed),
    ]
    command += ["--port", str(port)]
    command += ["--root", str(root)] if root else []
    command += ["--tls", *map(str, tls)] if tls else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_REPOSITORY) as process:
        try:
            yield ObjectServerProcess(process)
        finally:
            process.terminate()
            process.wait(_TIMEOUT_S)


def _ask(url: str, method: str, path: str, body: bytes | None = None) -> bytes:
    with _direct.open(
        Request(url + quote(path), body, method=method), timeout=_TIMEOUT_S
    ) as answer:
        content: bytes = answer.read()
        return content
