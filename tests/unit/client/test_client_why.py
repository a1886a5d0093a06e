"""`gyre why` in words."""

from gyre_client.command.why import why_text
from gyre_protos.v1 import loader_pb2 as pb

SLOWEST = pb.RequestTiming(
    shard="3.tar",
    start=1024,
    stop=3072,
    queue_s=0.001,
    tried_s=0.1,
    first_byte_s=0.25,
    body_s=0.0005,
    num_tries=3,
)


def test_a_batch_that_was_awaited() -> None:
    timing = pb.BatchTiming(
        job="a", rank=1, world_size=4, first_step=7, stop_step=8, ago_s=3.0,
        total_s=0.36, read_s=0.352, finish_s=0.008,
        storage_s=0.351, awaited=True, num_requests=256,
        num_joined=2, num_refused=5, num_retries=6, num_hedges=7, num_bytes=1 << 19,
        slowest=SLOWEST,
    )  # fmt: skip
    lines = why_text(pb.ExplainStepResponse(timings=[timing])).splitlines()
    assert lines[0].startswith("step 7 of job a, rank 1 of 4, ")
    told = {
        line.split("  ")[0].strip(): line.split("  ", 1)[1].strip()
        for line in lines[1:]
        if line.strip()
    }
    assert told["took"] == "360.0 ms; the trainer waited for it"
    assert told["reading"] == "352.0 ms, 351.0 ms of it waiting for storage"
    assert told["bound by"] == "storage"
    assert told["decoding"] == "8.0 ms"
    assert told["requests"].startswith("256 of ")
    assert (
        "2 asked for already, 5 times refused, 6 sent again, 7 sent twice for being late"
        in told["requests"]
    )
    assert told["slowest"] == (
        "351.5 ms: 1.0 ms in the queue, 100.0 ms in failed tries and pauses, "
        "250.0 ms until the first byte, 0.5 ms for the body"
    )
    assert "3.tar, bytes 1,024 to 3,072; requests sent: 3" in lines[-1]


def test_local_batches_that_were_read_together_and_failed() -> None:
    timing = pb.BatchTiming(
        job="a", world_size=1, first_step=8, stop_step=12, total_s=0.001, error="no such shard"
    )
    said = why_text(pb.ExplainStepResponse(timings=[timing]), 60)
    assert max(map(len, said.splitlines()[1:])) <= 60
    assert "bound by  processor" in said
    assert "steps 8 to 11, which were read together, of job a" in said
    assert "no trainer waited for it" in said
    assert "no such shard" in said
    assert "requests" not in said


def test_the_job_of_another_user_has_no_name() -> None:
    timing = pb.BatchTiming(rank=1, world_size=4, first_step=7, stop_step=8)
    text = why_text(pb.ExplainStepResponse(timings=[timing]))
    assert text.startswith("step 7 of a job of another user that shared it, rank 1 of 4, ")
