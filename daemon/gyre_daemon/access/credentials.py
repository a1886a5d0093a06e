"""The daemon's own credentials, and those of its callers over TCP.

The daemon's secrets and its certificate come from files that its user alone writes. TLS checks a
certificate once, when a connection begins, and a connection may last for weeks.

A file has a token a line, perhaps followed by the time at which it expires (RFC 3339):

    # for the nightly runs
    0iVxZ2PvJm3nYc7bqLr5TgKd8WsAeHfU  2027-01-31T00:00:00Z

Several lines let a new token be handed out before the old one is taken away.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import ssl
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from pathlib import Path

from msgspec import Struct

from gyre_daemon.access.policy import Rates
from gyre_daemon.config import DaemonConfig
from gyre_daemon.errors import ConfigError, NotAuthenticated, Overloaded
from gyre_daemon.runtime.events import log_event
from gyre_daemon.runtime.threads import Bucket

MAX_BYTES = 256 << 10  # a chain of certificates has some KiB

Stamp = tuple[int, ...]


def stamp_of(path: Path) -> Stamp | None:
    """What changes when a file is written or replaced; None where it may not be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_dev, found.st_ino, found.st_size, found.st_mode, *times


def read_file(path: Path, setting: str, *, is_secret: bool) -> bytes:
    """The contents of a file that the setting names, for errors such as "tls_key".

    A secret must belong to root or to this process's user, and nobody else may read or write it.
    The group may read it if root owns it: so an orchestrator hands secrets to a user.

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
    """The certificate chain of a TLS server, its private key and roots of clients' ones, in PEM."""

    chain: bytes
    key: bytes
    client_ca: bytes | None


class CertificateFiles:
    """The files of the configuration; `current` has their contents when they could last be used."""

    def __init__(self, certificate: str, key: str, client_ca: str) -> None:
        """Read the files; `client_ca` is empty where clients need no certificate.

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

    def _stamps_now(self) -> list[Stamp | None]:
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


_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# In DER, the validity of a certificate (RFC 5280, section 4.1.2.5) is the first sequence of two
# times, each a UTCTime, with two digits of the year, or a GeneralizedTime.
_VALIDITY = re.compile(
    rb"\x30.(?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12}Z)|\x18\x0f(\d{14}Z))", re.DOTALL
)
_TWENTIETH_CENTURY = b"50"  # from here on two digits are of 19xx


@lru_cache(maxsize=1024)
def expires_at(chain: bytes) -> float:
    """When the first of the certificates in a PEM text ends, in seconds since the epoch.

    Raises:
        NotAuthenticated: they are not certificates.
    """
    try:
        ends = [_not_after(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(chain.decode())]
        return min(ends)
    except ValueError as error:
        raise NotAuthenticated("the client's certificate cannot be read") from error


def _not_after(certificate: bytes) -> float:
    found = _VALIDITY.search(certificate)
    if not found:
        raise ValueError("no validity")
    short, text = found.groups()
    text = text or (b"19" if short[:2] >= _TWENTIETH_CENTURY else b"20") + short
    return datetime.strptime(text.decode(), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


# Failures of one address to answer with their reason: ten at once, then one in six seconds.
# A job whose token has expired needs one.
_FAILURES, _FAILURES_PER_S = 10.0, 1 / 6
# Lines of the log, for all addresses together.
_LINES, _LINES_PER_S = 20.0, 1 / 3
_IPV6_NETWORK_BITS = 64  # one host's usual network


class FailureLimit:
    """Counts refused credentials by address.

    It never stands in the way of a valid credential: users of one machine, who share an address,
    cannot lock each other out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rates = Rates(clock, _FAILURES / _FAILURES_PER_S)
        self._lines = Bucket(_LINES, _LINES_PER_S, clock())
        self._num_unlogged = 0

    def refuse(self, address: str, reason: NotAuthenticated) -> NotAuthenticated | Overloaded:
        """Count and log a failure of an IP address.

        Returns:
            The error to send: the reason or, after too many, that there were too many.
        """
        self._log(address, reason)
        wait_s = self._rates.take(_network(address), _FAILURES_PER_S)
        if not wait_s:
            return reason
        return Overloaded(
            f"too many calls from {address} had no valid credential; check the token, and try "
            f"again in {wait_s:.0f} s",
            {"retry_after_s": f"{wait_s:.1f}"},
        )

    def _log(self, address: str, reason: NotAuthenticated) -> None:
        if not self._lines.take(self._clock()):
            self._num_unlogged += 1
            return
        facts: dict[str, object] = {"address": address, "reason": reason}
        if self._num_unlogged:
            facts["not_logged_before"] = self._num_unlogged
            self._num_unlogged = 0
        log_event("authentication failed", facts, logging.WARNING)


def _network(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ipaddress.ip_network((ip, _IPV6_NETWORK_BITS), strict=False))


# RFC 6750, section 2.1. With 32 characters, a token cannot be found by trying, however fast.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_MIN_CHARS, _MAX_CHARS = 32, 4096
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class _Token(Struct, frozen=True):
    name: str
    digest: bytes
    expires: float  # seconds since the epoch; infinity for never


