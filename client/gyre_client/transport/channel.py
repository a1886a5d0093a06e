"""A daemon's address, whose it may be, and gRPC's channel to it: credentials, TLS, failures.

An address is `unix:/absolute/path.sock`, `tcp:host:port` or `tls:host:port`.

A client maps memory of its daemon and trains on its batches. So before it sends anything, it asks
the kernel which user listens at a Unix socket. It trusts root, its own user, and the user that it
was told. gRPC connects by itself, and again after a failure, so no other user may be able to put a
socket at the path: its folder is checked, too.

A client's credentials over TCP are roots to verify the daemon by, and a token or certificate. All
of it stands in files that the environment names, so that it appears in no argument and no log.

A call over a Unix socket carries the token of a connection to the side channel, on which the kernel
tells the daemon the user and the process. The side channel is a Unix socket. The daemon also passes
the descriptors of its arenas there. The connection lasts as long as this process may read the
arenas: its end tells the daemon that the session's batches may be overwritten.

Payload frames are the one message on the wire that no protobuf codec touches.
`PayloadChunk { bytes data = 1; }` is the tag 0x0a, the length as a varint, and the data
(https://protobuf.dev/programming-guides/encoding). The data is copied once, straight from gRPC's
buffer to where the batch is assembled.

gRPC reports every failed handshake as one more server that does not answer. One handshake of our
own, with the same files, finds the reason: a person can act on it, and no retry mends it.
"""

import contextlib
import ipaddress
import os
import pwd
import select
import socket
import ssl
import stat
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import grpc
from gyre_protos.text import printable

from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    NotAuthenticated,
    Overloaded,
    UntrustedDaemon,
)
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

    `daemon_user` is a user whose daemon may answer there; see `trusted_uids`.

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


# A connection waits for room in the backlog of a daemon whose processor is busy.
_CONNECT_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


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


def check_listener(address: Address) -> int | None:
    """Connects to the daemon's socket, and returns the id of the listening process; sends nothing.

    Returns:
        None over TCP, where the kernel does not tell.

    Raises:
        UntrustedDaemon: It is a user that this process does not trust.
        DaemonUnavailable: No process listens.
    """
    if address.path is None:
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(address.path)
        except OSError as error:
            raise _unavailable(address, error) from None
        return check_peer(connection, address)


def check_peer(connection: socket.socket, address: Address) -> int:
    """Returns the id of the process that listens at the other end of a connection.

    Raises:
        UntrustedDaemon: It belongs to a user that this process does not trust.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid % 2**32 not in address.trusted_uids:
        raise _untrusted(address, f"is served by process {pid} of", uid)
    return int(pid)


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


TOKEN_VARIABLE = "GYRE_TOKEN_FILE"
CA_VARIABLE = "GYRE_CA_FILE"
CERTIFICATE_VARIABLE = "GYRE_CERTIFICATE_FILE"
KEY_VARIABLE = "GYRE_KEY_FILE"

_MAX_FILE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of PEM files for a TLS connection; see `CredentialFiles`."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Files in PEM, and one with a token; None for unused ones.

    Attributes:
        token: Its first line without a comment begins with the token.
        ca: Roots of the daemon's certificate, instead of the public ones.
        certificate: The client's own, for a daemon that asks for one.
        key: The private key of `certificate`.
    """

    token: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "CredentialFiles":
        """Returns the files that the environment names.

        Raises:
            InvalidRequest: It names a certificate and no key, or the reverse.
        """

        def path(variable: str) -> Path | None:
            return Path(text) if (text := environment.get(variable)) else None

        files = cls(*map(path, (TOKEN_VARIABLE, CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE)))
        if (files.certificate is None) != (files.key is None):
            raise InvalidRequest(
                f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} go together; set both or neither"
            )
        return files

    def read_pem(self) -> Pem:
        """Returns the current contents of the files of a TLS connection.

        Raises:
            InvalidRequest: A file cannot be read.
        """
        return Pem(
            _read(self.ca, CA_VARIABLE),
            _read(self.certificate, CERTIFICATE_VARIABLE),
            _read(self.key, KEY_VARIABLE),
        )

    def metadata(self, address: Address) -> tuple[tuple[str, str], ...]:
        """Returns the metadata that identifies a call's sender: the token, read now.

        Raises:
            InvalidRequest: The file cannot be read or holds no token; or the token would travel in
                clear.
        """
        if self.token is None or address.host_and_port is None:
            return ()
        if not address.is_private:
            raise InvalidRequest(
                f"the token of {TOKEN_VARIABLE} would travel to {address.text} in clear; use a "
                "tls: address, or unset the variable"
            )
        text = (_read(self.token, TOKEN_VARIABLE) or b"").decode(errors="replace")
        lines = [line.split() for line in text.splitlines()]
        token = next((words[0] for words in lines if words and words[0][0] != "#"), "")
        if not token or not token.isascii() or not token.isprintable():
            raise InvalidRequest(f"the file of {TOKEN_VARIABLE}, {self.token}, holds no token")
        return (("authorization", f"Bearer {token}"),)


