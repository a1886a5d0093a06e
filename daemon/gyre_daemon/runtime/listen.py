"""Addresses, sockets that no second daemon takes over, and files that the daemon alone writes.

Whoever may write into the folder of a socket, a lock, a cache or an index could exchange the
files in it. So a folder must belong to the daemon's user or to root, must not be writable
for others, and must not be a link, which might be led elsewhere. The same holds for files. New
files and folders are for the daemon's user alone, whatever the umask.
"""

import errno
import fcntl
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gyre_daemon.errors import ConfigError

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(PermissionError):
    """A folder or file that others control; `strerror` has the reason and the fix."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Have a folder that nobody else controls; missing ones are made with this mode.

    Raises:
        NotOurs: it is there, and others control it.
        OSError: it cannot be made.
    """
    if _make(path, mode):
        return
    check_folder(path)


def check_folder(path: Path) -> None:
    """Refuse a folder that others control.

    Raises:
        NotOurs: it belongs to another user, is writable for others, or is no folder but a link.
        OSError: it cannot be looked at.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise NotOurs(f"{path} is a link to {path.readlink()}; name the folder itself")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if not is_ours(found):
        raise NotOurs(
            f"the folder {path} belongs to user {found.st_uid}, who could exchange its files; "
            f"`chown {os.geteuid()} {path}` or name another folder"
        )
    if found.st_mode & _OTHERS:
        raise NotOurs(
            f"the folder {path} has mode {stat.S_IMODE(found.st_mode):04o}, so other users could "
            f"exchange its files; `chmod go-w {path}` or name another folder"
        )


def open_ours(path: Path, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a regular file that nobody else made; the caller owns the descriptor.

    With `O_CREAT`, a missing file is made for this user alone. A file that is to be written must
    have no second name, by which it might be a file of another folder. So `O_TRUNC` is not allowed:
    it would act before the checks.

    Raises:
        NotOurs: it is a link, belongs to another user, is writable for others, or is no regular
            file.
        OSError: it cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | safe, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(f"{path} is a link; remove it") from error
        raise
    try:
        _check_file(path, os.fstat(descriptor), is_written=bool(flags & (os.O_RDWR | os.O_WRONLY)))
        if flags & os.O_EXCL:
            os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_ours(found: os.stat_result) -> bool:
    """Whether something belongs to this user or to root."""
    return found.st_uid in (0, os.geteuid())


def _check_file(path: Path, found: os.stat_result, *, is_written: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs(f"{path} is no regular file; remove it")
    if not is_ours(found):
        raise NotOurs(f"{path} belongs to user {found.st_uid}; remove it")
    if found.st_mode & stat.S_IWOTH:
        raise NotOurs(f"{path} is writable for other users; remove it")
    if is_written and found.st_nlink > 1:
        raise NotOurs(f"{path} has another name elsewhere (a hard link); remove it")


def _make(path: Path, mode: int) -> bool:
    """Whether the folder was made, with its parents where they are missing too."""
    try:
        path.mkdir(mode)
    except FileExistsError:
        return False
    except FileNotFoundError:
        if path.parent.is_dir():  # such as /proc, where nothing can be made
            raise
        _make(path.parent, mode)
        return _make(path, mode)
    path.chmod(mode)
    return True


_UNSAFE = re.compile(r"[\x00-\x1f\x7f%]")
_PORT = re.compile(r"[0-9]{1,5}")
_FORMS = "unix:PATH, tcp:HOST:PORT and tls:HOST:PORT"
_MAX_SOCKET_PATH_BYTES = 102  # the kernel's 107, less the suffix of the side channel beside it


class UnixAddress(NamedTuple):
    """A Unix socket, by its path."""

    path: Path

    @property
    def grpc_target(self) -> str:
        """The address in gRPC's form."""
        return f"unix:{self.path}"


