"""Where a daemon listens, and whose it may be.

An address is `unix:/absolute/path.sock`, `tcp:host:port` or `tls:host:port`.
"""

import contextlib
import ipaddress
import os
import pwd
from dataclasses import dataclass
from urllib.parse import quote

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import shown, whole

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
        daemon_user: A user whose daemon may answer there; see `users.trusted_uids`.

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
