"""Parquet through a real daemon: from every storage, in every order, and when decoders fail."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gyre_client import Loader, texts
from gyre_client.command.cli import main
from gyre_client.errors import CorruptSample

from tests.conftest import Daemon, StartDaemon
from tests.daemons import status
from tests.object_server.process import ObjectServerProcess, object_server

COUNTS, GROUP = (250, 1, 130), 20
NUM_CHUNKS = sum(-(-count // GROUP) for count in COUNTS)


def store(folder: Path, image_scale: int = 1) -> list[dict[str, Any]]:
    """Three files, and their rows by pyarrow's own reader."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for number, count in enumerate(COUNTS):
        table = pa.table(
            {
                "id": np.arange(count) + 1000 * number,
                "text": ["wörd " * int(generator.integers(9)) for _ in range(count)],
                "score": pa.array(
                    [None if row % 3 == 0 else row / 2 for row in range(count)], pa.float64()
                ),
                "image": pa.array(
                    [
                        {"bytes": generator.bytes(row % 9 * image_scale), "path": None}
                        for row in range(count)
                    ],
                    pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
                ),
            }
        )
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=GROUP)
    return [row for path in sorted(folder.iterdir()) for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServerProcess]:
    with object_server() as process:
        yield process


def check(batch: Any, rows: list[dict[str, Any]]) -> list[int]:
    """Compare a batch with the rows; returns its sample ids."""
    ids, text, ends = batch["sample_id"].tolist(), texts(batch, "text"), batch["image.offsets"]
    for place, sample_id in enumerate(ids):
        row, image = rows[sample_id], batch["image"][ends[place] : ends[place + 1]]
        assert batch["id"][place] == row["id"]
        assert text[place] == row["text"]
        assert image.numpy().tobytes() == row["image"]["bytes"]
        assert batch["score.present"][place] == (row["score"] is not None)
        assert batch["score"][place] == (row["score"] or 0)
    return [int(each) for each in ids]


def config(folder: Path, server: ObjectServerProcess) -> dict[str, Any]:
    for path in folder.iterdir():
        server.put(f"/data/{path.name}", path.read_bytes())
    names = ",".join(path.name for path in sorted(folder.iterdir()))
    return {
        "local": {"uri": str(folder)},
        "s3": {"uri": "s3://data/", "storage": server.storage_settings},
        "http": {"uri": f"{server.url}/data/{{{names}}}"},
    }


def decoded(daemon: Daemon) -> int:
    return int(status(daemon).cache.num_blocks_fetched)


def test_rows_are_those_of_pyarrow_from_every_storage(
    gyred: StartDaemon, server: ObjectServerProcess, tmp_path: Path
) -> None:
    rows = store(tmp_path / "set")
    daemon = gyred({"datasets": config(tmp_path / "set", server)})
    before = decoded(daemon)
    for name in ("local", "s3", "http"):
        for order in ("full", "block"):
            with Loader(
                name, batch_size=16, tail="pad", order=order, address=daemon.address
            ) as loader:
                seen = {each for batch in loader for each in check(batch, rows)}
            assert seen == set(range(len(rows)))
        assert decoded(daemon) - before == NUM_CHUNKS, "each chunk is decoded once for all jobs"
        before += NUM_CHUNKS


def test_the_order_block_decodes_each_chunk_once_while_the_cache_holds_a_window(
    gyred: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `gyre plan --cost` says, with what `full` costs in its place."""
    rows = store(tmp_path / "set", image_scale=1000)  # a block takes whole pages
    data = sum(16 + len(row["text"].encode()) + len(row["image"]["bytes"]) for row in rows)
    daemon = gyred(
        {"datasets": {"set": {"uri": str(tmp_path / "set")}}, "cache_memory": data * 3 // 4}
    )
    common: dict[str, Any] = {"batch_size": 16, "tail": "pad", "order": "block"}
    common |= {"window_blocks": 3, "prefetch_batches": 1, "address": daemon.address}
    with Loader("set", **common) as loader:
        seen = [each for batch in loader for each in check(batch, rows)]
    assert set(seen) == set(range(len(rows)))
    cache = status(daemon).cache
    assert (cache.num_blocks_fetched, cache.num_past) == (NUM_CHUNKS, 0)
    assert cache.num_evicted > 0, "the cache cannot hold all"
    plan = ["plan", "set", "--cost", "--batch-size", "16", "--window", "3", "--json"]
    assert main([*plan, "--address", daemon.address]) == 0
    estimates = json.loads(capsys.readouterr().out)["estimates"]
    decodes = {each["order"]: each["num_chunks_decoded"] for each in estimates}
    assert decodes["block"] == NUM_CHUNKS < 3 * NUM_CHUNKS < decodes["full"]


def test_a_job_resumes_exactly_on_other_ranks(gyred: StartDaemon, tmp_path: Path) -> None:
    rows = store(tmp_path / "set")
    daemon = gyred({"datasets": {"set": {"uri": str(tmp_path / "set")}}, "cache_memory": 0})
    common: dict[str, Any] = {"batch_size": 16, "order": "block", "window_blocks": 5, "seed": 3}
    with Loader("set", **common, address=daemon.address) as loader:
        whole = [check(batch, rows) for batch in loader]
    with Loader("set", **common, address=daemon.address) as loader:
        for _ in range(4):
            next(loader)
        state = loader.state_dict()
    halves = []
    for rank in range(2):
        with Loader("set", **common, rank=rank, world_size=2, address=daemon.address) as loader:
            loader.load_state_dict(state)
            halves.append([check(batch, rows) for batch in loader])
    assert [a + b for a, b in zip(*halves, strict=True)] == whole[4:]


def test_a_damaged_row_group_is_named(gyred: StartDaemon, tmp_path: Path) -> None:
    store(tmp_path / "set")
    path = tmp_path / "set/part-0.parquet"
    leaf = pq.ParquetFile(path).metadata.row_group(3).column(0)
    daemon = gyred({"datasets": {"set": {"uri": str(tmp_path / "set"), "columns": ["id"]}}})
    data = bytearray(path.read_bytes())
    data[leaf.data_page_offset : leaf.data_page_offset + 8] = b"\xff" * 8
    path.write_bytes(data)
    with (
        Loader("set", batch_size=16, address=daemon.address) as loader,
        pytest.raises(
            CorruptSample, match=r"row group 3 of shard part-0.parquet \(at byte \d+\): "
        ),
    ):
        list(loader)
