"""Where a daemon listens: `unix:/absolute/path.sock`, `tcp:host:port` or `tls:host:port`."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import quote

from gyre_client.errors import InvalidRequest

ENVIRONMENT_VARIABLE = "GYRE_ADDRESS"
SIDE_SUFFIX = ".side"
# unix(7): sun_path has 108 bytes with its terminating NUL; the side channel's suffix must fit too.
MAX_SOCKET_PATH_BYTES = 107 - len(SIDE_SUFFIX)

_FORMS = 'an address is "unix:/absolute/path.sock", "tcp:host:port" or "tls:host:port"'


@dataclass(frozen=True)
class Address:
    """An address that has been checked.

    Attributes:
        text: The address as users write it and as messages show it.
        target: The address as gRPC wants it.
        side_path: The socket of the daemon's side channel; None over TCP.
        host_and_port: Over TCP; None for a Unix socket.
        is_tls: Whether the connection is encrypted, and the daemon proves who it is.
    """

    text: str
    target: str
    side_path: str | None
    host_and_port: tuple[str, int] | None = None
    is_tls: bool = False

    @property
    def is_private(self) -> bool:
        """Whether nobody between here and the daemon can read along."""
        return self.host_and_port is None or self.is_tls or _is_loopback(self.host_and_port[0])


def parse_address(text: str) -> Address:
    """Returns the address that `text` names.

    Raises:
        InvalidRequest: `text` has none of the three forms.
    """
    scheme, _, rest = text.partition(":")
    if "\0" in text:
        raise InvalidRequest(f"the address {text!r} holds a NUL; {_FORMS}")
    if scheme == "unix":
        return Address(text, _unix_target(text, rest), rest + SIDE_SUFFIX)
    if scheme in ("tcp", "tls"):
        host, port = _host_and_port(text, rest)
        target = f"dns:///{host}:{port}"
        return Address(text, target, None, (host.strip("[]"), port), is_tls=scheme == "tls")
    raise InvalidRequest(f"the address {text!r} starts with none of unix:, tcp: and tls:; {_FORMS}")


def _unix_target(text: str, path: str) -> str:
    if not path.startswith("/"):
        raise InvalidRequest(f"the path of the address {text!r} is not absolute; {_FORMS}")
    num_bytes = len(path.encode(errors="surrogateescape"))
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
