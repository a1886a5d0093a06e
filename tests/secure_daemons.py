"""Daemons with TLS for tests, and the environment of their clients."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.certificates import Authority, Certified
from tests.conftest import Daemon, StartDaemon

TOKEN = "0iVxZ2PvJm3nYc7bqLr5TgKd8WsAeHfU"
VARIABLES = ("GYRE_TOKEN_FILE", "GYRE_CA_FILE", "GYRE_CERTIFICATE_FILE", "GYRE_KEY_FILE")
NUM_SAMPLES, LENGTH = 200, 8


@dataclass(frozen=True)
class SecureDaemon:
    """A daemon that listens with TLS.

    Attributes:
        daemon: The process.
        address: Its `tls:` address.
        authority: Signed its certificate.
        certificate: The files of its certificate.
        token_file: Of the token "ci".
    """

    daemon: Daemon
    address: str
    authority: Authority
    certificate: Certified
    token_file: Path


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def write_secret(path: Path, text: str) -> Path:
    """Writes a file that only its owner can read, as one step."""
    new = path.with_name(f"{path.name}.new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(path)
    return path


def start_secure(
    gyred: StartDaemon,
    folder: Path,
    *,
    with_tokens: bool = True,
    with_client_ca: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> SecureDaemon:
    """Starts a daemon that serves `numbers`, int16, on a Unix socket and with TLS."""
    folder.mkdir(exist_ok=True)
    authority = Authority(folder / "authority")
    certificate = authority.sign("daemon")
    token_file = write_secret(folder / "ci.token", f"{TOKEN}\n")
    data = folder / "numbers.bin"
    np.arange(NUM_SAMPLES * LENGTH, dtype=np.int16).tofile(data)
    address = f"tls:127.0.0.1:{free_port()}"
    dataset = {
        "uri": str(data),
        "format": "tokens",
        "dtype": "int16",
        "sequence_length": LENGTH,
        "allow": [f"uid:{os.getuid()}", "token:ci", "token:next", "certificate:*"],
    }
    config: dict[str, Any] = {
        "listen": [f"unix:{folder}/run/gyre.sock", address],
        "tls_certificate": str(certificate.certificate),
        "tls_key": str(certificate.key),
        "datasets": {"numbers": dataset},
    }
    if with_tokens:
        config["tokens"] = {"ci": str(token_file)}
    if with_client_ca:
        config["tls_client_ca"] = str(authority.path)
    daemon = gyred({**config, **(settings or {})})
    daemon.address = f"unix:{folder}/run/gyre.sock"
    return SecureDaemon(daemon, address, authority, certificate, token_file)


@contextlib.contextmanager
def environment(
    *, ca: Path | None = None, token: Path | None = None, pair: Certified | None = None
) -> Iterator[None]:
    """Names a client's files in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in VARIABLES:
            patch.delenv(variable, raising=False)
        given = {
            "GYRE_CA_FILE": ca,
            "GYRE_TOKEN_FILE": token,
            "GYRE_CERTIFICATE_FILE": pair and pair.certificate,
            "GYRE_KEY_FILE": pair and pair.key,
        }
        for variable, path in given.items():
            if path:
                patch.setenv(variable, str(path))
        yield
