"""How the daemon's gRPC servers talk: the limits of HTTP/2, and TLS."""

import grpc

from gyre_daemon.runtime.certificates import CertificateFiles, Certificates

# Limits of one connection, and of its idle time. Gyre's clients stay far below.
SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # otherwise a second daemon would silently share the port
    # Control messages are small. A larger limit lets a client fill the daemon's memory. It counts
    # after decompression, too.
    ("grpc.max_receive_message_length", 64 << 10),
    # A client has a connection for each session: two long calls, and a short one now and then;
    # further calls wait in the client. The headers of a call take memory before we see the call:
    # a flood of them over 64 connections took 1,170 MiB with 4096, and takes 60 MiB with 16. With
    # fewer, a client that calls often is refused: an ended call counts a moment longer.
    ("grpc.max_concurrent_streams", 16),
    # A call's metadata: ours has some hundred bytes. Beyond the first limit calls are refused at
    # random, beyond the second always.
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # A connection must have finished its handshakes, HTTP/2's included, by then. On a busy node a
    # new process takes a second or two.
    ("grpc.server_handshake_timeout_ms", 15_000),
    # As many as the side channel takes, on each address.
    ("grpc.max_allowed_incoming_connections", 4096),
    # Clients send no pings. Who sends more than these in five minutes is disconnected.
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.http2.min_ping_interval_without_data_ms", 300_000),
    # A host that vanished does not answer a ping; a connection without calls is closed, and made
    # again when it is needed.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.max_connection_idle_ms", 600_000),
]


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Credentials that serve the files' contents at each handshake."""
    served = files.current

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        if files.current is served:
            return None
        served = files.current
        return _configuration(served)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        changed,  # type: ignore[arg-type]  # None stands for no change
        require_client_authentication=bool(served.client_ca),
    )


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.chain)], certificates.client_ca
    )
