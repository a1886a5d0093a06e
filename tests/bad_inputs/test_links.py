"""What leads out of a dataset's folder or is no file is refused, and nobody waits for it."""

from collections.abc import Iterator

import grpc
import pytest

from tests.bad_inputs.node import TOKENS, Node, check_refusal, running
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import links
from tests.bad_inputs.test_shards import read_epoch
from tests.preloaded.interpreter import Interpreter


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Node]:
    """A daemon with a dataset for each row, with a good shard beside the bad one."""
    folder = tmp_path_factory.mktemp("links")
    (folder / "secret.bin").write_bytes(bytes(4096))
    datasets = {}
    for row in links.ROWS:
        own = folder / "bad" / name_of(row)
        own.mkdir(parents=True)
        (own / "a.bin").write_bytes(bytes(4096))
        row.sent(own / "x.bin")
        named = "*.bin" if (own / "x.bin").is_symlink() else "x.bin"
        datasets[name_of(row)] = {"uri": str(own / named), **TOKENS}
    with running(folder / "node", interpreter, {"datasets": datasets}) as node:
        yield node


@pytest.mark.parametrize("row", cases(links.ROWS))
def test_a_bad_file_is_refused(row: Row, node: Node) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        read_epoch(node, name_of(row))
    check_refusal(caught.value, row)


def name_of(row: Row) -> str:
    return f"set-{links.ROWS.index(row)}"
