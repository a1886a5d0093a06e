"""Addresses and how they are claimed: a second daemon must never take over what a first one serves."""

import fcntl
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gyre_daemon.errors import ConfigError

_UNSAFE = re.compile(r"[\x00-\x1f\x7f%]")
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_SOCKET_PATH_BYTES = 102  # what the kernel takes, less room for the side channel beside it


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the file system."""

    path: Path

    @property
    def grpc_target(self) -> str:
        """As gRPC names it."""
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A port of an interface, by the interface's IP address; 0 for any that is free."""

    host: str
    port: int

    @property
    def grpc_target(self) -> str:
        """As gRPC names it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """An address from the configuration.

    Raises:
        ConfigError: neither `unix:PATH` nor `tcp:HOST:PORT`, or a host that is no loopback address: nothing is authenticated or
            encrypted on TCP.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        if _UNSAFE.search(rest):  # gRPC decodes percent signs: it would bind where nobody holds the claim
            raise ConfigError(f"the socket path {rest!r} must not contain control characters or `%`")
        path = Path(rest).absolute()
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes, which no Unix socket can have"
            )
        return UnixAddress(path)
    if kind != "tcp":
        raise ConfigError(f"address {text!r} is neither unix:PATH nor tcp:HOST:PORT")
    address = _parse_tcp(text, rest)
    if not _is_loopback(address.host):
        raise ConfigError(
            f"address {text!r} is open to other hosts, but TCP has no authentication; listen on 127.0.0.1 or a Unix socket"
        )
    return address


def parse_metrics_address(text: str, *, is_public: bool) -> TcpAddress:
    """Where metrics are served.

    Args:
        text: `tcp:HOST:PORT`.
        is_public: it may be open to other hosts.

    Raises:
        ConfigError: another form, no IP address, or a host that is no loopback address where that was not said to be meant.
    """
    kind, _, rest = text.partition(":")
    if kind != "tcp":
        raise ConfigError(f"metrics_listen is {text!r}; it must be tcp:HOST:PORT")
    address = _parse_tcp(text, rest)
    if not _is_ip_address(address.host):
        raise ConfigError(f"metrics_listen is {text!r}; HOST must be an IP address")
    if not is_public and not _is_loopback(address.host):
        raise ConfigError(
            f"metrics_listen is {text!r}, which is open to other hosts: they would learn what each job reads and how fast; "
            "listen on 127.0.0.1, or set metrics_public = true"
        )
    return address


class SocketClaim:
    """The exclusive right to a Unix socket path, held by a lock file for the life of the process.

    The kernel drops the lock however the process ends, so a socket that is left behind by a killed daemon is cleared away by
    the next and that of a living one is never touched.
    """

    def __init__(self, address: UnixAddress) -> None:
        """Claim the path; its folder is made, for its owner and group only, where it is missing.

        Raises:
            ConfigError: another daemon has it, something else is there, or the folder cannot be used.
        """
        self._path = address.path
        self._lock_path = address.path.with_name(address.path.name + ".lock")
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            if self._path.exists() and not self._path.is_socket():
                raise ConfigError(f"{self._path} is there and is no socket; remove it or listen on another path")
            self._lock = self._lock_file()
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot claim the socket {self._path}: {error.strerror}") from error

    def open_to_group(self) -> None:
        """Let owner and group connect; call when the socket is bound."""
        self._path.chmod(0o660)

    def give_up(self) -> None:
        """Remove socket and lock."""
        self._path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _lock_file(self) -> int:
        while True:
            descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise ConfigError(
                    f"another daemon (process {holder}) serves {self._path}; stop it or listen on another path", {"pid": holder}
                ) from error
            if _is_at(descriptor, self._lock_path):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
            os.close(descriptor)  # its last holder removed it between our open and our lock


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _parse_tcp(text: str, rest: str) -> TcpAddress:
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if not host or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"address {text!r} is neither unix:PATH nor tcp:HOST:PORT")
    return TcpAddress("127.0.0.1" if host == "localhost" else host, int(port))


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_ip_address(host) and ipaddress.ip_address(host).is_loopback
