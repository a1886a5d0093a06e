"""Where a daemon listens, and whose it may be.

An address is `unix:/absolute/path.sock`, `tcp:host:port` or `tls:host:port`.

A client maps memory of its daemon and trains on its batches. So before it sends anything, it asks
the kernel which user listens at a Unix socket. It trusts root, its own user, and the user that it
was told. gRPC connects by itself, and again after a failure, so no other user may be able to put a
socket at the path: its folder is checked, too.
"""

import contextlib
import ipaddress
import os
import pwd
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from gyre_client.errors import DaemonUnavailable, InvalidRequest, UntrustedDaemon
from gyre_client.transport.arguments import shown, whole

ENVIRONMENT_VARIABLE, USER_VARIABLE = "GYRE_ADDRESS", "GYRE_DAEMON_USER"
_MAX_UID = 2**32 - 2  # 2^32 - 1 means "no user" to the kernel
SIDE_SUFFIX = ".side"
# unix(7): sun_path has 108 bytes with its terminating NUL; the side channel's suffix must fit too.
MAX_SOCKET_PATH_BYTES = 107 - len(SIDE_SUFFIX)

_FORMS = 'an address is "unix:/absolute/path.sock", "tcp:host:port" or "tls:host:port"'


@dataclass(frozen=True)
class Address:
    """A checked address.

    Attributes:
        text: The address as users write it and as messages show it.
        target: The address as gRPC wants it.
        path: The daemon's socket; None over TCP.
        trusted_uids: The users whose daemons may answer at a socket.
        host_and_port: Over TCP; None for a Unix socket.
        is_tls: Whether the connection is encrypted, and the daemon proves its identity.
    """

    text: str
    target: str
    path: str | None = None
    trusted_uids: frozenset[int] = frozenset()
    host_and_port: tuple[str, int] | None = None
    is_tls: bool = False

    @property
    def side_path(self) -> str | None:
        """The socket of the daemon's side channel; None over TCP."""
        return None if self.path is None else self.path + SIDE_SUFFIX

    @property
    def is_private(self) -> bool:
        """Whether no third party between here and the daemon can read along."""
        return self.host_and_port is None or self.is_tls or _is_loopback(self.host_and_port[0])


def parse_address(text: str, daemon_user: int | str | None = None) -> Address:
    """Returns the address that `text` names.

    Args:
        text: In one of the three forms.
        daemon_user: A user whose daemon may answer there; see `trusted_uids`.

    Raises:
        InvalidRequest: `text` has none of the three forms, or there is no such user.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"address is {shown(text)}; {_FORMS}")
    scheme, _, rest = text.partition(":")
    uids = trusted_uids(daemon_user)
    if "\0" in text:
        raise InvalidRequest(f"the address {text!r} holds a NUL; {_FORMS}")
    if scheme == "unix":
        return Address(text, _unix_target(text, rest), rest, uids)
    if scheme in ("tcp", "tls"):
        host, port = _host_and_port(text, rest)
        return Address(
            text,
            f"dns:///{host}:{port}",
            host_and_port=(host.strip("[]"), port),
            is_tls=scheme == "tls",
        )
    raise InvalidRequest(f"the address {text!r} starts with none of unix:, tcp: and tls:; {_FORMS}")


def _unix_target(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise InvalidRequest(f"the path of the address {text!r} is not absolute; {_FORMS}")
    try:
        num_bytes = len(path.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"the path of the address {text!r} holds half a character; {_FORMS}"
        ) from None
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise InvalidRequest(
            f"the path of the address {text!r} has {num_bytes} bytes; "
            f"a Unix socket takes at most {MAX_SOCKET_PATH_BYTES}"
        )
    return f"unix:{quote(path, errors='surrogateescape')}"


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    host, _, port = rest.rpartition(":")
    if not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise InvalidRequest(
            f"the address {text!r} has no host and port; {_FORMS}; an IPv6 host goes in brackets"
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidRequest(
            f"the port of the address {text!r} is not a number from 1 to 65535; {_FORMS}"
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trusted_uids(daemon_user: int | str | None) -> frozenset[int]:
    """Returns the users whose daemons this process trusts: root, its own, and a named one.

    Args:
        daemon_user: A user id or name; None for the one in the environment, if there is one.

    Raises:
        InvalidRequest: This machine knows no such user.
    """
    own = {0, os.geteuid()}
    if daemon_user is None:
        daemon_user = os.environ.get(USER_VARIABLE) or None
    return frozenset(own if daemon_user is None else {*own, _uid_of(daemon_user)})


def name_of(uid: int) -> str:
    """Returns a user's id and, if this machine knows it, name."""
    with contextlib.suppress(KeyError):
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    return f"uid {uid}"


