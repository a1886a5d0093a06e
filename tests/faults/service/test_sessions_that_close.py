"""Reads that nobody waits for any more, because their session closed, are no errors of storage."""

from pathlib import Path

import numpy as np
from gyre_protos.v1 import loader_pb2 as pb
from gyre_protos.v1.loader_pb2_grpc import LoaderStub

from tests.channels import identified_channel
from tests.conftest import StartDaemon

DEADLINE_S = 120.0
NUM_SESSIONS = 30


def test_reads_of_sessions_that_close_are_counted_as_abandoned(
    gyred: StartDaemon, tmp_path: Path
) -> None:
    path = tmp_path / "numbers.bin"
    np.arange(8 << 20, dtype=np.int32).tofile(path)
    dataset = {"uri": str(path), "format": "tokens", "dtype": "int32", "sequence_length": 1024}
    daemon = gyred({"datasets": {"numbers": dataset}, "num_io_threads": 1, "num_copy_workers": 0})
    with identified_channel(daemon.address) as channel:
        stub = LoaderStub(channel)
        for number in range(NUM_SESSIONS):
            request = pb.OpenSessionRequest(
                dataset=pb.DatasetRef(name="numbers"),
                order=pb.OrderSpec(global_batch_size=256, seed=number),
                reader=pb.Reader(job=f"job-{number}", world_size=1, generation=1),
            )
            opened = stub.OpenSession(request, timeout=DEADLINE_S)
            stub.CloseSession(
                pb.CloseSessionRequest(session_id=opened.session_id), timeout=DEADLINE_S
            )
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=DEADLINE_S)
    outcomes = {each.outcome: each.num_requests for each in status.storage if each.kind == "read"}
    assert "error" not in outcomes
    assert outcomes.get("abandoned")
