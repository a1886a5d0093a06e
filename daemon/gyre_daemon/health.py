"""`gyred health`: one call of gRPC's health service, without gRPC's library.

A node probes its daemon every few seconds for as long as it runs, and importing gRPC takes a
processor more than a second. The call is four frames of HTTP/2 (RFC 9113) with headers that need no
table (RFC 7541), and the answer is a message of two bytes. So this module, and all that it imports,
is of the standard library or as light.
"""

import argparse
import socket
import sys
import time

from gyre_protos.text import printable

from gyre_daemon.errors import ConfigError
from gyre_daemon.runtime.listen import TcpAddress, UnixAddress, parse_address

ABOUT = "exit 0 if the daemon at an address serves, 1 if not"
_DEADLINE_S = 5.0
_PATH = b"/grpc.health.v1.Health/Check"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7  # kinds of frames
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_HEADER_BYTES = 9
_MAX_FRAME_BYTES = 1 << 14  # nothing larger may be sent to a client that did not ask for it
_SERVING = b"\x08\x01"  # a HealthCheckResponse


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments of the command."""
    text = "unix:PATH or tcp:HOST:PORT; for a daemon on tls: alone, see `health_listen`"
    command.add_argument("--address", required=True, metavar="ADDRESS", help=text)


def main(arguments: list[str]) -> int:
    """Run the command as the whole program; returns its exit status."""
    about = f"{ABOUT[0].upper()}{ABOUT[1:]}."
    parser = argparse.ArgumentParser(prog="gyred health", description=about)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except ConfigError as error:
        print(printable(f"gyred: {error}"), file=sys.stderr)
        return 2


def run(parsed: argparse.Namespace) -> int:
    """Ask, and print the answer.

    Returns:
        0 if the daemon serves.

    Raises:
        ConfigError: the address is none, or one of `tls:`.
    """
    address = parse_address(parsed.address)
    if isinstance(address, TcpAddress) and address.is_tls:
        raise ConfigError("gyred health asks no tls: address; set `health_listen`, and ask that")
    try:
        with _Call(address) as call:
            is_serving = call.answer() == _SERVING
    except OSError as error:
        reason = f"no answer in {_DEADLINE_S:g} s" if isinstance(error, TimeoutError) else error
        text = f"gyred: no daemon answers at {parsed.address}: {reason}"
        print(printable(text), file=sys.stderr)
        return 1
    print("serving" if is_serving else "not serving")
    return 0 if is_serving else 1


class _Call:
    """One call on a connection; everything ends by one deadline."""

    def __init__(self, address: UnixAddress | TcpAddress) -> None:
        """Connect, and send the call.

        Raises:
            OSError: no server takes it.
        """
        self._deadline = time.monotonic() + _DEADLINE_S
        self._connection = _connection_to(address)
        fields = [
            b"\x83",  # :method POST
            b"\x86",  # :scheme http
            b"\x04" + _text(_PATH),
            b"\x01" + _text(b"localhost"),  # :authority
            b"\x0f\x10" + _text(b"application/grpc"),  # content-type
            b"\x00" + _text(b"te") + _text(b"trailers"),
        ]
        try:
            self._connection.sendall(
                _PREFACE
                + _frame(_SETTINGS, 0, 0)
                + _frame(_HEADERS, _END_HEADERS, 1, b"".join(fields))
                + _frame(_DATA, _END_STREAM, 1, bytes(5))  # an empty message
            )
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def answer(self) -> bytes:
        """The message that the daemon answers.

        Raises:
            OSError: there is none in time.
        """
        message = b""
        while True:
            header = self._received(_HEADER_BYTES)
            num_bytes, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
            if num_bytes > _MAX_FRAME_BYTES:
                raise OSError("no gRPC server listens there")
            payload = self._received(num_bytes)
            if kind == _SETTINGS and not flags & _ACK:
                self._connection.sendall(_frame(_SETTINGS, _ACK, 0))
            elif kind == _DATA:
                message += payload
            elif kind in (_RST_STREAM, _GOAWAY):
                raise OSError("it refuses the call")
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                if not message:
                    raise OSError("it refuses the call")
                return message[5:]

    def _received(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._connection.settimeout(left_s)
            some = self._connection.recv(num_bytes - len(received))
            if not some:
                raise OSError("it hangs up")
            received += some
        return bytes(received)


def _connection_to(address: UnixAddress | TcpAddress) -> socket.socket:
    if isinstance(address, TcpAddress):
        return socket.create_connection((address.host, address.port), timeout=_DEADLINE_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_DEADLINE_S)
        connection.connect(str(address.path))
    except OSError:
        connection.close()
        raise
    return connection


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    header = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return header + payload


def _text(text: bytes) -> bytes:
    """A string of at most 126 bytes in the form of header fields."""
    return bytes([len(text)]) + text
