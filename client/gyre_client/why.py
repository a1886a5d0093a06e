"""`gyre why`: where the time of a batch went, from the daemon's record of the last ones."""

import argparse

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.arguments import MAX_UINT64, whole
from gyre_client.connection import Connection
from gyre_client.report import duration, facts, size


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Which batch."""
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--job", default="", help="of this job only")


def why(connection: Connection, dataset: pb.DatasetRef, args: argparse.Namespace) -> pb.ExplainStepResponse:
    """What the batches of a step took, the newest first."""
    step = whole("step", args.step, 0, MAX_UINT64)
    return connection.explain(pb.ExplainStepRequest(dataset=dataset, step=step, job=args.job))


def text(response: pb.ExplainStepResponse, num_columns: int | None = None) -> str:
    """For people, in lines no longer than `num_columns`."""
    return "\n\n".join(_account(account, num_columns) for account in response.accounts)


def _account(account: pb.BatchAccount, num_columns: int | None) -> str:
    steps = f"step {account.first_step}"
    if account.stop_step - account.first_step > 1:
        steps = f"steps {account.first_step} to {account.stop_step - 1}, which were read together,"
    awaited = "; the trainer waited for it" if account.awaited else "; no trainer waited for it"
    head = f"{steps} of job {account.job}, rank {account.rank} of {account.world_size}, {duration(account.ago_s)} ago"
    pairs: list[tuple[str, object]] = [
        ("took", f"{_ms(account.total_s)}{awaited}"),
        ("bound by", "storage" if account.storage_s > account.total_s / 2 else "processor"),
        ("reading", f"{_ms(account.read_s)}, {_ms(account.storage_s)} of it waiting for storage"),
        ("decoding", _ms(account.finish_s)),
    ]
    if account.num_requests:
        pairs.append(("requests", _requests(account)))
    if account.HasField("slowest"):
        pairs += _slowest(account.slowest)
    if account.error:
        pairs.append(("failed", account.error))
    return f"{head}\n{facts(pairs, num_columns)}"


def _requests(account: pb.BatchAccount) -> str:
    counts = [
        f"{account.num_requests:,} of {size(account.num_bytes)} in all",
        *(
            f"{count:,} {what}"
            for count, what in (
                (account.num_joined, "asked for already"),
                (account.num_refused, "times refused"),
                (account.num_retries, "sent again"),
                (account.num_hedges, "sent twice for being late"),
            )
            if count
        ),
    ]
    return ", ".join(counts)


def _slowest(request: pb.RequestAccount) -> list[tuple[str, object]]:
    total_s = request.queue_s + request.tried_s + request.first_byte_s + request.body_s
    parts = [
        f"{_ms(request.queue_s)} in the queue",
        f"{_ms(request.tried_s)} in failed tries and pauses",
        f"{_ms(request.first_byte_s)} until the first byte",
        f"{_ms(request.body_s)} for the body",
    ]
    where = f"{request.shard}, bytes {request.start:,} to {request.stop:,}; requests sent: {request.num_tries}"
    return [("slowest", f"{_ms(total_s)}: {', '.join(parts)}"), ("", where)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
