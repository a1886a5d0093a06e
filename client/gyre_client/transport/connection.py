"""One channel to one daemon: calls with deadlines, whose failures are errors of the client.

The daemon explains a failure in a `google.rpc.ErrorInfo` (domain "gyre") in the call's trailing
metadata: `reason` is the class of the error, `metadata` its facts. A failure without one (a dead
socket, a proxy, a deadline) gets its class from the call's status.

`Outage` says how long a daemon may be away, and when to try again. Only the time in which the
daemon is silent counts. One waiting for slow storage uses up none of the limit, unless the storage
has failed. The time adds up until a batch arrives: a daemon that comes back
only to die again does not start from zero.
"""

import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from gyre_client.errors import (
    BY_REASON,
    CorruptSample,
    CursorRejected,
    DaemonFault,
    DaemonUnavailable,
    GyreError,
    InvalidRequest,
    LeaseExpired,
    NotAllowed,
    NotAuthenticated,
    Overloaded,
    StorageUnavailable,
    UnknownDataset,
)
from gyre_client.transport.answers import (
    check_description,
    check_located,
    check_numbers,
    check_opened,
    check_plan,
    checked_findings,
    checked_progress,
)
from gyre_client.transport.channel import (
    MAX_CONTROL_BYTES,
    TOKEN_KEY,
    Address,
    CredentialFiles,
    Identity,
    Metadata,
    Pem,
    check_files,
    check_listener,
    open_channel,
    why_refused,
)

# Deadlines of calls. The daemon may have to build an index before it can open a dataset, which
# takes minutes for very many shards; `gyre index` shows the progress. A session left
# open ends with its lease.
CALL_TIMEOUT_S = 30.0
OPEN_TIMEOUT_S = 600.0
INDEX_TIMEOUT_S = 24 * 3600.0
CLOSE_TIMEOUT_S = 2.0
HEALTH_TIMEOUT_S = 5.0
UNIDENTIFIED = "side_channel"  # the fact of a refusal because the call named no live side channel
RETRY_AFTER = "retry_after_s"  # the fact that says how long the daemon wants no further attempt

_DOMAIN = "gyre"
_DETAILS_KEY = "grpc-status-details-bin"
_BY_STATUS: dict[grpc.StatusCode, type[GyreError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownDataset,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.FAILED_PRECONDITION: CursorRejected,
    grpc.StatusCode.DATA_LOSS: CorruptSample,
    grpc.StatusCode.ABORTED: LeaseExpired,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: DaemonUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DaemonUnavailable,
    grpc.StatusCode.CANCELLED: DaemonUnavailable,
}

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


def error_from(failure: grpc.RpcError, address: Address) -> GyreError:
    """Returns the error for the daemon's reason or, if it gave none, for the call's status."""
    details = printable(failure.details() or "")
    by_status = _BY_STATUS.get(failure.code(), DaemonFault)
    info, facts = _explanation(failure)
    if UNIDENTIFIED in facts:  # the daemon was restarted, or its side channel is not there yet
        return DaemonUnavailable(details, facts)
    if info.domain == _DOMAIN:
        return BY_REASON.get(info.reason, by_status)(details, facts)
    if by_status is DaemonUnavailable:
        return DaemonUnavailable(f"no daemon answers at {address.text}: {details}")
    return by_status(f"the daemon at {address.text} answered {failure.code().name}: {details}")


def _explanation(failure: grpc.RpcError) -> tuple[ErrorInfo, dict[str, str]]:
    """Returns the failure's ErrorInfo, which is empty if it has none, and its facts."""
    details = _status(failure).details
    info, retry = _first(details, ErrorInfo), _first(details, RetryInfo)
    facts = dict(info.metadata)
    if retry.HasField("retry_delay"):
        facts[RETRY_AFTER] = str(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9)
    return info, facts


def _first(details: Iterable[Any], kind: type[_Response]) -> _Response:
    """Returns the first detail of a kind that can be read; an empty one if there is none."""
    for detail in details:
        found = kind()
        with contextlib.suppress(DecodeError):
            if detail.Unpack(found):
                return found
    return kind()


def _status(failure: grpc.RpcError) -> Status:
    metadata = cast("Iterable[tuple[str, str | bytes]]", failure.trailing_metadata() or ())
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value)
            except DecodeError:
                return Status()
    return Status()


