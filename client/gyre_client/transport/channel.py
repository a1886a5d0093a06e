"""gRPC's channel to a daemon: its options, and TLS."""

import grpc

from gyre_client.messages.frames import MAX_FRAME_BYTES
from gyre_client.transport.address import Address
from gyre_client.transport.credentials import Pem

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
