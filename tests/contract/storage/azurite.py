"""Azurite, Microsoft's own server of Azure's blob protocol, in a process of its own."""

import base64
import contextlib
import hashlib
import hmac
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import obstore
from obstore.store import AzureStore

from tests.conftest import START_DEADLINE_S

_PROGRAM = Path(sys.prefix) / "servers/node_modules/azurite/dist/src/blob/main.js"
_ACCOUNT, _KEY = "tests", base64.b64encode(b"the key of an account that exists for a test").decode()
_VERSION = "2023-11-03"
_direct = build_opener(ProxyHandler({}))


class AzuriteServer:
    """A running server.

    Attributes:
        storage_settings: the table `[datasets.NAME.storage]` that reaches it.
    """

    def __init__(self, endpoint: str, log_path: Path) -> None:
        self.storage_settings: Mapping[str, str] = {
            "endpoint": endpoint,
            "account_name": _ACCOUNT,
            "account_key": _KEY,
        }
        self._endpoint, self._log_path = endpoint, log_path
        self._stores: dict[str, AzureStore] = {}
        self._marks = itertools.count()

    def make_container(self, name: str) -> None:
        """A new one; name it after the test, since tests share the server."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
        lines += [f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"]
        signature = hmac.digest(base64.b64decode(_KEY), "\n".join(lines).encode(), hashlib.sha256)
        headers |= {
            "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}",
            "Content-Length": "0",
        }
        _direct.open(
            Request(f"{self._endpoint}/{name}?restype=container", method="PUT", headers=headers),
            timeout=120,
        ).close()
        options: Any = {"allow_http": True}
        self._stores[name] = AzureStore(
            name,
            account_name=_ACCOUNT,
            account_key=_KEY,
            endpoint=self._endpoint,
            client_options=options,
        )

    def put(self, container: str, key: str, data: bytes) -> None:
        """Store an object, over one that is there."""
        obstore.put(self._stores[container], key, data)

    def delete(self, container: str, key: str) -> None:
        """Remove an object."""
        obstore.delete(self._stores[container], key)

    def num_gets(self, container: str) -> int:
        """How many objects, or parts of them, it has sent from a container."""
        mark = f"{self._endpoint}/mark-{next(self._marks)}"
        with contextlib.suppress(HTTPError):
            _direct.open(mark, timeout=120).close()
        # it is written down a little later
        while urlsplit(mark).path not in (log := self._log_path.read_text()):
            time.sleep(0.01)
        return log.count(f'"GET /{_ACCOUNT}/{container}/')


def why_absent() -> str:
    """Why it cannot run here; empty where it can."""
    if not shutil.which("node"):
        return "node is not installed"
    return "" if _PROGRAM.exists() else "Azurite is not installed: `make servers` does so, with npm"


@contextmanager
def azurite_server(folder: Path) -> Iterator[AzuriteServer]:
    """A server for as long as the block lasts, with nothing on disk but its log.

    It asks nobody on the network.
    """
    log_path = folder / "log"
    command = [
        "node",
        str(_PROGRAM),
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--skipApiVersionCheck",
    ]
    environment = {**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--disableProductStyleUrl"],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=folder,
        )
    try:
        deadline = time.monotonic() + START_DEADLINE_S
        while not (
            listening := re.search(r"successfully listens on (http://\S+)", log_path.read_text())
        ):
            assert process.poll() is None, f"the server ended at its start:\n{log_path.read_text()}"
            assert time.monotonic() < deadline, f"the server is not ready:\n{log_path.read_text()}"
            time.sleep(0.05)
        yield AzuriteServer(f"{listening[1]}/{_ACCOUNT}", log_path)
    finally:
        process.terminate()
        process.wait(120)