class TcpAddress(NamedTuple):
    """A port at an IP address; port 0 stands for any free one."""

    host: str
    port: int
    is_tls: bool = False

    @property
    def grpc_target(self) -> str:
        """The address in gRPC's form."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return _is_loopback(self.host)


def parse_address(text: str) -> UnixAddress | TcpAddress:
    """Parse an address on which the daemon serves clients.

    Raises:
        ConfigError: the text is none of `unix:PATH`, `tcp:HOST:PORT` and `tls:HOST:PORT`, the path
            cannot be that of a socket, or the host of `tcp:`, which is not encrypted, is no
            loopback address.
    """
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        # gRPC decodes percent signs, so it would bind another path than the claimed one
        if _UNSAFE.search(rest):
            raise ConfigError(
                f"the socket path {rest!r} must not contain control characters or `%`"
            )
        path = Path(rest).absolute()
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {path} is longer than {_MAX_SOCKET_PATH_BYTES} bytes, the most "
                "that a Unix socket can have"
            )
        return UnixAddress(path)
    if kind not in ("tcp", "tls"):
        raise ConfigError(f"address {text!r} is none of {_FORMS}")
    address = _parse_tcp(text, rest, is_tls=kind == "tls")
    if not (address.is_tls or address.is_loopback):
        raise ConfigError(
            f"address {text!r} is open to other hosts, but `tcp:` has neither encryption nor "
            f"authentication. Listen on tls:{rest} with `tls_certificate`, `tls_key`, and `tokens` "
            "or `tls_client_ca`; or on 127.0.0.1 or a Unix socket."
        )
    return address


def check_tls(
    addresses: Iterable[UnixAddress | TcpAddress], *, has_certificate: bool, has_credentials: bool
) -> None:
    """Refuse `tls:` addresses that the configuration cannot serve, or that anybody could use.

    Callers have credentials where a token or a certificate can prove who they are.

    Raises:
        ConfigError: names the missing file.
    """
    for address in addresses:
        if not isinstance(address, TcpAddress) or not address.is_tls:
            continue
        text = f"tls:{address.grpc_target}"
        if not has_certificate:
            raise ConfigError(
                f"address {text!r} needs a certificate; set `tls_certificate` and `tls_key`"
            )
        if not (address.is_loopback or has_credentials):
            raise ConfigError(
                f"address {text!r} is open to other hosts, and nothing says who may call. Set "
                "`tls_client_ca` for clients with certificates, or `tokens`."
            )


def parse_http_address(key: str, text: str) -> TcpAddress | None:
    """Parse the value of `metrics_listen` or `health_listen`; None if it is empty.

    Raises:
        ConfigError: the text is not `tcp:HOST:PORT` with an IP address as host.
    """
    if not text:
        return None
    kind, _, rest = text.partition(":")
    if kind != "tcp":
        raise ConfigError(f"{key} is {text!r}; it must be tcp:HOST:PORT")
    address = _parse_tcp(text, rest)
    if not _is_ip_address(address.host):
        raise ConfigError(f"{key} is {text!r}; HOST must be an IP address")
    return address


def check_metrics(address: TcpAddress | None, *, is_public: bool) -> None:
    """Refuse to show metrics to other hosts, unless they are public.

    Raises:
        ConfigError: other hosts could reach the address.
    """
    if address and not (is_public or address.is_loopback):
        raise ConfigError(
            f"metrics_listen is 'tcp:{address.grpc_target}', which is open to other hosts: they "
            "would learn the dataset and rate of each job. Listen on 127.0.0.1, or set "
            "metrics_public = true."
        )


class SocketClaim:
    """The exclusive right to the Unix socket `address`, held by a lock on a file next to it.

    The kernel drops the lock however the process ends. So a daemon removes the socket of one that
    was killed, and never that of one that runs. Where somebody removed the lock file, a daemon that
    still listens is found by connecting to its socket.
    """

    def __init__(self, address: UnixAddress) -> None:
        """Claim the path; a missing folder is made, for its owner and group only.

        Raises:
            ConfigError: another daemon has claimed the path, something that is no socket is there,
                or the folder cannot be used or is controlled by others.
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
        """Whether clients that connect to the path reach this daemon's socket."""
        return self._socket is not None and _is_same(self._socket, self._path)

    def claim(self) -> None:
        """Hold the lock, and leave nothing at the path but this daemon's socket.

        Called at the start, and when files were removed; raises ConfigError as then.
        """
        try:
            make_folder(self._path.parent, 0o750)  # clients of the daemon's group look into it
            if self._path.is_symlink() or (self._path.exists() and not self._path.is_socket()):
                raise ConfigError(f"{self._path} is no socket; remove it or listen on another path")
            if not _is_at(self._lock, self._lock_path):
                self._hold()
            if not self.is_reachable:
                self._make_way()
        except OSError as error:
            raise ConfigError(f"cannot claim the socket {self._path}: {error.strerror}") from error

    def open_to_group(self) -> None:
        """Let owner and group connect; called once the socket is bound."""
        self._path.chmod(0o660)
        self._socket = self._path.stat()

    def give_up(self) -> None:
        """Remove socket and lock file, unless they are another daemon's by now."""
        if _is_at(self._lock, self._lock_path):
            self._path.unlink(missing_ok=True)
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _hold(self) -> None:
        """Lock the present lock file, and unlock an earlier one."""
        lock = self._lock_file()
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = lock

    def _make_way(self) -> None:
        """Remove a socket whose daemon has ended."""
        if _is_listening(self._path):
            raise ConfigError(
                f"another process listens on {self._path}, although the lock file next to it is "
                "free, perhaps because the file was removed. Stop that process or listen on "
                "another path."
            )
        self._path.unlink(missing_ok=True)

    def _lock_file(self) -> int:
        while True:
            descriptor = open_ours(self._lock_path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(descriptor)
                raise ConfigError(
                    f"another daemon (process {holder}) serves {self._path}; stop it or listen on "
                    "another path",
                    {"pid": holder},
                ) from error
            if _is_at(descriptor, self._lock_path):
                return descriptor
            os.close(descriptor)  # its holder removed the file after it was opened here


def _is_listening(path: Path) -> bool:
    """Whether a process listens on the socket at a path, even if it refuses this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
        try:
            client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # such as EAGAIN, where its queue of connections is full
            return True
    return True


def _is_same(found: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(found, path.stat())
    except OSError:
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    return descriptor >= 0 and _is_same(os.fstat(descriptor), path)


def _parse_tcp(text: str, rest: str, *, is_tls: bool = False) -> TcpAddress:
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    if not host or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ConfigError(f"address {text!r} is none of {_FORMS}")
    return TcpAddress("127.0.0.1" if host == "localhost" else host, int(port), is_tls)


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_ip_address(host) and ipaddress.ip_address(host).is_loopback
