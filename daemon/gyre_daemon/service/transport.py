"""How the daemon's gRPC servers talk: the limits of HTTP/2, and TLS."""

import grpc

from gyre_daemon.runtime.certificates import CertificateFiles, Certificates

SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # otherwise a second daemon would silently share the port
    # Control messages are small. A larger limit lets a client fill the daemon's memory.
    ("grpc.max_receive_message_length", 64 << 10),
    # Each session has two long-lived calls, so this allows 2,000 sessions on one connection.
    ("grpc.max_concurrent_streams", 4096),
]


def server_credentials(files: CertificateFiles) -> grpc.ServerCredentials:
    """Credentials that serve what the files hold at each handshake."""
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
