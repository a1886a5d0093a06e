"""Addresses and how they are claimed: a second daemon must never take over what a first one serves."""

import fcntl
import ipaddress
import os
import re
import socket
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
    the next and that of a living one is never touched. Where somebody removed the lock file, a daemon that still listens is
    found by connecting to its socket.

    Attributes:
        address: that is claimed.
    """

    def __init__(self, address: UnixAddress) -> None:
        """Claim the path; its folder is made, for its owner and group only, where it is missing.

        Raises:
            ConfigError: another daemon has it, something else is there, or the folder cannot be used.
        """
        self.address = address
        self._path = address.path
        self._lock_path = address.path.with_name(address.path.name + ".lock")
        self._lock = -1
        self._socket: os.stat_result | None = None
        try:
            self.claim()
        except ConfigError:
            if self._lock >= 0:
                os.close(self._lock)
            raise

    @property
    def is_reachable(self) -> bool:
        """Clients that connect to the path find this daemon's socket."""
        return self._socket is not None and _is_same(self._socket, self._path)

    def claim(self) -> None:
        """The lock is held and nothing is at the path, or this daemon's socket; the first time, or after they were removed.

        Raises:
            ConfigError: see above.
        """
        try:
            self._path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            if self._path.exists() and not self._path.is_socket():
                raise ConfigError(f"{self._path} is there and is no socket; remove it or listen on another path")
            if not _is_at(self._lock, self._lock_path):
                self._hold()
            if not self.is_reachable:
                self._make_way()
        except OSError as error:
            raise ConfigError(f"cannot claim the socket {self._path}: {error.strerror}") from error

    def open_to_group(self) -> None:
        """Let owner and group connect; call when the socket is bound."""
        self._path.chmod(0o660)
        self._socket = self._path.stat()

    def give_up(self) -> None:
        """Remove socket and lock, unless another daemon has them by now."""
        if _is_at(self._lock, self._lock_path):
            self._path.unlink(missing_ok=True)
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _hold(self) -> None:
        """Hold the lock file that is there now; one that was held before is let go of."""
        lock = self._lock_file()
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    def _make_way(self) -> None:
        """Nothing is at the path any more; what was there had no living owner."""
        if _is_listening(self._path):
            raise ConfigError(
                f"another process listens on {self._path}, although the lock file beside it is free, as if it had been removed "
                "and made again; stop that process or listen on another path"
            )
        self._path.unlink(missing_ok=True)

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
                return descriptor
            os.close(descriptor)  # its last holder removed it between our open and our lock


def _is_listening(path: Path) -> bool:
    """Whether a living process listens on the socket at a path; one that nobody may connect to counts as such."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # EAGAIN: more wait for it than it has room for
            return True
    return True


def _is_same(found: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(found, path.stat())
    except OSError:
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    return descriptor >= 0 and _is_same(os.fstat(descriptor), path)


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
