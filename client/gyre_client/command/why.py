"""`gyre why`: how the time of a batch was spent, from the daemon's record of the last batches."""

import argparse

from gyre_protos.text import printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.command.arguments import dataset_of
from gyre_client.display.formatting import CommandOutput, duration, facts, page_width, plain, size
from gyre_client.display.mounts import mount_line
from gyre_client.messages.arguments import MAX_UINT64, whole
from gyre_client.transport.connection import Connection


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select batches."""
    parser.add_argument("--step", type=int, required=True, help="a global step: `loader.last_step`")
    parser.add_argument("--job", default="", help="of this job only")


def why(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the timings of a step's batches, the newest first."""
    step = whole("step", args.step, 0, MAX_UINT64)
    response = connection.explain(
        pb.ExplainStepRequest(dataset=dataset_of(args), step=step, job=args.job)
    )
    values = [plain(timing) for timing in response.timings]
    values += [plain(mount) for mount in response.mounts]
    return CommandOutput(values, why_text(response, page_width()))


def why_text(response: pb.ExplainStepResponse, num_columns: int | None = None) -> str:
    """Returns the text for people, in lines no longer than `num_columns`."""
    parts = [_timing(timing, num_columns) for timing in response.timings]
    if response.mounts:
        parts.append(facts([("hangs", mount_line(each)) for each in response.mounts], num_columns))
    return "\n\n".join(parts)


def _timing(timing: pb.BatchTiming, num_columns: int | None) -> str:
    steps = f"step {timing.first_step}"
    if timing.stop_step - timing.first_step > 1:
        steps = f"steps {timing.first_step} to {timing.stop_step - 1}, which were read together,"
    awaited = "; the trainer waited for it" if timing.awaited else "; no trainer waited for it"
    head = (
        f"{steps} of {_job(timing)}, rank {timing.rank} of {timing.world_size}, "
        f"{duration(timing.ago_s)} ago"
    )
    pairs: list[tuple[str, object]] = [
        ("took", f"{_ms(timing.total_s)}{awaited}"),
        ("bound by", "storage" if timing.storage_s > timing.total_s / 2 else "processor"),
        ("reading", f"{_ms(timing.read_s)}, {_ms(timing.storage_s)} of it waiting for storage"),
        ("decoding", _ms(timing.finish_s)),
    ]
    if timing.num_requests:
        pairs.append(("requests", _requests(timing)))
    if timing.HasField("slowest"):
        pairs += _slowest(timing.slowest)
    if timing.error:
        pairs.append(("failed", timing.error))
    return f"{head}\n{facts(pairs, num_columns)}"


def _job(timing: pb.BatchTiming) -> str:
    """Returns the job; another user's has no name here."""
    return f"job {printable(timing.job)}" if timing.job else "a job of another user that shared it"


def _requests(timing: pb.BatchTiming) -> str:
    counts = [
        (timing.num_joined, "asked for already"),
        (timing.num_refused, "times refused"),
        (timing.num_retries, "sent again"),
        (timing.num_hedges, "sent twice for being late"),
    ]
    parts = [f"{timing.num_requests:,} of {size(timing.num_bytes)} in all"]
    return ", ".join(parts + [f"{count:,} {what}" for count, what in counts if count])


def _slowest(request: pb.RequestTiming) -> list[tuple[str, object]]:
    total_s = request.queue_s + request.tried_s + request.first_byte_s + request.body_s
    parts = [
        f"{_ms(request.queue_s)} in the queue",
        f"{_ms(request.tried_s)} in failed tries and pauses",
        f"{_ms(request.first_byte_s)} until the first byte",
        f"{_ms(request.body_s)} for the body",
    ]
    where = (
        f"{request.shard}, bytes {request.start:,} to {request.stop:,}; "
        f"requests sent: {request.num_tries}"
    )
    return [("slowest", f"{_ms(total_s)}: {', '.join(parts)}"), ("", where)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"
