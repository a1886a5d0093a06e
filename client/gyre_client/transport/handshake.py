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


def why_refused(address: Address, files: CredentialFiles) -> GyreError | None:
    """Returns why no connection to `address` can succeed; None where another attempt may."""
    if address.host_and_port is None:
        return None
    try:
        with socket.create_connection(address.host_and_port, _TIMEOUT_S) as connection:
            if address.is_tls:
                return _why_tls_fails(connection, address, files)
            return _why_plain_fails(connection, address)
    except OSError:
        return None  # nobody listens, or not now


def _why_tls_fails(
    connection: socket.socket, address: Address, files: CredentialFiles
) -> GyreError | None:
    assert address.host_and_port
    where = f"the daemon at {address.text}"
    try:
        context = ssl.create_default_context(cafile=files.ca)
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
            # TLS 1.3: the server judges the client's certificate after the client's handshake.
            secure.recv(1)
    except ssl.SSLCertVerificationError as error:
        return NotAuthenticated(
            f"{where} proves with no valid certificate who it is: {error.verify_message}; check "
            f"the address, and {CA_VARIABLE} for the roots of its certificate"
        )
    except ssl.SSLError as error:
        return _refused(where, error)
    return None


def _refused(where: str, error: ssl.SSLError) -> GyreError | None:
    reason = (error.reason or "").lower().replace("_", " ")
    if "wrong version" in reason or "record layer" in reason:
        return InvalidRequest(f"{where} does not speak TLS; use a tcp: address for it")
    if "certificate" in reason or "unknown ca" in reason:
        return NotAuthenticated(
            f"{where} refuses this client's certificate ({reason}); check {CERTIFICATE_VARIABLE}"
        )
    return None


def _why_plain_fails(connection: socket.socket, address: Address) -> GyreError | None:
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
