"""A cursor that is not what a daemon gave, for this dataset and order, is refused."""

from dataclasses import replace

import grpc
import pytest
from gyre_daemon.errors import CursorRejected
from gyre_daemon.order.cursor import decode_cursor
from gyre_protos.v1 import loader_pb2 as pb

from tests.bad_inputs.node import CALL_DEADLINE_S, Node, check_refusal
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import cursors
from tests.bad_inputs.table.cursors import Good


@pytest.fixture(scope="module")
def good(node: Node) -> Good:
    return Good(*(cursor_after_a_step(node, dataset) for dataset in ("tokens", "tars")))


def opening(dataset: str = "tokens", cursor: bytes = b"") -> pb.OpenSessionRequest:
    return pb.OpenSessionRequest(
        dataset=pb.DatasetRef(name=dataset),
        order=pb.OrderSpec(seed=1, global_batch_size=8),
        reader=pb.Reader(job="cursors", world_size=1),
        cursor=cursor,
    )


def cursor_after_a_step(node: Node, dataset: str) -> bytes:
    request = opening(dataset)
    request.step = 1
    session = node.stub.OpenSession(request, timeout=CALL_DEADLINE_S)
    node.stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id))
    return bytes(session.cursor)


@pytest.mark.parametrize("row", cases(cursors.ROWS))
def test_a_bad_cursor_is_refused(row: Row, node: Node, good: Good) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        node.stub.OpenSession(opening(cursor=row.sent(good)), timeout=CALL_DEADLINE_S)
    check_refusal(caught.value, row)


@pytest.mark.parametrize("row", cases(cursors.LOCATED))
def test_a_cursor_whose_order_cannot_be_is_refused(row: Row, node: Node, good: Good) -> None:
    cursor = row.sent(Good(cursor_at_the_beginning(good.cursor), good.other))
    request = pb.LocateStepRequest(dataset=pb.DatasetRef(name="tokens"), cursor=cursor)
    with pytest.raises(grpc.RpcError) as caught:
        node.stub.LocateStep(request, timeout=CALL_DEADLINE_S)
    check_refusal(caught.value, row)


def cursor_at_the_beginning(cursor: bytes) -> bytes:
    """The same job's, where every batch size begins."""
    return replace(decode_cursor(cursor), position=0).encode()


def test_every_bit_that_flips_and_every_cut_is_noticed(good: Good) -> None:
    cursor = good.cursor
    bad = [cursor[:length] for length in range(len(cursor))]
    for place in range(len(cursor) * 8):
        data = bytearray(cursor)
        data[place // 8] ^= 1 << place % 8
        bad.append(bytes(data))
    for each in bad:
        with pytest.raises(CursorRejected):
            decode_cursor(each)
    assert decode_cursor(cursor).position == 8


def test_the_good_cursor_is_accepted(node: Node, good: Good) -> None:
    session = node.stub.OpenSession(opening(cursor=good.cursor), timeout=CALL_DEADLINE_S)
    assert session.first_step == 1
    node.stub.CloseSession(pb.CloseSessionRequest(session_id=session.session_id))
