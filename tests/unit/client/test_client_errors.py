import pickle
from collections.abc import Sequence

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from gyre_client import errors
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import RETRY_AFTER, UNIDENTIFIED, error_from

ADDRESS = parse_address("unix:/run/gyre.sock")
EVERY_CLASS = sorted(errors.BY_REASON.values(), key=lambda error_class: error_class.__name__)


class Failure(grpc.RpcError):
    """A failed call, as gRPC hands it over."""

    def __init__(
        self, code: grpc.StatusCode, details: str, trailing: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        super().__init__()
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Sequence[tuple[str, str | bytes]]:  # type: ignore[override]
        return self._trailing


def explained(code: grpc.StatusCode, details: str, *parts: Message) -> Failure:
    status = Status(code=code.value[0], message=details)
    for part in parts:
        packed = Any()
        packed.Pack(part)
        status.details.append(packed)
    return Failure(
        code, details, [("x-other", "1"), ("grpc-status-details-bin", status.SerializeToString())]
    )


@pytest.mark.parametrize("error_class", EVERY_CLASS)
def test_the_reason_decides_the_class(error_class: type[errors.GyreError]) -> None:
    info = ErrorInfo(domain="gyre", reason=error_class.__name__, metadata={"dataset": "wiki"})
    error = error_from(explained(grpc.StatusCode.UNKNOWN, "in one sentence", info), ADDRESS)
    assert type(error) is error_class
    assert str(error) == "in one sentence"
    assert error.facts == {"dataset": "wiki"}


@pytest.mark.parametrize("error_class", EVERY_CLASS)
def test_every_error_survives_a_worker_process(error_class: type[errors.GyreError]) -> None:
    error = pickle.loads(pickle.dumps(error_class("message")))
    assert (type(error), str(error)) == (error_class, "message")


def test_bad_input_is_a_value_error() -> None:
    value_errors = {
        error_class for error_class in EVERY_CLASS if issubclass(error_class, ValueError)
    }
    assert value_errors == {errors.InvalidRequest, errors.ConfigError}


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_without_a_reason_the_status_decides(code: grpc.StatusCode) -> None:
    expected = {
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
        grpc.StatusCode.NOT_FOUND: errors.UnknownDataset,
        grpc.StatusCode.PERMISSION_DENIED: errors.NotAllowed,
        grpc.StatusCode.UNAUTHENTICATED: errors.NotAuthenticated,
        grpc.StatusCode.FAILED_PRECONDITION: errors.CursorRejected,
        grpc.StatusCode.DATA_LOSS: errors.CorruptSample,
        grpc.StatusCode.ABORTED: errors.LeaseExpired,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
        grpc.StatusCode.UNAVAILABLE: errors.DaemonUnavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.DaemonUnavailable,
        grpc.StatusCode.CANCELLED: errors.DaemonUnavailable,
    }
    error = error_from(Failure(code, "details"), ADDRESS)
    assert type(error) is expected.get(code, errors.DaemonFault)
    assert "details" in str(error)
    assert "unix:/run/gyre.sock" in str(error)


def test_an_unknown_reason_keeps_the_daemons_message() -> None:
    info = ErrorInfo(domain="gyre", reason="SomethingNew")
    error = error_from(explained(grpc.StatusCode.UNAVAILABLE, "come back later", info), ADDRESS)
    assert (type(error), str(error)) == (errors.DaemonUnavailable, "come back later")


def test_an_explanation_of_another_domain_is_ignored() -> None:
    info = ErrorInfo(domain="proxy", reason="Fenced")
    assert (
        type(error_from(explained(grpc.StatusCode.NOT_FOUND, "gone", info), ADDRESS))
        is errors.UnknownDataset
    )
    garbage = Failure(grpc.StatusCode.ABORTED, "late", [("grpc-status-details-bin", b"\xff\xff")])
    assert type(error_from(garbage, ADDRESS)) is errors.LeaseExpired


def test_the_pause_that_the_daemon_asks_for_is_a_fact() -> None:
    info, retry = (
        ErrorInfo(domain="gyre", reason="Overloaded"),
        RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    )
    error = error_from(explained(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", info, retry), ADDRESS)
    assert error.facts == {RETRY_AFTER: "1.5"}


@pytest.mark.parametrize("reason", ["NotAllowed", "LeaseExpired"])
def test_a_daemon_that_cannot_tell_who_calls_is_asked_again(reason: str) -> None:
    """It was restarted, or its side channel is not there yet."""
    info = ErrorInfo(domain="gyre", reason=reason, metadata={UNIDENTIFIED: "ended"})
    error = error_from(explained(grpc.StatusCode.ABORTED, "connect again", info), ADDRESS)
    assert type(error) is errors.DaemonUnavailable
