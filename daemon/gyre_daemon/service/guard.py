"""Checks of every call before its method runs: the caller is known, its messages decode.

A call may outlast the credential of its caller, and then it is ended.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from gyre_daemon.access.principal import ANONYMOUS
from gyre_daemon.errors import GyreError, InvalidRequest
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.connections import Connections
from gyre_daemon.runtime.events import debug_event
from gyre_daemon.service.authentication import Authenticator, is_local
from gyre_daemon.service.status import Context, abort

# Health says nothing about data or jobs, and a probe has no token.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
# How often the credential of a call that goes on is looked at: so long may a call outlast it. A
# look takes some microseconds, and a session has two calls.
_LOOK_EVERY_S = 5.0

Handler = Any  # grpc.RpcMethodHandler, whose fields have no types


class _Undecodable:
    """Stands for a message that is none of the protocol's, until its call can be answered."""

    def __init__(self, error: DecodeError) -> None:
        self._error = error

    def refusal(self) -> InvalidRequest:
        return InvalidRequest(f"the request is no message of the protocol: {self._error}")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses callers with a wrong credential, and messages that cannot be decoded."""

    def __init__(
        self, authenticator: Authenticator, connections: Connections, metrics: Metrics
    ) -> None:
        """Check callers with `authenticator`, and tell `connections` of calls over TCP."""
        self._authenticator = authenticator
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
        method = next(
            each
            for each in (
                handler.unary_unary,
                handler.unary_stream,
                handler.stream_unary,
                handler.stream_stream,
            )
            if each
        )

        def admit(request: Any, context: Context, ended: contextlib.ExitStack) -> Any:
            """The request, or the requests of a stream, with the checks in front."""
            check: Callable[[Any], Any] = _check
            if not (is_open or is_local(context)):
                check = self._check_caller(context, ended)
            return _each(request, check) if streams else check(request)

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

    def _check_caller(self, context: Context, ended: contextlib.ExitStack) -> Callable[[Any], Any]:
        """Check each message and its caller; the first one makes the call count until `ended`."""
        is_noted = False

        def check(message: Any) -> Any:
            nonlocal is_noted
            is_proven = self._authenticator.principal(context) is not ANONYMOUS
            if not is_noted:
                is_noted = True
                ended.enter_context(self._connections.call(context.peer(), is_proven=is_proven))
            return _check(message)

        return check

    @contextlib.contextmanager
    def _while_known(self, context: Context, *, is_open: bool) -> Iterator[None]:
        """A context that ends the call when its caller's credential is no longer valid.

        Raises:
            NotAuthenticated, Overloaded: it is not; see `Authenticator.principal`.
        """
        if is_open or is_local(context):
            yield
            return
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        refused: GyreError | None = None
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal refused, timer
            try:
                self._authenticator.principal(context)
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
        raise request.refusal()
    return request


async def _each(requests: AsyncIterator[Any], check: Callable[[Any], Any]) -> AsyncIterator[Any]:
    """The messages of a stream. Each is checked: a stream may outlast the token of its caller."""
    async for request in requests:
        yield check(request)