def _uid_of(user: int | str) -> int:
    if isinstance(user, str):
        if not (user.isascii() and user.isdigit() and len(user) < 20):
            with contextlib.suppress(KeyError, ValueError):
                return pwd.getpwnam(user).pw_uid
            raise InvalidRequest(
                f"daemon_user is {shown(user)}, but this machine knows no user of that name; give "
                "the user's name or id"
            )
        user = int(user)
    return whole("daemon_user", user, 0, _MAX_UID)


TIMEOUT_S = 10.0  # a connection waits for room in the backlog of a daemon whose processor is busy
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Peer(NamedTuple):
    """The process that listens on a socket, as the kernel tells."""

    pid: int
    uid: int


def check_files(address: Address) -> None:
    """Checks that only a trusted user can have put the daemon's socket where it is.

    Raises:
        UntrustedDaemon: Another user owns the socket or its folder, or may write to the folder.
        DaemonUnavailable: There is no socket.
    """
    if address.path is None:
        return
    path = Path(address.path)
    try:
        _check_owner(address, path, path.stat())
        for folder in {path.parent, path.resolve().parent}:
            found = folder.stat()
            _check_owner(address, folder, found)
            # In a folder with the sticky bit, only its owner may replace a socket.
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
                raise UntrustedDaemon(
                    f"other users could put their socket at {address.text}: the folder "
                    f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}. Take their right to "
                    f"write away: chmod go-w {folder}"
                )
    except OSError as error:
        raise _unavailable(address, error) from None


def check_listener(address: Address) -> Peer | None:
    """Connects to the daemon's socket, and returns the process that listens; sends nothing.

    Returns:
        None over TCP, where the kernel does not tell.

    Raises:
        UntrustedDaemon: It is a user that this process does not trust.
        DaemonUnavailable: No process listens.
    """
    if address.path is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_S)
        try:
            connection.connect(address.path)
        except OSError as error:
            raise _unavailable(address, error) from None
        return check_peer(connection, address)


def check_peer(connection: socket.socket, address: Address) -> Peer:
    """Returns the process that listens at the other end of a connection.

    Raises:
        UntrustedDaemon: It belongs to a user that this process does not trust.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid % 2**32 not in address.trusted_uids:
        raise _untrusted(address, f"is served by process {pid} of", uid)
    return Peer(pid, uid)


def _check_owner(address: Address, path: Path, found: os.stat_result) -> None:
    if found.st_uid not in address.trusted_uids:
        raise _untrusted(address, f"is not to be trusted: {path} belongs to", found.st_uid)


def _untrusted(address: Address, what: str, uid: int) -> UntrustedDaemon:
    trusted = " and ".join(map(name_of, sorted(address.trusted_uids)))
    return UntrustedDaemon(
        f"the address {address.text} {what} {name_of(uid)}, and this process trusts only "
        f"{trusted}. If that daemon is meant, say so with daemon_user={uid} or "
        f"{USER_VARIABLE}={uid}",
        {"uid": str(uid), "trusted_uids": ",".join(map(str, sorted(address.trusted_uids)))},
    )


def _unavailable(address: Address, error: OSError) -> DaemonUnavailable:
    return DaemonUnavailable(f"no daemon answers at {address.text}: {error.strerror or error}")
