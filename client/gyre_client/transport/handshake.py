"""Why a connection over TCP failed, where gRPC says no more than that it did.

gRPC reports every failed handshake as one more server that does not answer. One handshake of our
own, with the same files, finds the reason: a person can act on it, and no retry mends it.
"""

import contextlib
import socket
import ssl

from gyre_client.errors import GyreError, InvalidRequest, NotAuthenticated
from gyre_client.transport.address import Address
from gyre_client.transport.credentials import (
    CA_VARIABLE,
    CERTIFICATE_VARIABLE,
    TOKEN_VARIABLE,
    CredentialFiles,
)

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
