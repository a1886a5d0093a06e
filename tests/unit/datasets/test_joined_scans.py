"""The scans of many shards are kept joined: the next opening reads one file for all of them."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_daemon.config import DatasetConfig
from gyre_daemon.datasets.checks import CorruptReports
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.datasets.indexing import shards
from gyre_daemon.datasets.indexing.catalog import Catalog
from gyre_daemon.datasets.indexing.unpacked import UnpackedShards
from gyre_daemon.datasets.scanning import Scanner
from gyre_daemon.datasets.sidecars import SUFFIX, SidecarStore
from gyre_daemon.monitoring.metrics import Metrics
from gyre_daemon.runtime.threads import FairExecutor
from gyre_daemon.storage.engine.endpoint import EndpointOptions
from gyre_daemon.storage.sources.opener import StorageOpener
from gyre_daemon.workers.compute_workers import ComputeServer
from webdataset import TarWriter

NUM_SHARDS = 20


class Node:
    """Opens a folder of tars as a daemon does, and counts the work."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.own = folder / "data", folder / "own"
        self.data.mkdir()
        for number in range(NUM_SHARDS):
            self.write(number, number % 3 + 1)
        self.num_scanned = self.num_read = 0
        scan, load_all = Scanner.scan, SidecarStore.load_all

        async def scanned(scanner: Scanner, *args: Any, **kwargs: Any) -> Any:
            self.num_scanned += 1
            return await scan(scanner, *args, **kwargs)

        async def loaded(store: SidecarStore, wanted: Any) -> Any:
            self.num_read += len(wanted) if store._suffix == SUFFIX else 0
            return await load_all(store, wanted)

        monkeypatch.setattr(Scanner, "scan", scanned)
        monkeypatch.setattr(SidecarStore, "load_all", loaded)

    def write(self, number: int, num_samples: int, **more: str) -> None:
        with TarWriter(str(self.data / f"{number:02}.tar"), mtime=0) as writer:
            for sample in range(num_samples):
                members = {"bin": bytes(100 * number + sample), "cls": number}
                writer.write({"__key__": f"{number}-{sample}", **members, **more})

    @property
    def joined(self) -> Path:
        """The file of all scans; the only index in the daemon's folder."""
        (path,) = self.own.glob("*.gyre-index")
        return path

    def open(self, *, orders_index: bool = False) -> tuple[Dataset, int, int]:
        """The dataset, how many shards were scanned, and how many sidecars asked for."""
        self.num_scanned = self.num_read = 0
        dataset = asyncio.run(self._open(orders_index=orders_index))
        return dataset, self.num_scanned, self.num_read

    async def _open(self, *, orders_index: bool) -> Dataset:
        with ThreadPoolExecutor(2) as threads, closing(ComputeServer()) as compute_server:
            opener = StorageOpener(
                FairExecutor(threads, 2), EndpointOptions(16, 10.0, False), Metrics()
            )
            config = DatasetConfig(str(self.data), "webdataset", {"optional": ["txt"]})
            with closing(
                Catalog(
                    {"set": config},
                    opener,
                    SidecarStore("", self.own),
                    None,
                    allow_ad_hoc=False,
                    compute_server=compute_server,
                    unpacked=UnpackedShards(self.own, 0),
                    reports=CorruptReports(self.own),
                )
            ) as catalog:
                if orders_index:
                    async for _ in catalog.index("set", config):
                        pass
                return await catalog.open("set", config)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_the_second_opening_reads_one_file(node: Node) -> None:
    first, num_scanned, _ = node.open()
    assert num_scanned == NUM_SHARDS
    for path in node.data.glob("*.gyre-index"):
        path.unlink()
    second, num_scanned, num_read = node.open()
    assert (num_scanned, num_read) == (0, 1)
    assert_same(first, second)


def test_a_shard_that_changed_is_scanned_and_the_file_made_again(node: Node) -> None:
    node.open()
    node.write(7, 5)
    changed, num_scanned, num_read = node.open()
    assert (num_scanned, num_read) == (1, 1 + NUM_SHARDS)
    again, num_scanned, num_read = node.open()
    assert (num_scanned, num_read) == (0, 1)
    assert_same(changed, again)


@pytest.mark.parametrize("cut", [0, 100, -8])
def test_a_damaged_file_is_made_again(node: Node, cut: int) -> None:
    first, _, _ = node.open()
    good = node.joined.read_bytes()
    node.joined.write_bytes(good[:cut])
    second, num_scanned, num_read = node.open()
    assert (num_scanned, num_read) == (0, 1 + NUM_SHARDS)
    assert_same(first, second)
    assert node.joined.read_bytes() == good


def test_a_file_that_others_may_write_does_not_count(node: Node) -> None:
    node.open()
    node.joined.chmod(0o666)
    assert node.open()[1:] == (0, 1 + NUM_SHARDS)


def test_an_ordered_index_makes_the_file_again(node: Node) -> None:
    node.open()
    before = node.joined.stat().st_ino
    node.open(orders_index=True)
    assert node.joined.stat().st_ino != before


def test_shards_with_other_members_are_not_joined(node: Node) -> None:
    node.write(3, 2, txt="words")
    first, _, _ = node.open()
    assert not [*node.own.glob("*.gyre-index")]
    second, num_scanned, num_read = node.open()
    assert (num_scanned, num_read) == (0, 1 + NUM_SHARDS)
    assert_same(first, second)


def test_damage_is_not_lost_where_scans_are_joined() -> None:
    """Scans of sound Parquet files lack the array that the damaged one has."""
    scans = [{"chunk": np.arange(3)} for _ in range(19)]
    assert shards._joined([*scans, {"chunk": np.arange(3)}])
    assert shards._joined([*scans, {"chunk": np.arange(3), "damaged": np.ones(1)}]) is None
    assert shards._joined([{"chunk": np.arange(3), "damaged": np.ones(1)}, *scans]) is None
    assert shards._joined([*scans, None]) is None


def test_large_scans_are_not_joined(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_MAX_JOINED_BYTES", 1000)
    node.open()
    assert not [*node.own.glob("*.gyre-index")]
    assert node.open()[1:] == (0, 1 + NUM_SHARDS)


@pytest.mark.parametrize(
    "rows",
    [
        np.full((1, 2), 2),
        np.full((1, 3), 1),
        np.array([[5, -1]]),
        np.full((2, 2), 2),
        np.full(2, 2),
        np.full((1, 2), 2, np.int32),
    ],
)
def test_rows_that_do_not_add_up_are_refused(rows: np.ndarray) -> None:
    joined = {"start": np.arange(5), shards._ROWS: rows}
    with pytest.raises(ValueError, match=r"it is not complete|array"):
        shards._check_joined(2, joined)


def assert_same(one: Dataset, other: Dataset) -> None:
    assert one.fingerprint == other.fingerprint
    assert one.index.digest() == other.index.digest()
    assert one.num_samples == other.num_samples
