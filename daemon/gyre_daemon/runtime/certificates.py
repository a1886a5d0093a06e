"""The daemon's secrets and its certificate, from files that its user alone writes."""

import contextlib
import logging
import os
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.events import log_event

MAX_BYTES = 256 << 10  # a chain of certificates has some KiB


class FileStamp(Struct, frozen=True):
    """Metadata that changes when a file is written or replaced."""

    device: int
    inode: int
    size: int
    mode: int
    modified_ns: int
    changed_ns: int


def stamp_of(path: Path) -> FileStamp | None:
    """The file's stamp; None where there is no file, or none that may be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileStamp(
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mode,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )


def read_file(path: Path, setting: str, *, is_secret: bool) -> bytes:
    """The contents of a file of the operator.

    A secret must belong to root or to this process's user, and nobody else may read or write it.
    The group may read it if root owns it: so an orchestrator hands secrets to a user.

    Args:
        path: the file.
        setting: the setting that names it, for the error: "tls_key".
        is_secret: whether others must not read it.

    Raises:
        ConfigError: it cannot be read, is no regular file, is too large, or others may use it.
    """
    try:
        # A FIFO without a writer would block the call.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{setting}: cannot read {path}: {reason}") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{setting}: {path} is no regular file")
        if is_secret:
            _check_private(found, path, setting)
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{setting}: {path} has more than {MAX_BYTES} bytes")
    return data


def _check_private(found: os.stat_result, path: Path, setting: str) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{setting}: {path} belongs to uid {found.st_uid}, who can change it; "
            f"it must belong to root or to uid {os.geteuid()}: chown it"
        )
    if mode & (0o037 if found.st_uid == 0 else 0o077):
        raise ConfigError(f"{setting}: others may use {path} (mode {mode:04o}): chmod 600 {path}")


class Certificates(Struct, frozen=True):
    """The certificates and key of a TLS server, in PEM.

    Attributes:
        chain: the daemon's certificate, then those that lead to its root.
        key: the private key of the first.
        client_ca: roots of clients' certificates; None where clients need none.
    """

    chain: bytes
    key: bytes
    client_ca: bytes | None


class CertificateFiles:
    """The files of the configuration, which are read again when they change.

    Attributes:
        current: their contents when they could last be used.
    """

    def __init__(self, certificate: str, key: str, client_ca: str) -> None:
        """Read the files.

        Args:
            certificate: a path.
            key: a path.
            client_ca: a path; empty where clients need no certificate.

        Raises:
            ConfigError: a file cannot be used, or the key does not belong to the certificate.
        """
        self._certificate, self._key = Path(certificate), Path(key)
        self._client_ca = Path(client_ca) if client_ca else None
        self._stamps = self._stamps_now()
        self.current = self._read()

    def refresh(self) -> None:
        """Read the files again if one has changed; one that cannot be used changes nothing."""
        stamps = self._stamps_now()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.current = self._read()
        except ConfigError as error:
            log_event("certificate refused", {"reason": error}, logging.ERROR)
        else:
            log_event("certificate reloaded", {"path": self._certificate})

    def _stamps_now(self) -> list[FileStamp | None]:
        paths = (self._certificate, self._key, self._client_ca)
        return [stamp_of(path) for path in paths if path]

    def _read(self) -> Certificates:
        chain = read_file(self._certificate, "tls_certificate", is_secret=False)
        key = read_file(self._key, "tls_key", is_secret=True)
        _check_pair(chain, key, f"tls_certificate {self._certificate}", f"tls_key {self._key}")
        if self._client_ca is None:
            return Certificates(chain, key, None)
        client_ca = read_file(self._client_ca, "tls_client_ca", is_secret=False)
        _check_roots(client_ca, f"tls_client_ca {self._client_ca}")
        return Certificates(chain, key, client_ca)


def _check_pair(chain: bytes, key: bytes, chain_name: str, key_name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _in_memory(chain) as chain_path, _in_memory(key) as key_path:
        try:
            # The password keeps OpenSSL from asking for one.
            context.load_cert_chain(chain_path, key_path, password=lambda: "")
        except (ssl.SSLError, ValueError, OSError) as error:
            raise ConfigError(
                f"{chain_name} and {key_name} cannot be used together: {_reason(error)}; they must "
                "be a certificate and its private key, without a passphrase, in PEM"
            ) from error


def _check_roots(roots: bytes, name: str) -> None:
    try:
        ascii_text = roots.decode("ascii", errors="ignore")  # comments may say anything
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ascii_text)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{name} holds no certificates in PEM: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or "not in PEM"


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """The path of a file that holds the data; OpenSSL reads keys from files only."""
    with os.fdopen(os.memfd_create("gyre-tls"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
