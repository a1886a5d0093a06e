"""Raw gRPC channels to a daemon, for tests that speak the protocol without the client."""

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gyre_client.transport.channel import TOKEN_KEY, CredentialFiles, Identity, parse_address


class _Identified(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the side token to each call that has none."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def _call(self, go_on: Any, details: Any, request: Any) -> Any:
        given = tuple(details.metadata or ())
        if TOKEN_KEY not in dict(given):
            details = details._replace(metadata=(*given, *self._identity.metadata()))
        return go_on(details, request)

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return self._call(continuation, details, request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return self._call(continuation, details, request)

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return self._call(continuation, details, requests)


@contextlib.contextmanager
def identified_channel(address: str) -> Iterator[grpc.Channel]:
    """A channel to a daemon at a Unix socket, whose calls say who calls, as a client's do."""
    identity = Identity(parse_address(address), CredentialFiles())
    with contextlib.closing(identity), grpc.insecure_channel(address) as channel:
        yield grpc.intercept_channel(channel, _Identified(identity))


def is_serving(address: str) -> bool:
    """What a daemon's health service says, at `unix:PATH` or `tcp:HOST:PORT`."""
    with grpc.insecure_channel(address.removeprefix("tcp:")) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=120, wait_for_ready=True
        )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
