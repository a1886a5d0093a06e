"""gRPC's channel to a daemon: its credentials, options and TLS, and why a connection failed.

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
import os
import select
import socket
import ssl
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from gyre_protos.text import printable

from gyre_client.errors import (
    DaemonFault,
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    NotAuthenticated,
    Overloaded,
)
from gyre_client.transport.address import Address, check_peer

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

        Args:
            timeout_s: How long the daemon may take to accept.

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