def _read(path: Path | None, variable: str) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"cannot read the file of {variable}, {path}: {reason}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise InvalidRequest(
            f"the file of {variable}, {path}, has more than {_MAX_FILE_BYTES} bytes"
        )
    return data


# The daemon sends at most this much of a payload in one message. gRPC's limit for received messages
# is set to the frame: the tag and three bytes of varint come before the data.
MAX_CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = MAX_CHUNK_BYTES + 4

_DATA_TAG = 0x0A  # field 1, length-delimited


def chunk_data(frame: bytes) -> memoryview:
    """Returns the data of one payload frame, without a copy.

    Raises:
        DaemonFault: The frame is not a PayloadChunk, or it is longer than `MAX_FRAME_BYTES`.
    """
    view = memoryview(frame)
    if not view:
        return view  # proto3 leaves an empty field out
    length = 0
    for index, byte in enumerate(view[1:5]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if view[0] == _DATA_TAG and 2 + index + length == len(view) <= MAX_FRAME_BYTES:
                return view[2 + index :]
            break
    raise DaemonFault(
        f"a payload frame of {len(view)} bytes is not a PayloadChunk: "
        f"it starts with {bytes(view[:6]).hex()}"
    )


MAX_CONTROL_BYTES = 64 << 10  # the daemon's limit for a request
# How long one attempt to connect may take. A daemon whose processor is busy accepts late; without
# a listener, the attempt fails at once.
CONNECT_TIMEOUT_MS = 10_000

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_CONTROL_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # share no connection back-off with other channels
    ("grpc.initial_reconnect_backoff_ms", 50),
    # despite its name, this is the time that one attempt to connect may take
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 500),
)


def open_channel(address: Address, pem: Pem) -> grpc.Channel:
    """Returns a channel, which connects with its first call; `pem` counts for TLS alone."""
    if not address.is_tls:
        return grpc.insecure_channel(address.target, _OPTIONS)
    credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.certificate)
    return grpc.secure_channel(address.target, credentials, _OPTIONS)


# A server answers a handshake within milliseconds; a silent one must not hold up the client.
_TIMEOUT_S = 5.0
_PROTOCOLS = ["h2"]
# A daemon about to end closes a connection too, but does not accept the next one.
_NUM_TRIES = 2


def why_refused(address: Address, files: CredentialFiles) -> GyreError | None:
    """Returns why no connection to `address` can succeed; None where another attempt may."""
    if address.host_and_port is None:
        return None
    reason: GyreError | None = None
    try:
        for _ in range(_NUM_TRIES):
            with socket.create_connection(address.host_and_port, _TIMEOUT_S) as connection:
                why = _why_tls_fails if address.is_tls else _why_plain_fails
                reason = why(connection, address, files)
    except OSError:
        return None  # no process listens, or not now
    return reason


def _why_tls_fails(
    connection: socket.socket, address: Address, files: CredentialFiles
) -> GyreError | None:
    assert address.host_and_port
    where = f"the daemon at {address.text}"
    try:
        context = ssl.create_default_context(cafile=files.ca)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC is not strict, Python 3.13 is
        if files.certificate:
            # The password keeps OpenSSL from asking for one.
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        return InvalidRequest(
            f"the files of {CA_VARIABLE} and {CERTIFICATE_VARIABLE} cannot be used: {error}"
        )
    context.set_alpn_protocols(_PROTOCOLS)
    try:
        with context.wrap_socket(connection, server_hostname=address.host_and_port[0]) as secure:
            # With TLS 1.3 a server judges the client's certificate when the client's handshake is
            # over. One that accepts it speaks first (RFC 9113, section 3.4).
            if not secure.recv(1):
                return _certificate_refused(where)
    except ssl.SSLCertVerificationError as error:
        return NotAuthenticated(
            f"{where} proves with no valid certificate who it is: {error.verify_message}; check "
            f"the address, and {CA_VARIABLE} for the roots of its certificate"
        )
    except ssl.SSLError as error:
        reason = error.reason or ""
        if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason:
            return InvalidRequest(f"{where} does not speak TLS; use a tcp: address for it")
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            return _certificate_refused(where)
    return None


def _certificate_refused(where: str) -> NotAuthenticated:
    return NotAuthenticated(
        f"{where} ends the connection after the handshake: it asks for a client certificate, and "
        f"has none that it accepts; check {CERTIFICATE_VARIABLE}"
    )