class TokenStore:
    """The tokens of all files, by name. The files are read again when they change."""

    def __init__(self, files: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        """Read all files, by the name that their tokens stand for.

        Raises:
            ConfigError: a name or a file cannot be used, or two names have one token.
        """
        self._clock = clock
        self._files = {name: Path(path) for name, path in files.items()}
        for name in self._files:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"tokens: the name {name!r:.100} must have 1 to 64 letters, digits, `_`, `.` "
                    "or `-`"
                )
        self._stamps = {name: stamp_of(path) for name, path in self._files.items()}
        self._tokens: dict[str, tuple[_Token, ...]] = {}
        for name in self._files:
            self._read(name)

    def __bool__(self) -> bool:
        return bool(self._files)

    def refresh(self) -> None:
        """Read the changed files again, and log the differences.

        The tokens of a file that was removed are no longer valid. Of a file that cannot be used,
        the earlier tokens stay valid.
        """
        for name, path in self._files.items():
            before, self._stamps[name] = self._stamps[name], stamp_of(path)
            if self._stamps[name] == before:
                continue
            if self._stamps[name] is None:
                self._tokens[name] = ()
                log_event("tokens removed", {"name": name, "path": path}, logging.WARNING)
                continue
            try:
                self._read(name)
            except ConfigError as error:
                log_event("tokens refused", {"name": name, "reason": error}, logging.ERROR)
            else:
                log_event("tokens reloaded", {"name": name, "tokens": len(self._tokens[name])})

    def name_of(self, token: str) -> str:
        """The name that a token stands for. It is compared with all tokens, in constant time.

        Raises:
            NotAuthenticated: no file has the token, or it has expired.
        """
        digest, found = _digest(token), None
        for each in self._all():
            if hmac.compare_digest(each.digest, digest):
                found = each
        if found is None:
            raise NotAuthenticated("this daemon does not know the token that was sent")
        if found.expires <= self._clock():
            raise NotAuthenticated(f"the token {found.name!r} has expired; ask for a new one")
        return found.name

    def expiries(self) -> dict[str, float]:
        """When the last token of each name expires, in seconds since the epoch, unless never."""
        last = {
            name: max((each.expires for each in tokens), default=0.0)
            for name, tokens in list(self._tokens.items())
        }
        return {name: at for name, at in last.items() if at < inf}

    def _all(self) -> Iterator[_Token]:
        for tokens in list(self._tokens.values()):
            yield from tokens

    def _read(self, name: str) -> None:
        """Take the tokens of one file over."""
        path = self._files[name]
        text = read_file(path, f"tokens.{name}", is_secret=True).decode(errors="replace")
        lines = [line.split() for line in text.splitlines()]
        tokens = tuple(
            _parse(name, f"line {number} of {path}", words)
            for number, words in enumerate(lines, 1)
            if words and not words[0].startswith("#")
        )
        if not tokens:
            raise ConfigError(f"tokens.{name}: {path} has no token")
        others = {each.digest: each.name for each in self._all() if each.name != name}
        for token in tokens:
            if token.digest in others:
                raise ConfigError(
                    f"tokens.{name}: a token of {path} is also one of "
                    f"tokens.{others[token.digest]}; each name needs its own"
                )
        self._tokens[name] = tokens


def _parse(name: str, where: str, words: list[str]) -> _Token:
    token, *rest = words
    if not (_MIN_CHARS <= len(token) <= _MAX_CHARS and _TOKEN.fullmatch(token)):
        raise ConfigError(
            f"tokens.{name}: {where} must begin with a token of at least {_MIN_CHARS} letters, "
            "digits or any of `._~+/-`, such as `openssl rand -hex 32` makes"
        )
    return _Token(name, _digest(token), _expiry(name, where, rest) if rest else inf)


def _expiry(name: str, where: str, words: list[str]) -> float:
    try:
        (text,) = words
        expires = datetime.fromisoformat(text)
        if expires.tzinfo is None:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"tokens.{name}: {where} must have the time of expiry, with its time zone, behind the "
            "token, such as 2027-01-31T00:00:00Z, or nothing"
        ) from error
    return expires.timestamp()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


class Credentials(Struct, frozen=True):
    """The files that have to do with TLS and tokens; without a certificate, there is no TLS."""

    certificates: CertificateFiles | None
    tokens: TokenStore

    @classmethod
    def of(cls, config: DaemonConfig) -> "Credentials":
        """Read the files.

        Raises:
            ConfigError: one cannot be used.
        """
        certificates = None
        if config.tls_certificate:
            certificates = CertificateFiles(
                config.tls_certificate, config.tls_key, config.tls_client_ca
            )
        return cls(certificates, TokenStore(config.tokens))

    @property
    def have_files(self) -> bool:
        """Whether there are files that may change."""
        return bool(self.certificates or self.tokens)

    def expiries(self) -> dict[tuple[str, str], float]:
        """When each ends, in seconds since the epoch, by kind and name; not those that never do."""
        found = {("token", name): at for name, at in self.tokens.expiries().items()}
        if self.certificates:
            current = self.certificates.current
            for name, pem in (
                ("tls_certificate", current.chain),
                ("tls_client_ca", current.client_ca),
            ):
                with contextlib.suppress(NotAuthenticated):  # gRPC cannot read it, either
                    found |= {("certificate", name): expires_at(pem)} if pem else {}
        return found

    def refresh(self) -> None:
        """Read the files again that have changed; logs those that cannot be used."""
        if self.certificates:
            self.certificates.refresh()
        self.tokens.refresh()
