"""A forged or damaged sidecar is made again: what is served is right, and it is said once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import webdataset

from tests.bad_inputs.node import Node, running
from tests.bad_inputs.row import Row, cases
from tests.bad_inputs.table import sidecars
from tests.preloaded.interpreter import Interpreter


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, interpreter: Interpreter) -> Iterator[Node]:
    """A daemon with a dataset for each row, beside whose shard a forged sidecar lies."""
    folder = tmp_path_factory.mktemp("sidecars")
    good = good_sidecar(folder / "first", interpreter)
    datasets = {}
    for row in sidecars.ROWS:
        own = folder / name_of(row)
        own.mkdir()
        write_shard(own / "x.tar")
        for name, data in good.items():
            (own / name).write_bytes(row.sent(data))
        datasets[name_of(row)] = {"uri": str(own / "x.tar"), "format": "webdataset"}
    more = {"datasets": datasets, "index_dir": ""}
    with running(folder / "node", interpreter, more) as node:
        yield node


def write_shard(path: Path) -> None:
    with webdataset.TarWriter(str(path), mtime=0) as writer:
        for sample in range(16):
            writer.write({"__key__": f"{sample:04}", "bin": bytes([sample]) * (sample + 1)})


def good_sidecar(folder: Path, interpreter: Interpreter) -> dict[str, bytes]:
    """Returns the sidecars that a daemon makes of the shard, by name."""
    own = folder / "set"
    own.mkdir(parents=True)
    write_shard(own / "x.tar")
    datasets = {"set": {"uri": str(own / "x.tar"), "format": "webdataset"}}
    more = {"datasets": datasets, "index_dir": ""}
    with running(folder / "node", interpreter, more) as node:
        assert sorted(node.read("set")) == list(range(16))
    found = {path.name: path.read_bytes() for path in own.iterdir() if path.name != "x.tar"}
    assert found
    return found


@pytest.mark.parametrize("row", cases(sidecars.ROWS))
def test_a_forged_sidecar_changes_nothing(row: Row, node: Node) -> None:
    assert sorted(node.read(name_of(row))) == list(range(16))


def name_of(row: Row) -> str:
    return f"set-{sidecars.ROWS.index(row)}"
