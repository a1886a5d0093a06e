"""What one user sends about what is another's. `sent` is a method and its request.

`{session}` in a request is the id of the other user's session, and `alice` her dataset.
"""

from typing import Any

from gyre_protos.v1 import loader_pb2 as pb

from tests.bad_inputs.row import Row

UNKNOWN = ("NOT_FOUND", "UnknownDataset")
GONE = ("ABORTED", "LeaseExpired")
DENIED = ("PERMISSION_DENIED", "NotAllowed")
INVALID = ("INVALID_ARGUMENT", "InvalidRequest")
ORDER = pb.OrderSpec(global_batch_size=8)
HERS = pb.DatasetRef(name="alice")
OPEN = pb.DatasetRef(name="tokens")
SESSION = "{session}"


def opening(dataset: pb.DatasetRef, job: str = "hers", **more: Any) -> pb.OpenSessionRequest:
    reader = pb.Reader(job=job, world_size=1, **more)
    return pb.OpenSessionRequest(dataset=dataset, order=ORDER, reader=reader)


ROWS = [
    *(
        Row(f"another user's dataset, {method}", (method, sent), *UNKNOWN, "no dataset is named")
        for method, sent in {
            "DescribeDataset": pb.DescribeDatasetRequest(dataset=HERS),
            "IndexDataset": pb.IndexDatasetRequest(dataset=HERS, checksums=True),
            "PlanStep": pb.PlanStepRequest(dataset=HERS, order=ORDER, world_size=1),
            "PlanCost": pb.PlanCostRequest(dataset=HERS, order=ORDER),
            "ExplainStep": pb.ExplainStepRequest(dataset=HERS, job="hers"),
            "OpenSession": opening(HERS),
        }.items()
    ),
    Row(
        "another user's dataset with the job that it admits",
        ("OpenSession", opening(HERS, "train-1")),
        *UNKNOWN,
        "no dataset is named",
    ),
    Row(
        "another user's session, attached",
        ("Stream", pb.StreamRequest(attach=pb.Attach(session_id=SESSION))),
        *GONE,
        "session",
    ),
    Row(
        "another user's session, its payload",
        ("ReadPayload", pb.ReadPayloadRequest(session_id=SESSION)),
        *GONE,
        "session",
    ),
    Row(
        "another user's job, explained",
        ("ExplainStep", pb.ExplainStepRequest(dataset=OPEN, job="hers")),
        *INVALID,
        "that your jobs read",
    ),
    Row(
        "another user's job, fenced for ever",
        ("OpenSession", opening(OPEN, generation=2**64 - 1)),
        *INVALID,
        "generation",
    ),
    Row("another user's daemon, drained", ("Drain", pb.DrainRequest()), *DENIED, "no operator"),
]
# These are answered, and change nothing of the other user's.
HARMLESS_ROWS = [
    Row(
        "another user's session, closed",
        ("CloseSession", pb.CloseSessionRequest(session_id=SESSION)),
        "",
        "",
        "",
    ),
    Row("another user's sessions, listed", ("GetStatus", pb.GetStatusRequest()), "", "", ""),
    Row("another user's datasets, listed", ("ListDatasets", pb.ListDatasetsRequest()), "", "", ""),
    Row("another user's job, joined", ("OpenSession", opening(OPEN, generation=9)), "", "", ""),
]
