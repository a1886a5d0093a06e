"""How storages and what batches took look to clients."""

from dataclasses import asdict

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.fetching.account import BatchAccount
from gyre_daemon.monitoring.metrics import RequestCount, RequestLabels
from gyre_daemon.storage.delays import RequestDelays
from gyre_daemon.storage.engine.endpoint import Endpoint


def from_count(labels: RequestLabels, count: RequestCount) -> pb.StorageCount:
    """Requests of one kind and outcome."""
    return pb.StorageCount(**labels._asdict(), **asdict(count))


def from_endpoint(endpoint: Endpoint, now: float) -> pb.EndpointState:
    """How an object storage is treated now; `now` on the loop's clock."""
    return pb.EndpointState(
        name=endpoint.name,
        limit=endpoint.limit.limit,
        num_in_flight=endpoint.queue.num_taken,
        num_waiting=endpoint.queue.num_waiting,
        num_retries_left=endpoint.budget.num_left(now),
    )


def from_account(account: BatchAccount, now: float) -> pb.BatchAccount:
    """What a batch took; `now` on the clock that the account was taken with."""
    delays = account.delays
    return pb.BatchAccount(
        job=account.job,
        rank=account.rank,
        world_size=account.world_size,
        first_step=account.first_step,
        stop_step=account.stop_step,
        ago_s=now - account.begun_at - account.total_s,
        total_s=account.total_s,
        read_s=delays.read_s,
        storage_s=delays.storage_s,
        finish_s=delays.finish_s,
        awaited=account.is_awaited,
        error=account.error,
        num_requests=delays.num_requests,
        num_joined=delays.num_joined,
        num_refused=delays.num_refused,
        num_retries=delays.num_retries,
        num_hedges=delays.num_hedges,
        num_bytes=delays.num_bytes,
        slowest=_from_request(delays.slowest) if delays.slowest else None,
    )


def _from_request(request: RequestDelays) -> pb.RequestAccount:
    return pb.RequestAccount(**asdict(request))
