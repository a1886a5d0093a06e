"""From errors to gRPC statuses, with the details that let a client tell errors apart."""

import contextlib
import inspect
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from gyre_daemon import errors
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.events import debug_event, log_event

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

Context = grpc.aio.ServicerContext[Any, Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def answers_errors(method: Method) -> Method:
    """Make a servicer method answer a GyreError with its status.

    Any other exception is logged and answered with INTERNAL. The servicer has `metrics`.
    """
    if inspect.isasyncgenfunction(method):

        async def stream(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with contextlib.aclosing(method(self, request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await abort(context, error, self.metrics)

        return stream  # type: ignore[return-value]

    async def unary(self: Any, request: Any, context: Context) -> Any:
        try:
            return await method(self, request, context)
        except Exception as error:
            await abort(context, error, self.metrics)

    return unary  # type: ignore[return-value]


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
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