class Connection:
    """The calls that a daemon answers. Safe to use from any thread.

    Every method raises a GyreError and never a grpc.RpcError, except for the iterators that
    `stream` and `read_payload` return. No call reaches a daemon that `trust` refuses.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._is_trusted = False
        self._files = CredentialFiles.of_environment()
        self._identity = Identity(address, self._files)
        self._pem = self._files.read_pem() if address.is_tls else Pem()
        self._open_channel()

    def _open_channel(self) -> None:
        self._channel = open_channel(self.address, self._pem)
        self._stub = LoaderStub(self._channel)
        self._read_payload = self._channel.unary_stream(
            "/gyre_protos.v1.Loader/ReadPayload",
            request_serializer=pb.ReadPayloadRequest.SerializeToString,
            response_deserializer=None,  # the frames as they are: see channel.chunk_data
        )

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the channel and all calls under way on it."""
        self._channel.close()
        self._identity.close()

    def list_datasets(self) -> pb.ListDatasetsResponse:
        """Returns the datasets that the daemon serves by name."""
        return self._call(self._stub.ListDatasets, pb.ListDatasetsRequest(), CALL_TIMEOUT_S)

    def describe(
        self,
        dataset: pb.DatasetRef,
        timeout_s: float = OPEN_TIMEOUT_S,
        *,
        with_lengths: bool = False,
        transforms: pb.TransformList | None = None,
    ) -> pb.DatasetDescription:
        """Returns the dataset's description; the daemon opens the dataset for it.

        With `transforms`, the fields are those that they make; if it is None, those of the
        dataset's definition.
        """
        request = pb.DescribeDatasetRequest(
            dataset=dataset, lengths=with_lengths, transforms=transforms
        )
        description = self._call(self._stub.DescribeDataset, request, timeout_s)
        check_description(description)
        return description

    def index(
        self,
        dataset: pb.DatasetRef,
        *,
        with_checksums: bool = False,
        transforms: pb.TransformList | None = None,
        shards: pb.ShardRange | None = None,
        measures: bool = False,
    ) -> Iterator[pb.IndexProgress]:
        """Builds the missing parts of the dataset's index and checksums; yields once per shard.

        Then it yields as columns are read that its filter compares, and as samples are measured,
        under these transforms or those of its definition. With `shards`, these alone are indexed,
        and measured if it `measures`.
        """
        request = pb.IndexDatasetRequest(
            dataset=dataset,
            checksums=with_checksums,
            transforms=transforms,
            shards=shards,
            measure=measures,
        )
        return checked_progress(self._messages(self._stub.IndexDataset, request))

    def lint(
        self, dataset: pb.DatasetRef, shards: pb.ShardRange | None = None
    ) -> Iterator[pb.LintProgress]:
        """Has every shard and every sample of a dataset checked; yields twice per shard.

        With `shards`, these alone.
        """
        request = pb.LintDatasetRequest(dataset=dataset, shards=shards)
        return checked_findings(self._messages(self._stub.LintDataset, request))

    def read_samples(self, request: pb.ReadSamplesRequest) -> Iterator[pb.SamplesChunk]:
        """Yields the dataset's description, then some samples in the order of their ids."""
        return self._messages(self._stub.ReadSamples, request)

    def _messages(
        self, method: Callable[..., Iterable[_Response]], request: Message
    ) -> Iterator[_Response]:
        """Yields the messages of a call that may take long; it ends with the iterator."""
        _check_length(request)
        self._check_trust()
        try:
            call = method(request, timeout=INDEX_TIMEOUT_S, metadata=self._identity.metadata())
            with contextlib.ExitStack() as stack:
                stack.callback(call.cancel)  # type: ignore[attr-defined]  # it is a grpc.Call, too
                yield from call
        except grpc.RpcError as failure:
            raise self._error(failure, INDEX_TIMEOUT_S) from None

    def plan_step(self, request: pb.PlanStepRequest) -> pb.PlanStepResponse:
        """Returns the sample ids of one step."""
        response = self._call(self._stub.PlanStep, request, OPEN_TIMEOUT_S)
        check_plan(response, request)
        return response

    def locate_step(self, request: pb.LocateStepRequest) -> pb.LocateStepResponse:
        """Returns the samples that a job read in one step, and where they are stored."""
        response = self._call(self._stub.LocateStep, request, OPEN_TIMEOUT_S)
        check_located(response, request)
        return response

    def plan_cost(self, request: pb.PlanCostRequest) -> pb.PlanCostResponse:
        """Returns the cost to read a dataset in each order."""
        return self._call(self._stub.PlanCost, request, OPEN_TIMEOUT_S)

    def plan_mixture(self, request: pb.PlanMixtureRequest) -> pb.PlanMixtureResponse:
        """Returns the samples from each source of a mixture up to some steps."""
        return self._call(self._stub.PlanMixture, request, OPEN_TIMEOUT_S)

    def open_session(
        self,
        request: pb.OpenSessionRequest,
        timeout_s: float = OPEN_TIMEOUT_S,
        side_token: str = "",
    ) -> pb.SessionOpened:
        """Opens a session; the daemon begins to prefetch.

        No other call is under way: where the files of a TLS connection have changed, it is made
        again.

        Args:
            request: Which batches, for which reader, from which cursor.
            timeout_s: The deadline.
            side_token: The token of a side channel, where the daemon is to pass its arenas; the
                payload comes inline without one.
        """
        if self.address.is_tls:
            self._renew()
        open_ = self._stub.OpenSession
        if side_token:
            opened = self._call_as(((TOKEN_KEY, side_token),), open_, request, timeout_s)
        else:
            opened = self._call(open_, request, timeout_s)
        check_opened(opened, request)
        return opened

    def close_session(self, session_id: str) -> None:
        """Ends a session, if the daemon still answers and knows it."""
        self._call(
            self._stub.CloseSession, pb.CloseSessionRequest(session_id=session_id), CLOSE_TIMEOUT_S
        )

    def status(self, timeout_s: float = CALL_TIMEOUT_S, *, check: bool = False) -> pb.DaemonStatus:
        """Returns the state of the daemon; with `check`, also its problems."""
        return self._call(self._stub.GetStatus, pb.GetStatusRequest(check=check), timeout_s)

    def explain(self, request: pb.ExplainStepRequest) -> pb.ExplainStepResponse:
        """Returns why batches of a step took as long as they did."""
        return self._call(self._stub.ExplainStep, request, CALL_TIMEOUT_S)

    def drain(self) -> pb.DrainResponse:
        """Lets the daemon stop as on SIGTERM, if this user is one of its operators."""
        return self._call(self._stub.Drain, pb.DrainRequest(), CALL_TIMEOUT_S)

    def stream(
        self, requests: Iterator[pb.StreamRequest], timeout_s: float | None = None
    ) -> "grpc.CallIterator[pb.StreamResponse]":
        """Starts the control stream of a session; see `error_from` for its grpc.RpcErrors."""
        return self._stub.Stream(requests, timeout=timeout_s, metadata=self._identity.metadata())

    def read_payload(
        self, session_id: str, timeout_s: float | None = None
    ) -> "grpc.CallIterator[bytes]":
        """Starts the payload stream of a session, as raw frames; see `channel.chunk_data`."""
        request = pb.ReadPayloadRequest(session_id=session_id)
        return self._read_payload(request, timeout=timeout_s, metadata=self._identity.metadata())

    def _renew(self) -> None:
        """Uses the client's certificate as it is now, if it can be read."""
        with contextlib.suppress(InvalidRequest):
            pem = self._files.read_pem()
            if pem != self._pem:
                self._pem = pem
                self._channel.close()
                self._open_channel()

    def _call(
        self,
        method: Callable[..., _Response],
        request: Message,
        timeout_s: float,
    ) -> _Response:
        deadline_s = time.monotonic() + timeout_s
        try:
            return self._call_as(self._identity.metadata(timeout_s), method, request, timeout_s)
        except GyreError as failure:
            if UNIDENTIFIED not in failure.facts:
                raise
        # The daemon was started or restarted between the connection and the call.
        self._identity.close()
        timeout_s = max(0.0, deadline_s - time.monotonic())
        return self._call_as(self._identity.metadata(timeout_s), method, request, timeout_s)

    def _call_as(
        self,
        metadata: Metadata,
        method: Callable[..., _Response],
        request: Message,
        timeout_s: float,
    ) -> _Response:
        _check_length(request)
        self._check_trust()
        try:
            response = method(request, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as failure:
            raise self._error(failure, timeout_s) from None
        check_numbers(response)
        return response

    def _check_trust(self) -> None:
        """Looks at the socket before each call, as gRPC may connect again, and once behind it."""
        check_files(self.address)
        if not self._is_trusted:
            check_listener(self.address)
            self._is_trusted = True

    def _error(self, failure: grpc.RpcError, timeout_s: float) -> GyreError:
        """Returns the error of a call; asks the daemon again if the failure leaves it open."""
        error = error_from(failure, self.address)
        if failure.code() is grpc.StatusCode.UNAVAILABLE and type(error) is DaemonUnavailable:
            return why_refused(self.address, self._files) or error
        if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._is_up():
            return StorageUnavailable(
                f"the daemon at {self.address.text} is up, and did not finish the call within "
                f"{timeout_s:.0f} s: it waits for its storage, or has much to index; `gyre index` "
                "shows the progress, and `gyre status` requests to the storage and mounts that hang"
            )
        return error

    def _is_up(self) -> bool:
        """Whether the daemon answers a call that needs nothing but the daemon."""
        check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=None,
            response_deserializer=None,
        )
        try:
            check(b"", timeout=HEALTH_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return True


def _check_length(request: Message) -> None:
    """Refuses a request that the daemon would not take, without a retry."""
    num_bytes = request.ByteSize()
    if num_bytes > MAX_CONTROL_BYTES:
        raise InvalidRequest(
            f"the request has {num_bytes} bytes, and a message to or from a daemon may have "
            f"{MAX_CONTROL_BYTES}: shorten the dataset's path or brace list, its options, the "
            "job's name or the state that is loaded",
            {"num_bytes": str(num_bytes), "max_bytes": str(MAX_CONTROL_BYTES)},
        )


# Each pause is drawn from [0, ceiling]; the ceiling starts at FIRST_PAUSE_S and doubles up to
# MAX_PAUSE_S. A shorter first pause makes all ranks call a daemon just starting; a longer
# last one adds its length to every recovery. Every attempt gets at least MIN_TIMEOUT_S, however
# little is left of the limit.
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
MIN_TIMEOUT_S = 1.0

_RETRYABLE = (DaemonUnavailable, LeaseExpired, StorageUnavailable, Overloaded)
_Result = TypeVar("_Result")
_log = logging.getLogger("gyre_client")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False  # nothing ends it before


class Outage:
    """Decides after each failure between another attempt and giving up."""

    def __init__(
        self,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._uniform = uniform
        self._spent_s = 0.0
        self._since: float | None = None
        self._num_failures = 0
        self._storage_failed = False

    def retry(
        self, attempt: Callable[[float], _Result], wait: Callable[[float], bool] = _sleep
    ) -> _Result:
        """Returns the result of the first `attempt` that succeeds.

        `attempt` is called with the seconds it may take; for `wait`, see `pause`.

        Raises:
            GyreError: See `next_pause_s`.
        """
        while True:
            timeout_s = OPEN_TIMEOUT_S
            if self._num_failures:
                timeout_s = max(self._limit_s - self._waited_s(), MIN_TIMEOUT_S)
            try:
                return attempt(timeout_s)
            except GyreError as failure:
                self.pause(failure, wait)

    def pause(self, failure: GyreError, wait: Callable[[float], bool]) -> None:
        """Waits until it is time for the next attempt; logs one warning per outage.

        `wait` waits for a number of seconds, and returns true if the caller is closing.

        Raises:
            GyreError: There shall be no further attempt.
        """
        if wait(0.0):
            raise failure
        pause_s = self.next_pause_s(failure)
        if self._num_failures == 1:
            _log.warning("%s; trying again for up to %.0f s", failure, self._limit_s)
        if wait(pause_s):
            raise failure

    def heard(self) -> None:
        """Stops the clock because the daemon said something, unless its storage has failed."""
        if not self._storage_failed:
            self._spent_s = self._waited_s()
            self._since = None

    def batch_received(self) -> None:
        """Ends the outage, if there was one."""
        self._spent_s = 0.0
        self._since = None
        self._num_failures = 0
        self._storage_failed = False

    def next_pause_s(self, failure: GyreError) -> float:
        """Returns how long to wait before the next attempt: exponential back-off with full jitter.

        It is at least as long as the daemon asked for in the fact `retry_after_s`.

        Raises:
            GyreError: `failure` itself if another attempt cannot succeed; at the limit, an error of
                the same class whose message says how long was waited.
        """
        if not _is_retryable(failure):
            raise failure
        self._since = self._clock() if self._since is None else self._since
        self._num_failures += 1
        self._storage_failed = isinstance(failure, StorageUnavailable)
        waited_s = self._waited_s()  # read once: a pause is never negative
        if waited_s >= self._limit_s:
            raise type(failure)(
                f"{failure} (gave up after {waited_s:.1f} s and {self._num_failures} attempts)",
                failure.facts,
            ) from None
        ceiling_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 16))
        pause_s = max(self._uniform(0.0, ceiling_s), _number(failure, RETRY_AFTER, 0.0))
        return min(pause_s, self._limit_s - waited_s)

    def _waited_s(self) -> float:
        return self._spent_s + (0.0 if self._since is None else self._clock() - self._since)


def _is_retryable(failure: GyreError) -> bool:
    """A session that needs more memory than the daemon's whole budget never fits."""
    needed_bytes = _number(failure, "needed_bytes", 0.0)
    limit_bytes = _number(failure, "limit_bytes", math.inf)
    return isinstance(failure, _RETRYABLE) and needed_bytes <= limit_bytes


def _number(failure: GyreError, fact: str, default: float) -> float:
    """Returns a fact as a number; the default where the daemon sent none."""
    try:
        number = float(failure.facts.get(fact, default))
    except ValueError:
        return default
    return default if math.isnan(number) else number
