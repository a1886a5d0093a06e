"""Checks of every call before its method runs: the caller is known, its messages decode.

A call may outlast the credential of its caller, and then it is ended.
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Sequence,
)
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from gyre_protos.v1 import loader_pb2 as pb
from msgspec import Struct

from gyre_daemon import errors
from gyre_daemon.access.credentials import (
    CertificateFiles,
    Certificates,
    FailureLimit,
    TokenStore,
    expires_at,
)
from gyre_daemon.access.policy import ANONYMOUS, Limits, Policy, Principal
from gyre_daemon.errors import GyreError, InvalidRequest, LeaseExpired, NotAllowed, NotAuthenticated
from gyre_daemon.memory.sidechannel import Peer, SideChannel
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.events import debug_event, log_event
from gyre_daemon.runtime.limits import Connections, Remote
from gyre_daemon.storage.location import redact

DOMAIN = "gyre"
STATUS_CODES: dict[type[errors.GyreError], grpc.StatusCode] = {
    errors.GyreError: grpc.StatusCode.INTERNAL,
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownDataset: grpc.StatusCode.NOT_FOUND,
    errors.ShardMissing: grpc.StatusCode.NOT_FOUND,
    errors.NotAuthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.StorageUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.CorruptSample: grpc.StatusCode.DATA_LOSS,
    errors.CursorRejected: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Fenced: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseExpired: grpc.StatusCode.ABORTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
}
# gRPC carries a status in metadata, and beyond 8 KiB of it a client drops the answer at random.
# With larger limits, long names in an error turn it into an unexplained failure.
_MAX_MESSAGE_BYTES = 2000
_MAX_FACT_BYTES = 400
_DETAILS_KEY = "grpc-status-details-bin"  # where gRPC's libraries look for a google.rpc.Status

Context = grpc.aio.ServicerContext[Any, Any]


def to_status(error: errors.GyreError) -> status_pb2.Status:
    """The error as google.rpc.Status: its message, and its class and facts as ErrorInfo."""
    facts = {key: _cut(value, _MAX_FACT_BYTES) for key, value in error.facts.items()}
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=facts)
    detail = AnyMessage()
    detail.Pack(info)
    code: int = STATUS_CODES[type(error)].value[0]
    return status_pb2.Status(
        code=code, message=_cut_as_sent(str(error), _MAX_MESSAGE_BYTES), details=[detail]
    )


def _cut_as_sent(text: str, max_bytes: int) -> str:
    """The part of a text that fits after gRPC percent-encodes all but printable ASCII."""
    encoded = text.encode(errors="replace")
    sizes = (1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in encoded[:max_bytes])
    fitting = sum(total <= max_bytes for total in itertools.accumulate(sizes))
    return encoded[:fitting].decode(errors="ignore")


def _cut(text: str, max_bytes: int) -> str:
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


async def abort(context: Context, error: Exception, metrics: Metrics) -> NoReturn:
    """End a call with the status of an error, and count it.

    Others than GyreError are logged, and INTERNAL.
    """
    if isinstance(error, ExceptionGroup):
        error = errors.first_error(error)
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.InternalError)):
        raise error  # answered already; or the client was gone before the answer
    if not isinstance(error, errors.GyreError):
        log_event("internal error", {"error": repr(error)}, logging.ERROR)
        logging.getLogger("gyre_daemon").debug("internal error", exc_info=error)
        error = errors.GyreError(f"the daemon failed: {error!r}; see its log")
    metrics.count_error(error)
    debug_event("call refused", {"error": type(error).__name__, "reason": error})
    status = to_status(error)
    details = (_DETAILS_KEY, status.SerializeToString())
    await context.abort(STATUS_CODES[type(error)], status.message, (details,))
    raise AssertionError("abort returned")


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


_SCHEME = "bearer "
_MAX_NAME_CHARS = 200
TOKEN_KEY = "gyre-side-token"
# In the facts of an error: a client that connects to the side channel again may repeat the call.
_FACT = "side_channel"


class Callers:
    """Tells who makes each call.

    A user of this machine calls over a Unix socket. gRPC does not say which one, and the kernel
    says it on the side channel. So each of these calls carries the token of a connection there.
    Over TCP, a token or a certificate says it.
    """

    def __init__(
        self,
        side_channels: Sequence[SideChannel],
        tokens: TokenStore,
        limits: Limits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Know these connections and tokens; `clock` returns the seconds since the epoch."""
        self._side_channels = side_channels
        self._tokens = tokens
        self._limits = limits
        self._clock = clock
        self._failures = FailureLimit()

    def identify(self, context: Context) -> Principal:
        """The caller.

        Raises:
            NotAuthenticated, Overloaded: over TCP; see `principal`.
            NotAllowed: a call over a Unix socket carries no token.
            LeaseExpired: it carries the token of a connection that has ended.
            Overloaded: the caller calls too often.
        """
        peer = self.peer(context)
        caller = peer.principal if peer else self.principal(context)
        self._limits.count_request(caller)
        return caller

    def peer(self, context: Context) -> Peer | None:
        """The caller's connection to the side channel, None over TCP; raises as `identify` does."""
        if not is_local(context):
            return None
        token = str(dict(context.invocation_metadata() or ()).get(TOKEN_KEY, ""))
        if not token:
            raise NotAllowed(
                "the daemon cannot tell which user calls: over a Unix socket a client first "
                "connects to the socket next to it, whose name ends in .side. Give the client "
                "access to that socket, and use one of the daemon's version.",
                {_FACT: "missing"},
            )
        peer = next((peer for each in self._side_channels if (peer := each.peer(token))), None)
        if peer is None:
            raise LeaseExpired(
                "the client's connection to the daemon's side channel has ended, or the daemon was "
                "restarted; connect again",
                {_FACT: "ended"},
            )
        return peer

    def principal(self, context: Context) -> Principal:
        """The caller over TCP.

        A token counts more than a certificate. Without either, a caller is anonymous where that is
        enough: on loopback, or where the daemon knows no tokens.

        Raises:
            NotAuthenticated: the token is not valid, or the certificate has expired; or there is no
                token, the connection has TLS, and the daemon asks for tokens.
            Overloaded: as before, and the caller's address has failed too often.
        """
        try:
            return self._identify(context)
        except NotAuthenticated as reason:
            raise self._failures.refuse(Remote.of_grpc(context.peer()).host, reason) from None

    def _identify(self, context: Context) -> Principal:
        token = _bearer_token(context)
        if token is not None:
            return Principal(f"token:{self._tokens.name_of(token)}")
        proven = context.auth_context()
        chains = proven.get("x509_pem_cert_chain") or proven.get("x509_pem_cert") or ()
        chain = next(iter(chains), b"")
        if chain and expires_at(chain) <= self._clock():  # TLS checked it at the beginning
            raise NotAuthenticated(
                "the client's certificate has expired; connect again with a new one"
            )
        if names := proven.get("x509_common_name") or proven.get("x509_subject_alternative_name"):
            return Principal(f"certificate:{_printable(next(iter(names)))}")
        if proven.get("x509_pem_cert"):
            raise NotAuthenticated("the client's certificate has neither a common name nor others")
        if self._tokens and b"ssl" in proven.get("transport_security_type", ()):
            raise NotAuthenticated(
                "this daemon asks for a token, and the call has none; "
                "set GYRE_TOKEN_FILE to a file that holds one"
            )
        return ANONYMOUS


