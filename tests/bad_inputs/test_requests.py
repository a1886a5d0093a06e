"""Every bad request is refused with its code, its reason and a sentence."""

from typing import Any

import grpc
import pytest
from gyre_protos.v1 import loader_pb2 as pb

from tests.bad_inputs.node import CALL_DEADLINE_S, Node, check_refusal
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import requests


@pytest.mark.parametrize("row", cases(requests.ROWS))
def test_a_bad_request_is_refused(row: Row, node: Node) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        send(node, *row.sent)
    check_refusal(caught.value, row)


def send(node: Node, method: str, sent: Any) -> None:
    """Sends a request, or the messages of a stream, and reads all answers."""
    if method == "Attached":
        good = requests.opening(reader=pb.Reader(job="attached"))
        session = node.stub.OpenSession(good, timeout=CALL_DEADLINE_S)
        attach = pb.StreamRequest(attach=pb.Attach(session_id=session.session_id))
        method, sent = "Stream", [attach, sent]
    call = getattr(node.stub, method)
    answers = call(iter(sent) if method == "Stream" else sent, timeout=CALL_DEADLINE_S)
    if not isinstance(answers, grpc.Call):
        return
    for _ in answers:  # type: ignore[attr-defined]
        pass
