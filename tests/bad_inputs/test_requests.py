"""Every bad request is refused with its code, its reason and a sentence."""

import queue
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


@pytest.mark.parametrize("row", cases(requests.HARMLESS_ROWS))
def test_a_message_that_means_nothing_changes_nothing(row: Row, node: Node) -> None:
    field = type(row.sent).__name__.lower()
    odd = pb.StreamRequest(**{field: row.sent})
    credit = pb.StreamRequest(credit=pb.Credit(num_batches=2))
    messages: queue.SimpleQueue[pb.StreamRequest | None] = queue.SimpleQueue()
    for message in (attach(node, "harmless"), odd, credit):
        messages.put(message)
    num_batches = 0
    try:
        for answer in node.stub.Stream(iter(messages.get, None), timeout=CALL_DEADLINE_S):
            num_batches += sum(len(group.cursors.own) for group in answer.batches.groups)
            if num_batches >= 2:
                break
    finally:
        messages.put(None)
    assert len(node.read()) == 16


def attach(node: Node, job: str) -> pb.StreamRequest:
    """Opens a good session, and returns the message that attaches to it."""
    good = requests.opening(reader=pb.Reader(job=job))
    session = node.stub.OpenSession(good, timeout=CALL_DEADLINE_S)
    return pb.StreamRequest(attach=pb.Attach(session_id=session.session_id))


def send(node: Node, method: str, sent: Any) -> None:
    """Sends a request, or the messages of a stream, and reads all answers."""
    if method == "Attached":
        method, sent = "Stream", [attach(node, "attached"), sent]
    call = getattr(node.stub, method)
    answers = call(iter(sent) if method == "Stream" else sent, timeout=CALL_DEADLINE_S)
    if not isinstance(answers, grpc.Call):
        return
    for _ in answers:  # type: ignore[attr-defined]
        pass