def _why_plain_fails(
    connection: socket.socket, address: Address, _: CredentialFiles
) -> GyreError | None:
    """Returns an error if the port answers a TLS handshake."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(_PROTOCOLS)
    with contextlib.suppress(ssl.SSLError), context.wrap_socket(connection):
        return InvalidRequest(
            f"the daemon at {address.text} speaks TLS: use a tls: address, with {CA_VARIABLE} for "
            f"the roots of its certificate and {TOKEN_VARIABLE} or {CERTIFICATE_VARIABLE} for yours"
        )
    return None


TOKEN_KEY = "gyre-side-token"
TOKEN_BYTES = 32
REFUSED = "refused: "  # the daemon's answer instead of a token, before the reason
MAX_ANSWER_BYTES = 4096
TIMEOUT_S = 10.0  # the daemon answers within a millisecond; a stuck one must not hang the client


class NotShared(DaemonUnavailable):
    """The daemon's memory cannot be mapped in this process, now or later."""


class SideChannel:
    """A connection to the daemon's side channel, until `close`.

    Attributes:
        token: Tells the daemon which connection a call belongs to.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._connection = connection
        self.token = token
        _open.add(self)

    def close(self) -> None:
        """Tells the daemon that this process no longer reads any arena it received here."""
        self._connection.close()

    @property
    def is_over(self) -> bool:
        """Whether the daemon has hung up; ask only where no arena is under way."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLIN)
        except ValueError:  # another thread has closed it
            return True
        return bool(poll.poll(0))

    @classmethod
    def connect(cls, address: Address, timeout_s: float = TIMEOUT_S) -> "SideChannel | None":
        """Returns a connection; None if the daemon is on another machine or cannot be reached.

        Raises:
            Overloaded: The daemon takes no further connection, for the reason that it says.
            UntrustedDaemon: The daemon belongs to a user that this process does not trust.
        """
        if address.side_path is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        token = b""
        try:
            connection.settimeout(min(timeout_s, TIMEOUT_S))
            with contextlib.suppress(OSError):
                connection.connect(address.side_path)
                check_peer(connection, address)
                token = connection.recv(MAX_ANSWER_BYTES)
                connection.settimeout(TIMEOUT_S)
            if len(token) == TOKEN_BYTES and token.isalnum():
                return cls(connection, token.decode())
        except BaseException:
            connection.close()
            raise
        connection.close()
        if token.startswith(REFUSED.encode()):
            reason = token.removeprefix(REFUSED.encode())
            raise Overloaded(printable(reason.decode(errors="replace")))
        return None

    def receive(self, session_id: str, number: int) -> int:
        """Returns the descriptor of a session's next arena; the caller owns it.

        Raises:
            NotShared: The message arrived without its descriptor.
            DaemonUnavailable: The daemon hung up, or sent another arena.
        """
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, 256, 1)
        except OSError as error:
            raise DaemonUnavailable(f"the daemon's side channel failed: {error}") from error
        is_expected = message == f"{session_id} {number}".encode()
        if is_expected and descriptors:
            return descriptors[0]
        for descriptor in descriptors:
            os.close(descriptor)
        if is_expected:
            raise NotShared("the descriptor of the daemon's memory does not reach this process")
        raise DaemonUnavailable(
            "the daemon shared an arena that did not arrive on the side channel"
        )


Metadata = tuple[tuple[str, str], ...]


_open: "weakref.WeakSet[SideChannel]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: closes its copies, so that the daemon learns when the parent hangs up."""
    for side in list(_open):
        side.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class Identity:
    """A connection to the side channel for the calls of one channel. Safe to use from any thread.

    It is made for the first call, and again after the daemon was restarted.
    """

    def __init__(self, address: Address, files: CredentialFiles) -> None:
        self._address = address
        self._files = files
        # The last one counts. A list, because an interrupt could leave a lock held: threads that
        # call at the same moment may each make a connection.
        self._sides: list[SideChannel] = []

    def metadata(self, timeout_s: float = TIMEOUT_S) -> Metadata:
        """Returns the metadata of a call; empty if there is neither side channel nor token.

        The daemon may take `timeout_s` to accept.

        Raises:
            InvalidRequest: Over TCP: see `CredentialFiles.metadata`.
        """
        if self._address.side_path is None:
            return self._files.metadata(self._address)
        side = next(reversed(self._sides), None)
        if side is not None and side.is_over:
            self.close()
            side = None
        if side is None:
            side = SideChannel.connect(self._address, timeout_s)
            if side is None:
                return ()
            self._sides.append(side)
        return ((TOKEN_KEY, side.token),)

    def close(self) -> None:
        """Ends the connections; a later call makes another."""
        with contextlib.suppress(IndexError):
            while True:
                self._sides.pop().close()