def is_local(context: Context) -> bool:
    """Whether the call came over a Unix socket."""
    return context.peer().startswith("unix:")


def _bearer_token(context: Context) -> str | None:
    """The token of RFC 6750's header; None where there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            text = value if isinstance(value, str) else value.decode(errors="replace")
            if not text.lower().startswith(_SCHEME):
                raise NotAuthenticated("the authorization of the call is no bearer token")
            return text[len(_SCHEME) :].strip()
    return None


def _printable(name: bytes) -> str:
    text = name.decode(errors="replace")
    if not text.isprintable() or not 1 <= len(text) <= _MAX_NAME_CHARS:
        raise NotAuthenticated(
            f"the name in the client's certificate cannot be used: {text!r:.200}"
        )
    return text


_MAX_CHARS = 200  # of a name that a client sent


def audit_hidden(caller: Principal, dataset: str, policy: Policy) -> None:
    """Write a line if a dataset that the caller asked about exists, and not for the caller."""
    if rule := policy.refusal(caller, dataset, ""):
        facts = {"user": caller.name, "pid": caller.pid, "dataset": dataset, "rule": rule}
        log_event("dataset refused", facts)


@contextlib.contextmanager
def audited_refusals(
    caller: Principal, request: pb.OpenSessionRequest, policy: Policy
) -> Iterator[None]:
    """Write a line if the block, which opens a session, raises a GyreError."""
    try:
        yield
    except GyreError as error:
        name, reader = request.dataset.name, request.reader
        facts = {
            "user": caller.name,
            "pid": caller.pid,
            "dataset": redact(name)[:_MAX_CHARS] or "ad hoc",
            "job": reader.job[:_MAX_CHARS],
            "rank": reader.rank,
            "rule": policy.refusal(caller, name, reader.job),
            "reason": type(error).__name__,
        }
        log_event("session refused", facts)
        raise


# Health says nothing about data or jobs, and a probe has no token.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
# How often the credential of a call that goes on is looked at: so long may a call outlast it. A
# look takes some microseconds, and a session has two calls.
_LOOK_EVERY_S = 5.0

Handler = Any  # grpc.RpcMethodHandler, whose fields have no types


class _Undecodable(Struct):
    """Stands for a message that is none of the protocol's, until its call can be answered."""

    error: DecodeError


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers with a wrong credential, and messages that cannot be decoded."""

    def __init__(self, callers: Callers, connections: Connections, metrics: Metrics) -> None:
        """Check callers with `callers`, and tell `connections` of calls over TCP."""
        self._callers = callers
        self._connections = connections
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Put the checks before the method's own handler."""
        handler = await continuation(handler_call_details)
        if handler is None:  # there is no such method
            return None
        is_open = handler_call_details.method.startswith(_OPEN_TO_ALL)
        if not is_open:
            debug_event("call", {"method": handler_call_details.method.rpartition("/")[2]})
        return self._guarded(handler, is_open=is_open)

    def _guarded(self, handler: Handler, *, is_open: bool) -> Handler:
        streams = handler.request_streaming
        unary_request = handler.unary_unary or handler.unary_stream
        method = unary_request or handler.stream_unary or handler.stream_stream

        def admit(request: Any, context: Context, ended: contextlib.ExitStack) -> Any:
            """The request, or the requests of a stream, whose caller is checked with the first."""
            is_known = is_open or is_local(context)
            first = None if is_known else partial(self._admit, context, ended)
            if streams:
                return _each(request, first)
            if first:
                first()
            return _check(request)

        async def unary(request: Any, context: Context) -> Any:
            try:
                with self._while_known(context, is_open=is_open), contextlib.ExitStack() as ended:
                    return await method(admit(request, context, ended), context)
            except Exception as error:
                await abort(context, error, self._metrics)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                with self._while_known(context, is_open=is_open), contextlib.ExitStack() as ended:
                    answers = method(admit(request, context, ended), context)
                    if inspect.isawaitable(answers):  # it writes its answers to the context
                        await answers
                        return
                    async with contextlib.aclosing(answers):
                        async for answer in answers:
                            yield answer
            except Exception as error:
                await abort(context, error, self._metrics)

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[streams, handler.response_streaming]
        return make(
            stream if handler.response_streaming else unary,
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _admit(self, context: Context, ended: contextlib.ExitStack) -> None:
        """Check the caller, and let the call count until `ended`."""
        is_proven = self._callers.principal(context) is not ANONYMOUS
        ended.enter_context(self._connections.call(context.peer(), is_proven=is_proven))

    @contextlib.contextmanager
    def _while_known(self, context: Context, *, is_open: bool) -> Iterator[None]:
        """A context that ends the call as `principal` does, once its credential is not valid."""
        if is_open or is_local(context):
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        refused: GyreError | None = None
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal refused, timer
            try:
                self._callers.principal(context)
            except GyreError as reason:
                refused = reason
                if task:
                    task.cancel()
            else:
                timer = loop.call_later(_LOOK_EVERY_S, look)

        timer = loop.call_later(_LOOK_EVERY_S, look)
        try:
            yield
        except asyncio.CancelledError:
            if refused is None or task is None:
                raise
            task.uncancel()
            raise refused from None
        finally:
            timer.cancel()


def _tolerant(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserializer that leaves the answer to undecodable bytes to the call."""

    def decode_or_mark(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return _Undecodable(error)

    return decode_or_mark


def _check(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise InvalidRequest(f"the request is no message of the protocol: {request.error}")
    return request


async def _each(
    requests: AsyncIterator[Any], first: Callable[[], None] | None
) -> AsyncIterator[Any]:
    """The messages of a stream; `first` is called with the first one."""
    async for request in requests:
        if first:
            first()
            first = None
        yield _check(request)
