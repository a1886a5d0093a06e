"""Where a daemon listens, `unix:/absolute/path.sock` or `tcp:host:port`, and whose it may be."""

from dataclasses import dataclass
from urllib.parse import quote

from gyre_client.errors import InvalidRequest
from gyre_client.transport.arguments import shown
from gyre_client.transport.users import trusted_uids

ENVIRONMENT_VARIABLE = "GYRE_ADDRESS"
SIDE_SUFFIX = ".side"
# unix(7): sun_path has 108 bytes with its terminating NUL; the side channel's suffix must fit too.
MAX_SOCKET_PATH_BYTES = 107 - len(SIDE_SUFFIX)

_FORMS = 'an address is "unix:/absolute/path.sock" or "tcp:host:port"'


@dataclass(frozen=True)
class Address:
    """An address that has been checked.

    Attributes:
        text: The address as users write it and as messages show it.
        target: The address as gRPC wants it.
        path: The daemon's socket; None over TCP.
        trusted_uids: The users whose daemons may answer at a socket.
    """

    text: str
    target: str
    path: str | None = None
    trusted_uids: frozenset[int] = frozenset()

    @property
    def side_path(self) -> str | None:
        """The socket of the daemon's side channel; None over TCP."""
        return None if self.path is None else self.path + SIDE_SUFFIX


def parse_address(text: str, daemon_user: int | str | None = None) -> Address:
    """Returns the address that `text` names.

    Args:
        text: In one of the two forms.
        daemon_user: A user whose daemon may answer there; see `users.trusted_uids`.

    Raises:
        InvalidRequest: `text` has neither of the two forms, or there is no such user.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"address is {shown(text)}; {_FORMS}")
    scheme, _, rest = text.partition(":")
    uids = trusted_uids(daemon_user)
    if "\0" in text:
        raise InvalidRequest(f"the address {text!r} holds a NUL; {_FORMS}")
    if scheme == "unix":
        return Address(text, _unix_target(text, rest), rest, uids)
    if scheme == "tcp":
        return Address(text, _tcp_target(text, rest))
    raise InvalidRequest(f"the address {text!r} starts with neither unix: nor tcp:; {_FORMS}")


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


def _tcp_target(text: str, rest: str) -> str:
    host, _, port = rest.rpartition(":")
    if not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise InvalidRequest(
            f"the address {text!r} has no host and port; {_FORMS}; an IPv6 host goes in brackets"
        )
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidRequest(
            f"the port of the address {text!r} is not a number from 1 to 65535; {_FORMS}"
        )
    return f"dns:///{host}:{port}"
