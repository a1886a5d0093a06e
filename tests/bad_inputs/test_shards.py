"""A dataset whose files are damaged, foreign or lie is refused by name, and no other suffers."""

import queue
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from gyre_protos.v1 import loader_pb2 as pb

from tests.bad_inputs.node import CALL_DEADLINE_S, Node, check_refusal, running
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import shards
from tests.preloaded.interpreter import Interpreter


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Node]:
    """A daemon with a dataset for each row."""
    folder = tmp_path_factory.mktemp("shards")
    datasets = {shards.dataset(row): written(row, folder / "bad") for row in shards.ROWS}
    with running(folder / "node", interpreter, {"datasets": datasets}) as node:
        yield node


def written(row: Row, folder: Path) -> dict[str, object]:
    """Writes the files of a row, and returns its dataset's table."""
    options, files = row.sent
    own = folder / shards.dataset(row)
    own.mkdir(parents=True)
    for name, data in files.items():
        (own / name).write_bytes(data)
    (name,) = files
    return {"uri": str(own / name), **options}


@pytest.mark.parametrize("row", cases(shards.ROWS))
def test_a_bad_shard_is_refused(row: Row, node: Node) -> None:
    for _ in range(2):  # what the first try left must not change the second
        with pytest.raises(grpc.RpcError) as caught:
            read_epoch(node, shards.dataset(row))
        check_refusal(caught.value, row)


def read_epoch(node: Node, dataset: str) -> None:
    """Reads all samples through gRPC, one in a batch."""
    opened = node.stub.OpenSession(
        pb.OpenSessionRequest(
            dataset=pb.DatasetRef(name=dataset),
            order=pb.OrderSpec(mode=pb.ORDER_MODE_SEQUENTIAL, global_batch_size=1),
            reader=pb.Reader(job=dataset[:100], world_size=1),
            num_epochs=1,
        ),
        timeout=CALL_DEADLINE_S,
    )
    messages: queue.SimpleQueue[pb.StreamRequest | None] = queue.SimpleQueue()
    messages.put(pb.StreamRequest(attach=pb.Attach(session_id=opened.session_id)))
    messages.put(pb.StreamRequest(credit=pb.Credit(num_batches=opened.num_samples)))
    try:
        for answer in node.stub.Stream(iter(messages.get, None), timeout=CALL_DEADLINE_S):
            if answer.HasField("end_of_stream"):
                return
    finally:
        messages.put(None)
